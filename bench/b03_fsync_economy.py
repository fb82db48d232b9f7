"""B3: how often the disk is asked to write, for a message among many and for a turn on its own."""

import statistics
import time
from typing import Any

from bench import floor, load, subject
from bench.api import Api, message
from bench.b01_admit_latency import check
from bench.pairs import Figure
from bench.run import MODEL, Bench, Size, admitting

CLIENTS = 64
ROUNDS = 3
SYNCS_MAX = 0.1
COMMITS_MAX = 2

STATS_S = 11.0
"""A backend hands in its counts at the latest ten seconds after it went idle."""

SYNCS_SQL = "select sum(fsyncs) from pg_stat_io where object = 'wal'"
BATCHES_SQL = "select sum(batch_no) from writer"
TURN_DEADLINE_S = 20.0


def measure(size: Size) -> list[Figure]:
    """Many messages, then turns one after the other."""
    with admitting() as bench:
        rounds = [_messages(bench, size) for _ in range(ROUNDS if size.pairs > 1 else 1)]
    figure = Figure(
        bench="B3",
        name=f"WAL syncs a message at {CLIENTS}",
        value=statistics.median(r["syncs"] / r["acked"] for r in rounds),
        target=SYNCS_MAX,
        disk_ms=statistics.median(r["disk_ms"] for r in rounds),
        detail=f"{rounds[0]['acked']} messages, {len(rounds)} rounds",
        raw={"rounds": rounds},
    )
    return [figure, *_turns(size)]


def _messages(bench: Bench, size: Size) -> dict[str, Any]:
    sessions = bench.sessions(CLIENTS)
    time.sleep(STATS_S)
    before = floor.fetch(bench.subject.database_url, SYNCS_SQL)
    disk_ms = bench.disk_ms()
    loaded = load.run(
        load.Order(
            url=bench.subject.url,
            api_key=bench.subject.api_key,
            sessions=sessions,
            clients=CLIENTS,
            posts_max=size.messages,
            seconds_max=120.0,
        )
    )
    check(loaded)
    time.sleep(STATS_S)
    after = floor.fetch(bench.subject.database_url, SYNCS_SQL)
    return {"syncs": int(after - before), "acked": loaded.acked, "disk_ms": disk_ms, "per_s": loaded.per_s}


def _turns(size: Size) -> list[Figure]:
    """Plain turns: a message, a reply in text."""
    with subject.running(worker=True, settings={"bus": "inprocess"}) as server:
        api = Api(server.url, server.api_key)
        session = api.make_sessions(api.make_agent(MODEL), 1)[0]
        _turn(api, session)
        time.sleep(STATS_S)
        disk_ms = floor.fdatasync_ms(server.data)
        commits, syncs = (floor.fetch(server.database_url, sql) for sql in (BATCHES_SQL, SYNCS_SQL))
        for _ in range(size.turns):
            _turn(api, session)
        commits = int(floor.fetch(server.database_url, BATCHES_SQL) - commits)
        time.sleep(STATS_S)
        syncs = int(floor.fetch(server.database_url, SYNCS_SQL) - syncs)
        api.close()
    raw = {"turns": size.turns, "commits": commits, "syncs": syncs}
    value = commits / size.turns - 1
    detail = f"{size.turns} turns one after the other; the one that admits the message is not counted"
    return [
        Figure(
            bench="B3", name="commits a plain turn", value=value, target=COMMITS_MAX, disk_ms=disk_ms, detail=detail,
            raw=raw,
        ),
        Figure(
            bench="B3", name="WAL syncs a plain turn, all in all", value=syncs / size.turns, disk_ms=disk_ms,
            detail="the message's, the server's own and PostgreSQL's included",
        ),
    ]  # fmt: skip


def _turn(api: Api, session: str) -> None:
    """Send a message and wait until the session is idle again."""
    api.call("POST", f"/v1/sessions/{session}/events", message("hello"))
    until = time.monotonic() + TURN_DEADLINE_S
    while api.call("GET", f"/v1/sessions/{session}")["status"] != "idle":
        if time.monotonic() > until:
            raise RuntimeError(f"a plain turn took longer than {TURN_DEADLINE_S:g} s")
        time.sleep(0.005)
