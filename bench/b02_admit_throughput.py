"""B2: messages acknowledged a second, over one-call admissions of pgbench with 64 clients."""

import statistics
import threading

from bench import floor, load
from bench.b01_admit_latency import check
from bench.pairs import Figure, Pair, of_pairs, run_pairs
from bench.run import Bench, Size, admitting

FLOOR_CLIENTS = 64
TARGETS = {64: 1.2, 256: 1.5}
CONNECTIONS_MAX = 4
WARM_S = 1.5
"""A burst of new connections is let in one by one while the server is busy; that is not what is measured here."""

PROCESSORS = ("server_cpu_us", "postgres_cpu_us", "client_cpu_us")

CONNECTIONS_SQL = """
select count(*) from pg_stat_activity where backend_type = 'client backend' and application_name like 'perdure-%'"""


def measure(size: Size) -> list[Figure]:
    """64 and 256 sessions in turn with the floor."""
    rows: dict[int, list[Pair]] = {clients: [] for clients in TARGETS}

    def one() -> Pair:
        for clients, pair in _round(bench, size).items():
            rows[clients].append(pair)
        return rows[FLOOR_CLIENTS][-1]

    with admitting() as bench:
        run_pairs(one, pairs_min=size.pairs, pairs_max=size.pairs_max)
    figures = [
        of_pairs(
            "B2", f"acks/s at {clients} / floor", pairs, target=TARGETS[clients], sense="at least",
            pairs_min=size.pairs, unit="/s",
        )
        for clients, pairs in rows.items()
    ]  # fmt: skip
    every = [p for pairs in rows.values() for p in pairs]
    connections = max(p.notes["connections"] for p in every)
    figures.append(
        Figure(bench="B2", name="PostgreSQL connections", value=connections, target=CONNECTIONS_MAX, sense="at most")
    )
    parts = [f"{statistics.median(p.notes[k] for p in every):.0f} us {k[:-7]}" for k in PROCESSORS]
    figures.append(
        Figure(
            bench="B2",
            name="processor time a message",
            value=sum(statistics.median(p.notes[k] for p in every) for k in PROCESSORS),
            unit="us",
            detail=f"{', '.join(parts)}, in all runs; what a core is busy with nobody else gets",
        )
    )
    lost = sum(p.notes["lost"] for p in every)
    acked = sum(p.notes["acked"] for p in every)
    refused = sum(p.notes["refused"] for p in every)
    detail = f"of {acked} acknowledged and read back; {refused} refused"
    figures.append(Figure(bench="B2", name="acknowledged, then lost", value=lost, target=0, detail=detail))
    return figures


def _round(bench: Bench, size: Size) -> dict[int, Pair]:
    disks = [bench.disk_ms()]
    postgres = floor.pgbench(bench.subject.database_url, clients=FLOOR_CLIENTS, seconds=size.slice_s)
    loads: dict[int, tuple[load.Loaded, int]] = {}
    for clients in TARGETS:
        loads[clients] = admit(bench, clients, size)
        disks.append(bench.disk_ms())
    return {
        clients: Pair(
            subject=loaded.per_s,
            floor=postgres.per_s,
            disk_ms=statistics.median(disks),
            notes={
                "p50_ms": loaded.p50_ms,
                "p99_ms": loaded.p99_ms,
                "server_cpu_us": loaded.server_cpu_us,
                "postgres_cpu_us": loaded.postgres_cpu_us,
                "client_cpu_us": loaded.client_cpu_us,
                "acked": loaded.acked,
                "refused": loaded.refused,
                "lost": loaded.lost,
                "connections": connections,
            },
        )
        for clients, (loaded, connections) in loads.items()
    }


def admit(bench: Bench, clients: int, size: Size) -> tuple[load.Loaded, int]:
    """A slice of load, each client on a new session of its own; and the connections seen in the middle of it."""
    seen: list[int] = []

    def look() -> None:
        seen.append(floor.fetch(bench.subject.database_url, CONNECTIONS_SQL))

    sessions = bench.sessions(clients)
    timer = threading.Timer(WARM_S + size.slice_s / 2 + 0.3, look)
    timer.start()
    loaded = load.run(
        load.Order(
            url=bench.subject.url,
            api_key=bench.subject.api_key,
            sessions=sessions,
            clients=clients,
            seconds_max=size.slice_s,
            warm_s=WARM_S,
            watched=bench.watched,
        )
    )
    timer.join()
    check(loaded)
    return loaded, max(seen)
