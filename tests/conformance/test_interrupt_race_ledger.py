"""G11 without sockets: 1,000 turns on each ledger, an interrupt at a random place between their commits."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from random import Random
from typing import Final
from uuid import UUID

import msgspec
import pytest

from perdure.domain.errors import Fenced, Refused
from perdure.domain.event import encode
from perdure.domain.ids import primary_thread
from perdure.domain.session import SessionConfig
from perdure.domain.step import Step
from perdure.ports.ledger import (
    Accept,
    Advance,
    Answered,
    Arrival,
    CreateSession,
    Idle,
    Ledger,
    Perform,
    SeenEvent,
    StepOutcome,
    Stopped,
    Working,
)
from perdure.postgres.ledger import PostgresLedger
from perdure.postgres.pool import ReadPool
from perdure.testing.oracle import OracleLedger
from perdure.testing.step_outcomes import Mix, random_outcome

RACES: Final = 1_000
SIDE_BY_SIDE: Final = 25
"""Races at once, so that the writers of PostgreSQL have batches."""

DEADLINE_S: Final = 30.0
MIX: Final = Mix(calls=0.4, retryable=0.0, permanent=0.0, silent_tools=True)


class Race:
    """One session, its worker and its interrupter. Both give way a random number of times before each commit."""

    def __init__(self, ledger: Ledger, workspace_id: UUID, number: int, steps: int) -> None:
        self.random = Random(f"interrupt race {number}")
        self.ledger = ledger
        self.workspace_id = workspace_id
        self.session_id = UUID(int=self.random.getrandbits(128))
        self.thread_id = primary_thread(self.session_id)
        self.worker_id = UUID(int=self.random.getrandbits(128))
        self.steps = steps

    async def run(self) -> str:
        """How the interrupt ended, judged by the whole feed."""
        await self._create()
        async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
            group.create_task(self._work())
            group.create_task(self._interrupt())
        return self._judge(await self.ledger.read_feed(self.session_id, 0, 500) or [])

    async def _give_way(self, most: int) -> None:
        for _ in range(self.random.randrange(most)):
            await asyncio.sleep(0)

    def _fresh(self) -> UUID:
        return UUID(int=self.random.getrandbits(128))

    async def _create(self) -> None:
        config = SessionConfig(
            session_id=self.session_id,
            title=None,
            metadata=b"{}",
            agent=encode({"name": "a", "model": {"id": "m"}, "tools": []}),
            environment=b"{}",
        )
        created = await self.ledger.create(
            CreateSession(
                session_id=self.session_id,
                workspace_id=self.workspace_id,
                profile="managed_agents",
                agent_id=None,
                agent_version=1,
                environment_id=None,
                model="m",
                config=config,
                arrivals=(Arrival(kind="message", body=encode({"content": [{"type": "text", "text": "go"}]})),),
            )
        )
        assert not isinstance(created, Refused), created

    async def _interrupt(self) -> None:
        await self._give_way(self.steps)
        accepted = await self.ledger.accept(
            Accept(
                session_id=self.session_id,
                workspace_id=self.workspace_id,
                arrivals=(Arrival(kind="interrupt", body=b"{}"),),
            )
        )
        assert not isinstance(accepted, Refused), accepted

    async def _work(self) -> None:
        """What the engine does: claim, perform, report, and stop what it is told to stop."""
        await self._give_way(self.steps)
        answered = await self._advance()
        flying: list[Step] = []
        while not isinstance(answered, (Idle, Fenced)):
            assert isinstance(answered, (Perform, Working)), answered
            if isinstance(answered, Perform):
                flying += answered.steps
            await self._give_way(self.steps)
            if not flying:
                answered = await self._advance(answered)
                continue
            step = flying.pop(0)
            stop = isinstance(answered, Working) and answered.stop
            outcome = Stopped(step_id=step.id) if stop else random_outcome(self.random, step, MIX)
            answered = await self._advance(answered, outcome)

    async def _advance(self, answered: Perform | Working | None = None, outcome: StepOutcome | None = None) -> Answered:
        return await self.ledger.advance(
            Advance(
                session_id=self.session_id,
                thread_id=self.thread_id,
                worker_id=self.worker_id,
                command_id=self._fresh(),
                lease=None if answered is None else answered.lease,
                outcome=outcome,
            )
        )

    def _judge(self, feed: list[SeenEvent]) -> str:
        events = [s.event for s in feed]
        kinds = Counter((e.type, e.kind) for e in events)
        told = " ".join(f"{e.type}/{e.kind}" for e in events)
        assert [e.seq for e in events] == list(range(1, len(events) + 1)), told
        phases = [e.kind for e in events if e.type == "session.phase"]
        assert phases == ["active", "idle"], told
        (received,) = [e for e in events if (e.type, e.kind) == ("input.received", "interrupt")]
        assert received.processed_seq is not None, told
        assert kinds["input.settled", "interrupt"] == (received.processed_seq != received.seq), told
        assert kinds["input.settled", "message"] == 1, told
        assert kinds["step.model.started", ""] == kinds["step.model.ended", ""], told
        assert kinds["item.opened", "tool"] == kinds["item.closed", "tool"], told
        assert kinds["session.error", ""] == 0, told
        ends = [(e.seq, msgspec.json.decode(e.snap)["outcome"]) for e in events if e.type == "turn.ended"]
        if not ends:
            return "before the claim"
        ((end_seq, outcome),) = ends
        assert (outcome == "interrupted") == (received.seq < end_seq), told
        last = [e.type for e in events if e.seq > received.seq]
        assert outcome == "interrupted" or last == [], told
        return outcome


async def race_all(make: Callable[[int], Awaitable[str]]) -> Counter[str]:
    """Every race, some of them beside each other."""
    found: Counter[str] = Counter()
    for start in range(0, RACES, SIDE_BY_SIDE):
        found.update(await asyncio.gather(*(make(n) for n in range(start, start + SIDE_BY_SIDE))))
    return found


@pytest.mark.rule("MA-G11", "MA-C8.2", "MA-C6.1", "MA-C8.10")
async def test_a_thousand_interrupts_race_the_end_on_the_oracle() -> None:
    ledger, workspace = OracleLedger(), UUID(int=1)
    found = await race_all(lambda number: Race(ledger, workspace, number, steps=6).run())
    assert min(found["interrupted"], found["before the claim"], found["completed"] + found["refused"]) > 20, found


@pytest.mark.rule("MA-G11", "MA-C8.2", "MA-C6.1", "MA-C8.10")
async def test_a_thousand_interrupts_race_the_end_on_postgres(database_url: str) -> None:
    pool = ReadPool(database_url)
    ledger, workspace = PostgresLedger(database_url, pool), UUID(int=1)
    await pool.execute("insert into workspace (id, name) values ($1, 'races')", workspace)
    ledger.start()
    try:
        found = await race_all(lambda number: Race(ledger, workspace, number, steps=400).run())
    finally:
        await ledger.stop()
        await pool.close()
    assert min(found["interrupted"], found["before the claim"], found["completed"] + found["refused"]) > 20, found
