"""The embedded engine between its answers: what reaches it at the wrong moment is not lost, and what is not its own is not begun."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest

from perdure import telemetry
from perdure.domain import ids
from perdure.domain.control import STOP_GRACE_MS
from perdure.domain.errors import InvariantViolation, Unavailable
from perdure.domain.step import Step
from perdure.domain.turn import Lease
from perdure.engines import embedded
from perdure.engines.embedded import SWEEP_ROWS, EmbeddedEngine
from perdure.ports.ledger import (
    Advance,
    Answered,
    Committed,
    Done,
    Idle,
    ModelErred,
    Perform,
    Release,
    StepOutcome,
    Stopped,
    Work,
    Working,
)
from perdure.testing.processes import until

WAIT_S = 10.0
AT = datetime(2026, 1, 1, tzinfo=UTC)


class Seat:
    """A worker's place that a test may take away."""

    def __init__(self) -> None:
        self.id = uuid4()
        self.safe = True

    def may_start(self) -> bool:
        return self.safe


class ScriptedLedger:
    """Answers each look by a function of the command, and keeps the commands."""

    def __init__(self) -> None:
        self.commands: list[Advance] = []
        self.released: list[Release] = []
        self.answer: Callable[[Advance], Answered] = lambda _: Idle()
        self.held = asyncio.Event()
        self.held.set()
        self.asked = asyncio.Event()
        self.turns: list[tuple[Work, UUID]] = []
        self.looks = 0

    async def advance(self, command: Advance) -> Answered:
        self.commands.append(command)
        answer = self.answer(command)
        self.asked.set()
        await self.held.wait()
        return answer

    async def release(self, command: Release) -> Done:
        self.released.append(command)
        return Done()

    async def read_work(self, limit: int, after: Work | None = None) -> list[Work]:
        del limit, after
        return []

    async def read_held(self, worker_id: UUID) -> list[Work]:
        self.looks += 1
        return [w for w, held_by in self.turns if held_by == worker_id]


class HeldPerformer:
    """Makes calls that last until they are stopped or cancelled."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.calls = 0
        self.failures = 0

    async def perform(self, step: Step, stop: asyncio.Event) -> StepOutcome:
        self.calls += 1
        if self.failures:
            self.failures -= 1
            raise Unavailable("the database can't be reached")
        self.started.set()
        await stop.wait()
        return Stopped(step_id=step.id)


class Site:
    """An engine with everything around it scripted."""

    def __init__(self) -> None:
        self.seat = Seat()
        self.ledger = ScriptedLedger()
        self.performer = HeldPerformer()
        self.engine = EmbeddedEngine(self.ledger, self.performer, self.seat)  # pyright: ignore[reportArgumentType]
        self.session, self.thread, self.turn = uuid4(), uuid4(), uuid4()
        self.lease = Lease(self.turn, 1, 1)

    def perform(self) -> Perform:
        return Perform(lease=self.lease, steps=(self.step(),))

    def step(self) -> Step:
        return Step(
            session_id=self.session,
            id=uuid4(),
            turn_id=self.turn,
            thread_id=self.thread,
            kind="model",
            ordinal=1,
            try_no=1,
            failures=0,
            round=1,
            position=0,
            name="model",
            state="dispatched",
            on_lost="repeat",
            serial=False,
            item_id=None,
            event_seq=1,
            attempt_no=1,
            dispatched_at=AT,
            settled_at=None,
        )

    def begin(self) -> None:
        self.engine.kick(self.session, self.thread)

    def stopped(self) -> Committed:
        return Committed(session_id=self.session, events=(), woken=(), stopped=(self.thread,))


@pytest.fixture
async def site() -> AsyncGenerator[Site]:
    site = Site()
    yield site
    site.ledger.held.set()
    async with asyncio.timeout(WAIT_S):
        await site.engine.fence()


def violations() -> float:
    return next(
        s.value for m in telemetry.invariant_violations.collect() for s in m.samples if s.name.endswith("_total")
    )


async def soon(event: asyncio.Event) -> None:
    async with asyncio.timeout(WAIT_S):
        await event.wait()


async def test_interrupt_that_comes_while_the_call_is_being_dispatched_stops_it_at_once(site: Site) -> None:
    """Its commit lies between the look that dispatched the call and the moment the engine hears of it."""

    def answer(command: Advance) -> Answered:
        if command.outcome is not None:
            return Idle()
        return site.perform() if command.lease is None else Working(lease=site.lease, stop=True)

    site.ledger.answer = answer
    site.ledger.held.clear()
    site.begin()
    await soon(site.ledger.asked)
    site.engine.committed(site.stopped())
    site.ledger.held.set()

    async def is_stopped() -> bool:
        return any(isinstance(c.outcome, Stopped) for c in site.ledger.commands)

    # Less than the grace after which it would be looked at anyway.
    await until(is_stopped, STOP_GRACE_MS / 2_000)


async def test_drain_that_begins_while_the_call_is_being_dispatched_does_not_wait_for_the_call(site: Site) -> None:
    site.ledger.answer = lambda _: site.perform()
    site.ledger.held.clear()
    site.begin()
    await soon(site.ledger.asked)
    draining = asyncio.create_task(site.engine.drain())
    await asyncio.sleep(0)
    site.ledger.held.set()
    async with asyncio.timeout(WAIT_S):
        await draining
    assert [r.lease for r in site.ledger.released] == [site.lease]


async def test_reads_that_fail_before_a_call_are_made_again_and_cost_nothing(site: Site) -> None:
    """A database that goes away between the dispatch and the call: the same attempt goes on when it is back."""
    before = violations()
    site.performer.failures = 2
    site.ledger.answer = lambda _: site.perform()
    site.begin()
    await soon(site.performer.started)
    assert site.performer.calls == 3
    assert [c.lease for c in site.ledger.commands] == [None], "it was asked for once, and never lost"
    assert violations() == before


async def test_nothing_begins_between_the_loss_of_a_seat_and_the_next_one(site: Site) -> None:
    site.ledger.answer = lambda _: site.perform()
    await site.engine.fence()
    site.begin()
    await asyncio.sleep(0)
    assert site.ledger.commands == []
    site.seat.id = UUID(int=7)
    site.engine.resume()
    await soon(site.performer.started)
    assert [c.worker_id for c in site.ledger.commands] == [UUID(int=7)]


async def test_call_whose_seat_went_to_another_name_is_not_made(site: Site) -> None:
    """Dispatched, then frozen; by the time it may go on, its turn belongs to whoever took it over."""

    def answer(command: Advance) -> Answered:
        site.seat.safe = False
        return site.perform() if command.lease is None else Idle()

    site.ledger.answer = answer
    site.begin()
    await soon(site.ledger.asked)
    site.seat.id, site.seat.safe = uuid4(), True

    async def is_through() -> bool:
        return not site.engine.running_count()

    await until(is_through, WAIT_S)
    assert site.performer.calls == 0


async def test_claim_made_for_the_seat_before_is_taken_over_and_not_run(site: Site) -> None:
    """The admission was in the writer's hands while this process was buried and took another seat."""
    site.thread = ids.primary_thread(site.session)
    old = site.engine.offer(site.session)
    assert old == site.seat.id
    await site.engine.fence()
    site.seat.id = uuid4()
    site.engine.resume()
    claimed = ((site.thread, site.perform()),)
    site.engine.committed(Committed(session_id=site.session, events=(), woken=(), stopped=(), claimed=claimed))
    site.engine.settle(site.session)
    await soon(site.ledger.asked)
    assert [(c.worker_id, c.lease) for c in site.ledger.commands] == [(site.seat.id, None)], "it looks like a stranger"
    assert site.performer.calls == 0


async def test_turn_of_ours_that_nobody_runs_is_found_by_the_second_sweep(site: Site) -> None:
    """Its claim was committed and the database left before it said so; no wakeup and no hint tells of it."""
    found, moving = (Work(AT, uuid4(), uuid4()) for _ in range(2))
    site.ledger.turns = [(found, site.seat.id), (moving, site.seat.id), (Work(AT, uuid4(), uuid4()), uuid4())]
    site.engine.start()

    async def looked(times: int) -> bool:
        site.engine.sweep_now()
        await asyncio.sleep(0)
        return site.ledger.looks >= times

    await until(lambda: looked(1), WAIT_S)
    site.ledger.turns[1] = (Work(AT + timedelta(seconds=1), moving.session_id, moving.thread_id), site.seat.id)
    assert site.ledger.commands == []
    await until(lambda: looked(3), WAIT_S)
    await soon(site.ledger.asked)
    await site.engine.drain()
    assert {c.session_id for c in site.ledger.commands} == {found.session_id, moving.session_id}


async def test_drain_does_not_wait_for_a_database_that_was_away_before(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = violations()
    monkeypatch.setattr(embedded, "DRAIN_LEDGER_S", 0.05)

    def away(_: Advance) -> Answered:
        raise Unavailable("the database can't be reached")

    site.ledger.answer = away
    site.ledger.held.clear()
    site.begin()

    async def asked_again() -> bool:
        return len(site.ledger.commands) >= 2

    await until(asked_again, WAIT_S)
    async with asyncio.timeout(WAIT_S):
        await site.engine.drain()
    assert violations() == before, "an outage is no bug of ours"


async def test_drain_begins_nothing_that_waited_for_a_seat(site: Site) -> None:
    site.seat.safe = False
    site.begin()
    await asyncio.sleep(0)
    site.engine.draining = site.seat.safe = True
    async with asyncio.timeout(WAIT_S):
        await site.engine.drain()
    assert site.ledger.commands == []


async def test_sweep_goes_on_behind_what_the_last_one_looked_at() -> None:
    """Five hundred threads that fail each time, and one behind them."""
    now = datetime.now(UTC)
    works = [Work(now + timedelta(microseconds=n), uuid4(), uuid4()) for n in range(SWEEP_ROWS + 1)]
    asked: list[Work | None] = []
    enough = asyncio.Event()

    class Ledger(ScriptedLedger):
        async def read_work(self, limit: int, after: Work | None = None) -> list[Work]:
            asked.append(after)
            if len(asked) == 3:
                enough.set()
            first = 0 if after is None else works.index(after) + 1
            return works[first : first + limit]

    def broken(command: Advance) -> Answered:
        raise InvariantViolation(f"a bug in {command.session_id}")

    ledger: Any = Ledger()
    ledger.answer = broken
    engine = EmbeddedEngine(ledger, HeldPerformer(), Seat(), concurrency=SWEEP_ROWS + 1)
    engine.start()
    while not enough.is_set():
        engine.sweep_now()
        await asyncio.sleep(0)
    await engine.drain()
    assert asked[:3] == [None, works[SWEEP_ROWS - 1], None]
    assert {c.session_id for c in ledger.commands} == {w.session_id for w in works}


async def test_trouble_in_the_search_for_the_dead_does_not_keep_the_living_from_their_work() -> None:
    """Both are parts of a sweep; one fails each time."""
    looked = asyncio.Event()

    class Ledger(ScriptedLedger):
        async def read_work(self, limit: int, after: Work | None = None) -> list[Work]:
            looked.set()
            return await super().read_work(limit, after)

    async def broken() -> None:
        raise ValueError("a row that nobody foresaw")

    ledger: Any = Ledger()
    engine = EmbeddedEngine(ledger, HeldPerformer(), Seat(), before_sweep=broken)
    engine.start()
    await soon(looked)
    await engine.drain()


async def test_outcome_of_a_model_call_with_a_bug_is_an_error_not_a_silence(site: Site) -> None:
    class Broken(HeldPerformer):
        async def perform(self, step: Step, stop: asyncio.Event) -> StepOutcome:
            raise KeyError(step.kind)

    told = asyncio.Event()

    def answer(command: Advance) -> Answered:
        if isinstance(command.outcome, ModelErred):
            told.set()
        return site.perform() if command.lease is None else Idle()

    site.ledger.answer = answer
    engine = EmbeddedEngine(site.ledger, Broken(), site.seat)  # pyright: ignore[reportArgumentType]
    engine.kick(site.session, site.thread)
    await soon(told)
    await engine.fence()
