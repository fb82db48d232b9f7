"""B1: how long one message takes to be acknowledged, over what PostgreSQL and HTTP need without us."""

from bench import floor, load
from bench.pairs import SLOW_DISK_MS, Figure, Pair, of_pairs, run_pairs
from bench.run import Bench, Size, admitting

TARGET_SLOW_DISK = 1.15
TARGET_FAST_DISK = 1.5


def measure(size: Size) -> list[Figure]:
    """One client, one session, one request outstanding."""
    with admitting() as bench, floor.raw_http() as raw_url:
        pairs = run_pairs(lambda: _pair(bench, raw_url, size), pairs_min=size.pairs, pairs_max=size.pairs_max)
    disk_ms = min(p.disk_ms for p in pairs)
    target = TARGET_SLOW_DISK if disk_ms >= SLOW_DISK_MS else TARGET_FAST_DISK
    figure = of_pairs("B1", "admit p50 / floor", pairs, target=target, sense="at most", pairs_min=size.pairs, unit="ms")
    return [figure]


def _pair(bench: Bench, raw_url: str, size: Size) -> Pair:
    before_ms = bench.disk_ms()
    seconds = max(1.0, size.latency_posts * 0.006)
    postgres = floor.pgbench(bench.subject.database_url, clients=1, seconds=seconds)
    raw = load.run(_order(raw_url, "none", ["raw"], size, read_back=False))
    subject = load.run(_order(bench.subject.url, bench.subject.api_key, bench.sessions(1), size))
    check(subject)
    return Pair(
        subject=subject.p50_ms,
        floor=postgres.p50_ms + raw.p50_ms,
        disk_ms=(before_ms + bench.disk_ms()) / 2,
        notes={"postgres_p50_ms": postgres.p50_ms, "http_p50_ms": raw.p50_ms, "subject_p99_ms": subject.p99_ms},
    )


def _order(url: str, key: str, sessions: list[str], size: Size, *, read_back: bool = True) -> load.Order:
    return load.Order(
        url=url,
        api_key=key,
        sessions=sessions,
        clients=1,
        posts_max=size.latency_posts,
        seconds_max=30.0,
        warm_s=0.05,
        read_back=read_back,
    )


def check(loaded: load.Loaded) -> None:
    """A figure of a server that loses what it acknowledged is worth nothing."""
    faults = (loaded.lost, loaded.doubled, loaded.disordered)
    if any(faults):
        raise RuntimeError("acknowledged events were lost, doubled or out of order: {} {} {}".format(*faults))
