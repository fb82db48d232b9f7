"""Reads of events end by rows and by bytes, go on without gap or repeat, and touch no body that they don't give."""

import json
from base64 import b64encode
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from random import Random
from typing import Any
from uuid import UUID

import pytest
from tests.ledger.ledger_sessions import WORKSPACE, open_ledger

from perdure.domain.event import Event, encode
from perdure.domain.ids import primary_thread
from perdure.domain.session import SessionConfig
from perdure.ports.ledger import (
    READ_BYTES_MAX,
    READ_ROWS_MAX,
    Advance,
    Arrival,
    CreateSession,
    EventQuery,
    Ledger,
    ModelReplied,
    OutBlock,
    Perform,
    SeenEvent,
    is_full,
)
from perdure.ports.model import Usage
from perdure.postgres.pool import connect
from perdure.postgres.queries import FEED_SQL, event_read
from perdure.testing.oracle import OracleLedger

SESSION = UUID(int=4711)
BLOCK_BYTES = 8192
BODY_BYTES = 1_000_000
BODIES = 40

WORST_PLANS = {
    "as it comes": {},
    "nested loops over whole tables": {
        "enable_indexscan": "off",
        "enable_indexonlyscan": "off",
        "enable_bitmapscan": "off",
        "enable_hashjoin": "off",
        "enable_mergejoin": "off",
    },
    "bitmaps, sorted": {"enable_indexscan": "off", "enable_seqscan": "off", "enable_hashjoin": "off"},
}


@asynccontextmanager
async def opened(kind: str, url: str) -> AsyncGenerator[Ledger]:
    """The oracle, or a ledger in PostgreSQL."""
    if kind == "oracle":
        yield OracleLedger()
        return
    async with open_ledger(url) as ledger:
        yield ledger


@pytest.fixture(params=["oracle", "postgres"])
async def ledger(request: pytest.FixtureRequest, database_url: str) -> AsyncGenerator[Ledger]:
    async with opened(request.param, database_url) as made:
        yield made


def body_of(size: int) -> bytes:
    """A body that PostgreSQL can't make small, so that it's stored apart from its row."""
    text = b64encode(Random(size).randbytes(size)).decode()[:size]
    return encode({"content": [{"type": "text", "text": text}]})


async def make_session(ledger: Ledger, *sizes: int) -> None:
    """The session, with a waiting message of each size."""
    config = SessionConfig(session_id=SESSION, title=None, metadata=b"{}", agent=b"{}", environment=b"{}")
    await ledger.create(
        CreateSession(
            session_id=SESSION,
            workspace_id=WORKSPACE,
            profile="managed_agents",
            agent_id=None,
            agent_version=1,
            environment_id=None,
            model="m",
            config=config,
            arrivals=tuple(Arrival(kind="message", body=body_of(size)) for size in sizes),
        )
    )


async def take_turn(ledger: Ledger, number: int) -> None:
    """One turn, which settles what waits: rows that refer to the rows of the inputs."""
    look = Advance(
        session_id=SESSION,
        thread_id=primary_thread(SESSION),
        worker_id=UUID(int=1),
        command_id=UUID(int=2 * number),
    )
    claimed = await ledger.advance(look)
    assert isinstance(claimed, Perform)
    outcome = ModelReplied(
        step_id=claimed.steps[0].id,
        blocks=(OutBlock(index=0, kind="message", body=encode({"text": "hi"})),),
        calls=(),
        transcript=encode([{"type": "text", "text": "hi"}]),
        stop_reason="end_turn",
        stop_details=None,
        usage=Usage(input_tokens=1, output_tokens=1),
    )
    await ledger.advance(
        Advance(
            session_id=SESSION,
            thread_id=look.thread_id,
            worker_id=look.worker_id,
            command_id=UUID(int=2 * number + 1),
            lease=claimed.lease,
            outcome=outcome,
        )
    )


async def list_reads(ledger: Ledger, *, descending: bool = False, limit: int = READ_ROWS_MAX) -> list[list[SeenEvent]]:
    """The reads of a whole list, made until one is not full."""
    reads: list[list[SeenEvent]] = []
    after: int | None = None
    while True:
        query = EventQuery(session_id=SESSION, after_seq=after, descending=descending, limit=limit)
        reads.append(await ledger.read_events(query))
        if not is_full(reads[-1], limit):
            return reads
        after = reads[-1][-1].event.seq


async def feed_reads(ledger: Ledger, limit: int = READ_ROWS_MAX) -> list[list[SeenEvent]]:
    """The reads of the whole feed."""
    reads: list[list[SeenEvent]] = []
    after = 0
    while True:
        read = await ledger.read_feed(SESSION, after, limit)
        assert read is not None
        reads.append(read)
        if not is_full(read, limit):
            return reads
        after = read[-1].event.seq


def check_bounds(reads: list[list[SeenEvent]], limit: int) -> list[int]:
    """Each read keeps its bounds and uses them up, but for the last. The sequences, in order."""
    for read in reads:
        assert len(read) <= limit
        assert sum(seen.size_bytes for seen in read[:-1]) < READ_BYTES_MAX
    for read in reads[:-1]:
        assert read
        assert len(read) == limit or sum(seen.size_bytes for seen in read) >= READ_BYTES_MAX
    return [seen.event.seq for read in reads for seen in read]


def check_referred(reads: list[list[SeenEvent]]) -> int:
    """Every row comes with the row it refers to; how many do."""
    whole: dict[int, Event] = {seen.event.seq: seen.event for read in reads for seen in read}
    for seen in (seen for read in reads for seen in read):
        assert seen.referred == (None if seen.event.ref_seq is None else whole[seen.event.ref_seq])
    return sum(seen.referred is not None for read in reads for seen in read)


@pytest.mark.parametrize("limit", [3, READ_ROWS_MAX])
@pytest.mark.parametrize("descending", [False, True])
async def test_a_list_goes_on_without_gap_where_a_read_ended_by_bytes(
    ledger: Ledger, *, descending: bool, limit: int
) -> None:
    await make_session(ledger, *[300_000] * 3, 20, 20, *[300_000] * 6)
    reads = await list_reads(ledger, descending=descending, limit=limit)
    seqs = check_bounds(reads, limit)
    head = await ledger.read_head(SESSION)
    assert head is not None
    assert seqs == (list(range(head, 0, -1)) if descending else list(range(1, head + 1)))
    assert [len(read) < limit for read in reads[:-1]] == [limit > 3] * (len(reads) - 1)


@pytest.mark.parametrize("descending", [False, True])
async def test_a_read_has_one_row_at_least_and_ends_with_a_row_larger_than_its_bytes(
    ledger: Ledger, *, descending: bool
) -> None:
    await make_session(ledger, 3_000_000, 2_000_000, READ_BYTES_MAX)
    query = EventQuery(
        session_id=SESSION, types=(("input.received", None),), descending=descending, limit=READ_ROWS_MAX
    )
    (first,) = await ledger.read_events(query)
    assert first.size_bytes > READ_BYTES_MAX
    messages = [r for r in await list_reads(ledger, descending=descending) if r[-1].event.type == "input.received"]
    assert [len(r) for r in messages][-2:] == [1, 1]


async def test_a_row_counts_for_the_body_that_it_refers_to(ledger: Ledger) -> None:
    await make_session(ledger, *[400_000] * 6)
    for number in range(6):
        await take_turn(ledger, number)
    reads = await feed_reads(ledger)
    head = await ledger.read_head(SESSION)
    assert head is not None
    assert check_bounds(reads, READ_ROWS_MAX) == list(range(1, head + 1))
    assert check_referred(reads) >= 6
    assert len(reads) >= 12 * 400_000 // (READ_BYTES_MAX + 400_000)
    assert await ledger.read_feed(SESSION, head, READ_ROWS_MAX) == []


async def test_small_rows_end_a_read_by_number_alone(ledger: Ledger) -> None:
    await make_session(ledger, *[20] * (READ_ROWS_MAX + 50))
    lengths = [len(r) for r in await list_reads(ledger)]
    assert lengths[0] == READ_ROWS_MAX
    assert len(lengths) == 2


async def test_both_ledgers_end_their_reads_at_the_same_rows(database_url: str) -> None:
    found: list[list[list[list[tuple[int, int]]]]] = []
    for kind in ("oracle", "postgres"):
        async with opened(kind, database_url) as ledger:
            await make_session(ledger, 10, 500_000, 600_000, READ_BYTES_MAX, 3_000_000, 1, *[70_000] * 40)
            for number in range(3):
                await take_turn(ledger, number)
            all_reads = [
                await feed_reads(ledger),
                await feed_reads(ledger, 7),
                await list_reads(ledger),
                await list_reads(ledger, descending=True),
            ]
            found.append([[[(s.event.seq, s.size_bytes) for s in r] for r in reads] for reads in all_reads])
    assert found[0] == found[1]


async def touched_blocks(url: str, sql: str, parameters: list[Any], plans: dict[str, str]) -> tuple[int, str]:
    """How many blocks a read looked at, bodies stored apart from their rows included; and the plan, for the message."""
    connection = await connect(url, application_name="test", hot=True)
    try:
        for name, value in plans.items():
            await connection.execute(f"set {name} = {value}")
        given = await connection.fetchval(
            "explain (analyze, buffers, serialize binary, format json) " + sql, *parameters
        )
    finally:
        await connection.close()
    [explained] = json.loads(given)
    written = explained["Serialization"]
    return (
        sum(part["Shared Hit Blocks"] + part["Shared Read Blocks"] for part in (explained["Plan"], written)),
        given,
    )


@pytest.mark.parametrize("plans", WORST_PLANS.values(), ids=WORST_PLANS.keys())
@pytest.mark.parametrize("name", ["list", "list, newest first", "feed"])
async def test_a_read_touches_few_bodies_whatever_the_plan(database_url: str, name: str, plans: dict[str, str]) -> None:
    """Never analysed, and then with plans that no statistics could make worse."""
    async with open_ledger(database_url) as ledger:
        await make_session(ledger, *[BODY_BYTES] * BODIES)
        await take_turn(ledger, 0)
    if name == "feed":
        sql, parameters = FEED_SQL, [SESSION, 0, READ_ROWS_MAX, READ_BYTES_MAX]
    else:
        query = EventQuery(session_id=SESSION, descending=name != "list", limit=READ_ROWS_MAX)
        sql, parameters = event_read(query)
    blocks, plan = await touched_blocks(database_url, sql, parameters, plans)
    # Two bodies, each chunk of them looked up in an index of its own.
    assert blocks < 4 * (READ_BYTES_MAX + BODY_BYTES) // BLOCK_BYTES, plan
    assert blocks > READ_BYTES_MAX // BLOCK_BYTES, "the bodies that were given are not counted"
