"""The embedded engine: a loop of `advance` and `perform` for each thread with work. It holds no policy.

One runner a thread and process. A runner owns nothing but calls in flight; what they mean is decided by the ledger's answers. The
global limit bounds runners and never changes the order within a session, because the ledger gives a thread's slot to one turn.
"""

import asyncio
import contextlib
import math
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Final, Protocol
from uuid import UUID, uuid4

from perdure import crashpoint, telemetry
from perdure.domain import ids
from perdure.domain.control import STOP_GRACE_MS
from perdure.domain.errors import Fenced, InvariantViolation, Unavailable
from perdure.domain.step import Step
from perdure.domain.turn import Lease
from perdure.domain.wakeup import SWEEP_MS
from perdure.ports.bus import Hint
from perdure.ports.ledger import (
    Advance,
    Answered,
    Committed,
    Idle,
    Ledger,
    ModelErred,
    Perform,
    Release,
    StepOutcome,
    Stopped,
    Work,
    Working,
)

CONCURRENCY: Final = 64
"""Turns in flight in one process. They wait for models, not for the processor."""

DRAIN_TOOL_MS: Final = 10_000
"""How long a drain lets a running tool finish before its outcome is lost."""

DRAIN_LEDGER_S: Final = 10.0
"""How long a drain waits for a ledger that is away; after it the turn is left to whoever takes it over."""

ABANDON_S: Final = 5.0
"""A cancelled call gets this long to end. After it nobody waits for it: its turn is over, and what it still says is dropped."""

SWEEP_ROWS: Final = 500
"""Threads that one sweep looks at. The next one goes on behind them, so threads that fail each time are in nobody's way."""

RETRY_S: Final = 0.2
CRASH_PAUSE_S: Final = 1.0
"""A thread whose runner met a bug of ours rests this long, so that a bug is not a storm."""

TIMER_MS_MAX: Final = 60_000
"""Wakeups due later than this are left to the sweep."""


class Performer(Protocol):
    """Makes the call of a step."""

    async def perform(self, step: Step, stop: asyncio.Event) -> StepOutcome:
        """See `harnesses`. Raises `Unavailable` only before anything outside was called: then it may be performed again."""
        ...


class WorkerSeat(Protocol):
    """This process's place among the workers."""

    @property
    def id(self) -> UUID:
        """The worker row that our turns name."""
        ...

    def may_start(self) -> bool:
        """False when our lease may have lapsed by our own clock: then no call is started."""
        ...


class _Runner:
    """One thread's calls in flight."""

    def __init__(
        self, engine: "EmbeddedEngine", session_id: UUID, thread_id: UUID, claimed: Perform | None = None
    ) -> None:
        self.engine = engine
        self._claimed = claimed
        self.session_id = session_id
        self.thread_id = thread_id
        self.poked = asyncio.Event()
        self._worker_id = engine.seat.id
        self._lease: Lease | None = None
        self._stop = asyncio.Event()
        self._stopped_at: float | None = None
        self._flying: dict[asyncio.Task[StepOutcome], Step] = {}

    async def run(self) -> None:
        try:
            while not self.engine.seat.may_start():
                if self.engine.draining:
                    return
                await asyncio.sleep(RETRY_S)
            answer = await self._first()
            # Under another name than the one that holds the turn, nothing of it is ours any more.
            while isinstance(answer, Perform | Working) and self.engine.seat.id == self._worker_id:
                self._obey(answer)
                answer = await self._advance(await self._next())
        finally:
            await self._ground(self._flying)

    async def _first(self) -> Answered:
        """What admission already claimed for us, or a first look."""
        if self._claimed is None:
            return await self._advance(None)
        self._lease = self._claimed.lease
        return await self._drain(None) if self.engine.draining else self._claimed

    def _obey(self, answer: Perform | Working) -> None:
        """Start what is to be started, stop what is to be stopped."""
        if self._lease is None or answer.lease.turn_id != self._lease.turn_id:
            self._stop, self._stopped_at = asyncio.Event(), None
        self._lease = answer.lease
        if isinstance(answer, Working):
            if answer.stop and self._stopped_at is None:
                self._stop.set()
                self._stopped_at = asyncio.get_running_loop().time()
            return
        for step in answer.steps:
            call = self.engine.call(step, self._stop, self._worker_id)
            task = asyncio.create_task(call, name=f"step-{step.kind}")
            self._flying[task] = step

    async def _next(self) -> StepOutcome | None:
        """Wait for an outcome, or for a reason to look again (then None)."""
        if not self._flying:
            self._lease = None
            return None
        poke = asyncio.create_task(self.poked.wait())
        try:
            done, _ = await asyncio.wait(
                {*self._flying, poke}, return_when=asyncio.FIRST_COMPLETED, timeout=self._grace_s()
            )
        finally:
            poke.cancel()
        finished = next((t for t in self._flying if t in done), None)
        if finished is not None:
            del self._flying[finished]
            return finished.result()
        if self._stopped_at is not None and not done:
            self._lease = None  # the calls ignore the stop: look at the turn as a stranger, and end it over their heads
            self.engine.abandon(self._flying)
            self._flying.clear()
        return None

    def _grace_s(self) -> float | None:
        if self._stopped_at is None:
            return None
        past = asyncio.get_running_loop().time() - self._stopped_at
        return max(0.05, STOP_GRACE_MS / 1000 - past)

    async def _advance(self, outcome: StepOutcome | None) -> Answered:
        """One look, repeated with the same id until the ledger answers."""
        if not self.engine.draining:
            return await self._ask(outcome, draining=False)
        # Without a turn of ours there is nothing to give back, and nothing more is begun.
        return Idle() if self._lease is None else await self._drain(outcome)

    async def _ask(self, outcome: StepOutcome | None, *, draining: bool) -> Answered:
        # What is committed from now on may come too late for this look, so it pokes for the next.
        self.poked.clear()
        command = Advance(
            session_id=self.session_id,
            thread_id=self.thread_id,
            worker_id=self._worker_id,
            command_id=uuid4(),
            lease=self._lease,
            outcome=outcome,
            draining=draining,
        )
        given_up_at = math.inf
        while True:
            try:
                return await self.engine.ledger.advance(command)
            except Unavailable:
                now = asyncio.get_running_loop().time()
                if now > given_up_at:
                    raise
                if self.engine.draining and given_up_at == math.inf:
                    given_up_at = now + DRAIN_LEDGER_S
                await asyncio.sleep(RETRY_S)

    async def _drain(self, outcome: StepOutcome | None) -> Answered:
        """Let tools finish for a while, drop model calls, give the turn back."""
        assert self._lease is not None
        answer: Answered = (
            await self._ask(outcome, draining=True) if outcome is not None else Working(lease=self._lease)
        )
        models = {t: s for t, s in self._flying.items() if s.kind == "model"}
        await self._ground(models)
        deadline = asyncio.get_running_loop().time() + DRAIN_TOOL_MS / 1000
        while self._flying and isinstance(answer, Working):
            left = deadline - asyncio.get_running_loop().time()
            done, _ = await asyncio.wait(self._flying, return_when=asyncio.FIRST_COMPLETED, timeout=max(0.0, left))
            if not done:
                break
            for task in done:
                del self._flying[task]
                answer = await self._ask(task.result(), draining=True)
        lost = dict(self._flying)
        await self._ground(self._flying)
        for step in lost.values():
            if isinstance(answer, Working):
                answer = await self._ask(Stopped(step_id=step.id), draining=True)
        if isinstance(answer, Working):
            crashpoint.point("before_release")
            await self.engine.ledger.release(
                Release(session_id=self.session_id, thread_id=self.thread_id, lease=self._lease)
            )
        return Fenced()

    async def _ground(self, tasks: "dict[asyncio.Task[StepOutcome], Step]") -> None:
        """Cancel calls and wait until nothing of them is left. One that does not end is abandoned: it holds up nobody."""
        cancelled = list(tasks)
        for task in cancelled:
            task.cancel()
        if cancelled:
            _, left = await asyncio.wait(cancelled, timeout=ABANDON_S)
            self.engine.abandon(left)
        for task in cancelled:
            self._flying.pop(task, None)


class EmbeddedEngine:
    """Runs turns in this process."""

    def __init__(
        self,
        ledger: Ledger,
        performer: Performer,
        seat: WorkerSeat,
        *,
        concurrency: int = CONCURRENCY,
        before_sweep: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        self.ledger = ledger
        self.seat = seat
        self.draining = False
        self._performer = performer
        self._concurrency = concurrency
        self._before_sweep = before_sweep
        self._fenced = False
        self._runners: dict[tuple[UUID, UUID], tuple[_Runner, asyncio.Task[None]]] = {}
        self._pending: dict[tuple[UUID, UUID], None] = {}
        self._offered: dict[UUID, UUID] = {}
        """The worker id that each open offer was made under."""
        self._unattended: set[Work] = set()
        self._timers: dict[tuple[UUID, UUID], asyncio.TimerHandle] = {}
        self._sweeper: asyncio.Task[None] | None = None
        self._abandoned: set[asyncio.Task[StepOutcome]] = set()
        self._sweep_now = asyncio.Event()
        self._swept: Work | None = None
        self._log = telemetry.logger("engine")

    # ---------------------------------------------------------------------------------------------------------- hints

    def committed(self, committed: Committed) -> None:
        """A commit of this process: take what it claimed for us, look where it says there is work."""
        for thread_id, claimed in committed.claimed:
            self._take((committed.session_id, thread_id), claimed)
        for thread_id, delay_ms in committed.woken:
            self._kick_in(committed.session_id, thread_id, delay_ms)
        for thread_id in committed.stopped:
            self._poke(committed.session_id, thread_id)

    def hinted(self, hint: Hint) -> None:
        """A commit of another process."""
        if hint.thread_id is None:
            return
        if not self._poke(hint.session_id, hint.thread_id) and not hint.stop:
            self.kick(hint.session_id, hint.thread_id)

    def offer(self, session_id: UUID) -> UUID | None:
        """A place for the turn that an admission may start, or None when there is none to spare or others wait for it."""
        busy = len(self._runners) + len(self._offered) >= self._concurrency or any(
            k not in self._runners for k in self._pending
        )
        known = session_id in self._offered or (session_id, ids.primary_thread(session_id)) in self._runners
        if busy or known or self.draining or self._fenced or not self.seat.may_start():
            return None
        self._offered[session_id] = self.seat.id
        return self.seat.id

    def settle(self, session_id: UUID) -> None:
        """The admission is through; what it claimed came with its commit. Looks that waited for it may begin."""
        self._offered.pop(session_id, None)
        self._fill()

    def _take(self, key: tuple[UUID, UUID], claimed: Perform) -> None:
        """Run a turn that is ours already. No runner can be there: none was at the offer, and `kick` left the thread alone since."""
        if self._fenced or self._offered.get(key[0]) != self.seat.id:
            # Claimed under a name that is dead by now: it is taken over like any other turn of the dead.
            self._pending.setdefault(key)
            return
        runner = _Runner(self, *key, claimed)
        task = asyncio.create_task(self._supervise(runner), name=f"turn-{key[0]}")
        self._runners[key] = (runner, task)

    def kick(self, session_id: UUID, thread_id: UUID) -> None:
        """Look at a thread, now or when there is room."""
        key = (session_id, thread_id)
        if self.draining:
            return
        if self._fenced or session_id in self._offered:
            self._pending.setdefault(key)
            return
        if key in self._runners:
            self._runners[key][0].poked.set()
            self._pending.setdefault(key)
            return
        if len(self._runners) >= self._concurrency:
            self._pending.setdefault(key)
            return
        self._pending.pop(key, None)
        runner = _Runner(self, session_id, thread_id)
        task = asyncio.create_task(self._supervise(runner), name=f"turn-{session_id}")
        self._runners[key] = (runner, task)

    def _poke(self, session_id: UUID, thread_id: UUID) -> bool:
        found = self._runners.get((session_id, thread_id))
        if found is not None:
            found[0].poked.set()
        return found is not None

    def _kick_in(self, session_id: UUID, thread_id: UUID, delay_ms: int) -> None:
        key = (session_id, thread_id)
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()
        if delay_ms <= 0:
            self.kick(session_id, thread_id)
        elif delay_ms <= TIMER_MS_MAX and not self.draining:
            loop = asyncio.get_running_loop()
            self._timers[key] = loop.call_later((delay_ms + 1) / 1000, self._on_time, key)

    def _on_time(self, key: tuple[UUID, UUID]) -> None:
        self._timers.pop(key, None)
        self.kick(*key)

    # -------------------------------------------------------------------------------------------------------- running

    async def _supervise(self, runner: _Runner) -> None:
        """A supervised loop: one thread's trouble stays its own."""
        key = (runner.session_id, runner.thread_id)
        try:
            await runner.run()
        except asyncio.CancelledError:
            raise
        except Unavailable:
            # Only while we drain: the turn is taken over from us like one of the dead.
            self._log.warning("turn_left", session=ids.token(key[0]))
        except Exception as error:  # noqa: BLE001
            telemetry.invariant_violations.inc()
            self._log.error("runner_failed", session=ids.token(key[0]), **telemetry.blame(error))
            self._kick_in(*key, delay_ms=int(CRASH_PAUSE_S * 1000))
        finally:
            del self._runners[key]
            self._fill()

    def _fill(self) -> None:
        """Give the freed place to who waits longest."""
        while self._pending and len(self._runners) < self._concurrency and not self.draining and not self._fenced:
            key = next((k for k in self._pending if k not in self._runners and k[0] not in self._offered), None)
            if key is None:
                return
            del self._pending[key]
            self.kick(*key)

    async def call(self, step: Step, stop: asyncio.Event, worker_id: UUID) -> StepOutcome:
        """Make a step's call for the worker that holds its turn. A bug of ours in it is an outcome, not a silence."""
        while True:
            if not self.seat.may_start():
                await asyncio.sleep(RETRY_S)
                continue
            if self.seat.id != worker_id:
                # Its turn went to another meanwhile: nothing of it starts here any more, and nobody reads this outcome.
                return Stopped(step_id=step.id)
            try:
                return await self._perform(step, stop)
            except Unavailable:
                await asyncio.sleep(RETRY_S)

    async def _perform(self, step: Step, stop: asyncio.Event) -> StepOutcome:
        try:
            crashpoint.point(f"before_call.{step.kind}")
            with telemetry.step_seconds.labels(step.kind).time():
                outcome = await self._performer.perform(step, stop)
            crashpoint.point(f"after_call.{step.kind}")
            return outcome
        except (AssertionError, InvariantViolation, KeyError, ValueError, TypeError, AttributeError) as error:
            telemetry.invariant_violations.inc()
            self._log.error("step_failed", step=str(step.id), **telemetry.blame(error))
            if step.kind == "model":
                return ModelErred(
                    step_id=step.id, code="unknown_error", message="An internal error ended the call.", retryable=True
                )
            return Stopped(step_id=step.id)

    def abandon(self, tasks: Iterable[asyncio.Task[StepOutcome]]) -> None:
        """Let go of calls that ignore their cancellation. The set only keeps them from being collected while they run."""
        for task in list(tasks):
            task.cancel()
            self._abandoned.add(task)
            task.add_done_callback(self._forget)
            self._log.warning("call_abandoned", call=task.get_name())

    def _forget(self, task: asyncio.Task[StepOutcome]) -> None:
        self._abandoned.discard(task)
        if not task.cancelled():
            task.exception()

    # ---------------------------------------------------------------------------------------------------------- life

    def start(self) -> None:
        """Begin to sweep; hints come through `committed` and `hinted`."""
        self._sweeper = asyncio.create_task(self._sweep(), name="sweep")

    def sweep_now(self) -> None:
        """Hints were lost: don't wait for the next sweep."""
        self._sweep_now.set()

    async def _sweep(self) -> None:
        """The path that is always right: what the outbox says is due, whoever forgot to say so."""
        while True:
            if self._before_sweep is not None:
                await self._survive(self._before_sweep())
            await self._survive(self._look_for_work())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SWEEP_MS / 1000):
                    await self._sweep_now.wait()
            self._sweep_now.clear()

    async def _look_for_work(self) -> None:
        found = await self.ledger.read_work(SWEEP_ROWS, self._swept)
        crashpoint.point("after_sweep")
        self._swept = found[-1] if len(found) == SWEEP_ROWS else None
        for work in found:
            self.kick(work.session_id, work.thread_id)
        await self._look_for_unattended()

    async def _look_for_unattended(self) -> None:
        """Turns that are ours in the ledger and that nobody runs here: what claimed them was committed, and we never heard so.

        Twice in a row, or it is one that is just being begun or ended.
        """
        held = await self.ledger.read_held(self.seat.id)
        alone = {
            w for w in held if (w.session_id, w.thread_id) not in self._runners and w.session_id not in self._offered
        }
        for work in alone & self._unattended:
            self._log.warning("turn_unattended", session=ids.token(work.session_id))
            self.kick(work.session_id, work.thread_id)
        self._unattended = alone

    async def _survive(self, part: Coroutine[Any, Any, None]) -> None:
        """A part of a supervised loop: trouble in it hurts neither the other parts nor the next round."""
        try:
            await part
        except Unavailable:
            pass
        except Exception as error:  # noqa: BLE001
            self._log.error("sweep_failed", error=f"{type(error).__name__}: {error}")

    @property
    def fenced(self) -> bool:
        """Whether it has lost its seat: nothing runs until it has another."""
        return self._fenced

    def running_count(self) -> int:
        """Threads with calls in flight."""
        return len(self._runners)

    async def drain(self) -> None:
        """Start nothing more and give every turn back in order."""
        self.draining = True
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        tasks = [task for _, task in self._runners.values()]
        for runner, _ in list(self._runners.values()):
            runner.poked.set()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def fence(self) -> None:
        """Our lease is gone: drop every call at once; nothing of it may be written, and nothing begins until `resume`."""
        self._fenced = True
        tasks = [task for _, task in self._runners.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def resume(self) -> None:
        """We have a seat again."""
        self._fenced = False
        self._fill()
