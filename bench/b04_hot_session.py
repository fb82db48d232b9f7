"""B4: 64 writers to one session, over 64 writers to 64 sessions."""

from bench import load
from bench.b01_admit_latency import check
from bench.b02_admit_throughput import WARM_S, admit
from bench.pairs import Figure, Pair, of_pairs, run_pairs
from bench.run import Bench, Size, admitting

CLIENTS = 64
TARGET = 0.5
RATE_MAX = 12_000
"""More than any run admits a second; decides how many sessions are ready for when a mailbox is full."""


def measure(size: Size) -> list[Figure]:
    """All clients write to one session; when its mailbox is nearly full, all go on with the next."""
    with admitting() as bench:
        pairs = run_pairs(lambda: _pair(bench, size), pairs_min=size.pairs, pairs_max=size.pairs_max)
    figure = of_pairs(
        "B4", "acks/s on one session / on 64", pairs, target=TARGET, sense="at least", pairs_min=size.pairs, unit="/s"
    )
    disordered = sum(p.notes["disordered"] for p in pairs)
    acked = sum(p.notes["acked"] for p in pairs)
    detail = f"of {acked} acknowledged, lost, doubled or listed against the order of sending and acknowledgement"
    return [figure, Figure(bench="B4", name="out of order", value=disordered, target=0, detail=detail)]


def _pair(bench: Bench, size: Size) -> Pair:
    before_ms = bench.disk_ms()
    spread, _ = admit(bench, CLIENTS, size)
    sessions = bench.sessions(2 + int((WARM_S + size.slice_s) * RATE_MAX / load.SESSION_POSTS_MAX))
    hot = load.run(
        load.Order(
            url=bench.subject.url,
            api_key=bench.subject.api_key,
            sessions=sessions,
            clients=CLIENTS,
            shared=True,
            seconds_max=size.slice_s,
            warm_s=WARM_S,
        )
    )
    check(hot)
    return Pair(
        subject=hot.per_s,
        floor=spread.per_s,
        disk_ms=(before_ms + bench.disk_ms()) / 2,
        notes={
            "acked": hot.acked,
            "refused": hot.refused,
            "disordered": hot.disordered + hot.lost,
            "p99_ms": hot.p99_ms,
        },
    )
