"""A simulated world: many workers and clients over one oracle, in virtual time, with everything going wrong that can.

One integer makes one run, so one integer shows a failure again. Workers behave like the embedded engine's runners: look, perform,
report; they crash before and after commits, lose answers, freeze and come back with leases that are no longer theirs. Hints are lost,
doubled and late. When all has come to rest, every input is settled and no call of a tool was made twice.
"""

import heapq
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from itertools import count
from random import Random
from typing import Final
from uuid import UUID

import msgspec

from perdure.domain import ids
from perdure.domain.barrier import Action
from perdure.domain.control import STOP_GRACE_MS
from perdure.domain.event import encode
from perdure.domain.lease import LEASE_MS, LOCK_FREE_MS
from perdure.domain.session import Session, SessionConfig
from perdure.domain.step import Step
from perdure.domain.submission import SubmissionKey
from perdure.domain.turn import Lease, Turn
from perdure.domain.wakeup import SWEEP_MS, Wakeup
from perdure.ports.ledger import (
    Accept,
    Advance,
    Arrival,
    Command,
    Committed,
    CreateSession,
    Perform,
    Release,
    Result,
    StepOutcome,
    Wake,
    Working,
)
from perdure.testing.histories import Failed
from perdure.testing.invariants import check_quiet, check_sessions
from perdure.testing.oracle import START, OracleLedger
from perdure.testing.step_outcomes import Mix, random_outcome, random_stop
from perdure.testing.witness import Witness

REST_MS_MAX: Final = 3_600_000
"""Virtual time by which everything must have come to rest: retries take minutes at most."""

CHECK_EVERY: Final = 6
"""Commits between two full checks of a session; answers are judged at every one."""


class Odds(msgspec.Struct, frozen=True, kw_only=True):
    """How much goes wrong, and how much is going on."""

    workers_count: int = 3
    sessions_count: int = 2
    sends_max: int = 7
    active_ms: int = 25_000
    crash_before: float = 0.015
    crash_after: float = 0.015
    lost_answer: float = 0.03
    lost_hint: float = 0.25
    double_hint: float = 0.15
    freezes: int = 2
    drains: int = 1
    deaf: float = 0.15
    """A call that does not obey a stop."""
    interrupts: float = 0.2
    mix: Mix = Mix(calls=0.45, retryable=0.08, permanent=0.01)


class World:
    """The events to come, the ledger, and who acts on it."""

    def __init__(self, seed: int, odds: Odds | None = None) -> None:
        self.odds = odds or Odds()
        self.rng = Random(seed)
        self.oracle = OracleLedger()
        self.oracle.on_commit = self._committed
        self.witness = Witness(self.oracle)
        self.now_ms = 0
        self.workspace = self.fresh()
        self.claimed: list[tuple[UUID, UUID, Perform]] = []
        """What the last commit claimed at admission."""
        self.effects: Counter[tuple[UUID, int, int]] = Counter()
        self.commits = 0
        self._order = count()
        self._due: list[tuple[int, int, Callable[[], None]]] = []
        self.workers = [SimWorker(self) for _ in range(self.odds.workers_count)]
        self.clients = [SimClient(self) for _ in range(self.odds.sessions_count)]
        for _ in range(self.odds.freezes):
            self.after(self.rng.randrange(self.odds.active_ms), self._freeze_one)
        for _ in range(self.odds.drains):
            self.after(self.rng.randrange(self.odds.active_ms), self._drain_one)

    def fresh(self) -> UUID:
        """A new id."""
        return UUID(int=self.rng.getrandbits(128))

    def after(self, delay_ms: int, action: Callable[[], None]) -> None:
        """Do something later."""
        heapq.heappush(self._due, (self.now_ms + max(0, delay_ms), next(self._order), action))

    def run(self) -> None:
        """Until all is at rest. Raises `Failed`."""
        while self._due:
            self.now_ms, _, action = heapq.heappop(self._due)
            self.oracle.clock.now = START + timedelta(milliseconds=self.now_ms)
            action()
            if self.witness.faults:
                raise Failed(self.witness.faults[0])
            if self.now_ms > self.odds.active_ms and self._rests():
                break
            if self.now_ms > REST_MS_MAX:
                raise Failed(f"not at rest after {REST_MS_MAX} ms: {check_quiet(self.oracle)[:5]}")
        faults = check_quiet(self.oracle)
        if faults:
            raise Failed(f"{faults[0]} (and {len(faults) - 1} more)")

    def _rests(self) -> bool:
        if any(w.runners or w.frozen for w in self.workers) or not all(c.content for c in self.clients):
            return False
        return not self.oracle.tables.get(Wakeup) and all(t.state == "settled" for t in self.oracle.all(Turn))

    def commit(self, command: Command) -> Result:
        """One commit, judged on the spot."""
        self.witness.before(command)
        result = self.oracle.apply(command)
        self.witness.after(command, result)
        self.commits += 1
        if self.commits % CHECK_EVERY == 0:
            self.witness.faults += check_sessions(self.oracle, [command.session_id], before_reaping=True)
        return result

    def _committed(self, committed: Committed) -> None:
        """Hints go out to every worker, most of the time, sometimes twice, never at once."""
        for worker in self.workers:
            for thread_id, delay_ms in committed.woken:
                self._hint(worker, delay_ms, committed.session_id, thread_id)
            for thread_id in committed.stopped:
                self._hint(worker, 0, committed.session_id, thread_id)
        self.claimed = [(committed.session_id, t, p) for t, p in committed.claimed]

    def _hint(self, worker: "SimWorker", delay_ms: int, session_id: UUID, thread_id: UUID) -> None:
        if self.rng.random() < self.odds.lost_hint:
            return
        for _ in range(2 if self.rng.random() < self.odds.double_hint else 1):
            late = self.rng.choice((1, 5, 20, 300))
            worker.after(delay_ms + late, lambda: worker.kick(session_id, thread_id))

    def perform(self, step: Step) -> None:
        """The call is made: from now on it may have had its effect."""
        if step.kind == "tool" and step.on_lost != "repeat":
            key = (step.turn_id, step.round, step.position)
            self.effects[key] += 1
            if self.effects[key] > 1:
                raise Failed(f"the effect of call {step.item_id} happened twice")

    def reap(self) -> None:
        """Bury whose process or lease is gone, and wake the threads that nobody looks after."""
        for worker in self.workers:
            for identity, since in list(worker.missing.items()):
                if self.now_ms >= since:
                    del worker.missing[identity]
                    self.oracle.bury(identity)
        for turn in self.oracle.all(Turn):
            owner = None if turn.worker_id is None else self.oracle.workers.get(turn.worker_id)
            if turn.state == "active" and owner is not None and owner.dead_at is not None:
                self.commit(Wake(session_id=turn.session_id, thread_id=turn.thread_id))

    def _freeze_one(self) -> None:
        self.rng.choice(self.workers).freeze(self.rng.choice((500, 3_000, 12_000, 20_000)))

    def _drain_one(self) -> None:
        self.rng.choice(self.workers).drain()


class SimWorker:
    """One process: its runners, and what becomes of it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.id = world.fresh()
        self.life = 0
        """Counts the processes that stood here: what an earlier one had planned does not happen."""
        self.alive = True
        self.frozen = False
        self.safe = True
        self.runners: dict[UUID, SimRunner] = {}
        self.missing: dict[UUID, int] = {}
        """Ids that are gone, and when others may notice."""
        self._kept: list[Callable[[], None]] = []
        self.after(world.rng.randrange(SWEEP_MS), self._sweep)

    def after(self, delay_ms: int, action: Callable[[], None]) -> None:
        """Do something later, if this process still lives then; while it is frozen, when it thaws."""
        life = self.life

        def act() -> None:
            if life != self.life or not self.alive:
                return
            if self.frozen:
                self._kept.append(act)
            else:
                action()

        self.world.after(delay_ms, act)

    def _sweep(self) -> None:
        self.after(SWEEP_MS, self._sweep)
        self.world.reap()
        now = self.world.oracle.clock.now
        due = sorted((w for w in self.world.oracle.all(Wakeup) if w.due_at <= now), key=lambda w: w.due_at)
        for row in due:
            self.kick(row.session_id, row.thread_id)

    def kick(self, session_id: UUID, thread_id: UUID) -> None:
        """Look at a thread, or poke who looks after it already."""
        runner = self.runners.get(thread_id)
        if runner is not None:
            runner.poke()
            return
        if not self.alive:
            return
        self.runners[thread_id] = SimRunner(self, session_id, thread_id)
        self.runners[thread_id].look(None)

    def offer(self, thread_id: UUID) -> UUID | None:
        """A place for the turn that an admission may start."""
        return self.id if self.alive and not self.frozen and self.safe and thread_id not in self.runners else None

    def take(self, session_id: UUID, thread_id: UUID, claimed: Perform) -> None:
        """Run a turn that an admission claimed for this worker."""
        runner = self.runners[thread_id] = SimRunner(self, session_id, thread_id)
        runner.obey(claimed)

    def die(self) -> None:
        """SIGKILL. Another process takes the place a little later."""
        rng = self.world.rng
        self.missing[self.id] = self.world.now_ms + rng.choice((0, LOCK_FREE_MS, LOCK_FREE_MS + 900))
        self._begin(rng.randrange(100, 6_000))

    def _begin(self, delay_ms: int) -> None:
        self.alive, self.frozen = False, False
        self.life += 1
        self.runners.clear()
        self._kept.clear()
        life = self.life

        def start() -> None:
            if life == self.life:
                self.id, self.alive, self.safe = self.world.fresh(), True, True
                self._sweep()

        self.world.after(delay_ms, start)

    def freeze(self, for_ms: int) -> None:
        """SIGSTOP. Long enough, and the others count it as dead; it does not know that when it wakes up."""
        if not self.alive or self.frozen:
            return
        self.frozen = True
        lapses = for_ms >= LEASE_MS
        if lapses:
            self.missing[self.id] = self.world.now_ms + LEASE_MS
        life = self.life

        def thaw() -> None:
            if life != self.life:
                return
            self.frozen, self.safe = False, not lapses
            kept, self._kept = self._kept, []
            for act in kept:
                act()
            if lapses and life == self.life:
                self.after(self.world.rng.randrange(1, 900), self.rejoin)

        self.world.after(for_ms, thaw)

    def rejoin(self) -> None:
        """Counted as dead: drop every call and go on under a new id."""
        self.runners.clear()
        self.life += 1
        self.id, self.safe = self.world.fresh(), True
        self.after(1, self._sweep)

    def drain(self) -> None:
        """An orderly end: every turn is given back, the worker says that it leaves, another process takes the place."""
        if not self.alive or self.frozen:
            return
        for runner in list(self.runners.values()):
            runner.give_back()
        self.missing[self.id] = self.world.now_ms
        self._begin(self.world.rng.randrange(10, 500))


class SimRunner:
    """One thread's calls in flight in one worker."""

    def __init__(self, worker: SimWorker, session_id: UUID, thread_id: UUID) -> None:
        self.worker = worker
        self.world = worker.world
        self.session_id = session_id
        self.thread_id = thread_id
        self.lease: Lease | None = None
        self.flying: dict[UUID, Step] = {}
        self.done: list[StepOutcome] = []
        self.asking = False
        self.again = False
        self.stopped = False

    def poke(self) -> None:
        """Something happened: look again, now or when the present look is over."""
        if self.asking:
            self.again = True
        else:
            self.look(None)

    def look(self, outcome: StepOutcome | None) -> None:
        """One advance, sent until it is answered."""
        self.asking, self.again = True, False
        self._send(
            Advance(
                session_id=self.session_id,
                thread_id=self.thread_id,
                worker_id=self.worker.id,
                command_id=self.world.fresh(),
                lease=self.lease,
                outcome=outcome,
            )
        )

    def _send(self, command: Advance) -> None:
        odds, rng = self.world.odds, self.world.rng
        dice = rng.random()
        if dice < odds.crash_before:
            self.worker.die()
            return
        answer = self.world.commit(command)
        if dice < odds.crash_before + odds.crash_after:
            self.worker.die()
        elif dice < odds.crash_before + odds.crash_after + odds.lost_answer:
            self._later(200, lambda: self._send(command))
        else:
            self.obey(answer)

    def _later(self, delay_ms: int, action: Callable[[], None]) -> None:
        """Only while this runner still is the one of its thread."""
        self.worker.after(delay_ms, lambda: action() if self.worker.runners.get(self.thread_id) is self else None)

    def obey(self, answer: Result) -> None:
        """Do what an answer says."""
        self.asking = False
        if not isinstance(answer, (Perform, Working)):
            self._end()
            return
        if self.lease is None or self.lease.turn_id != answer.lease.turn_id:
            self.stopped = False
        self.flying = {i: s for i, s in self.flying.items() if s.turn_id == answer.lease.turn_id}
        self.lease = answer.lease
        if isinstance(answer, Working):
            if answer.stop and not self.stopped:
                self._stop()
        else:
            for step in answer.steps:
                self._start(step)
        self._next()

    def _end(self) -> None:
        self.worker.runners.pop(self.thread_id, None)
        if self.again:
            self.worker.after(1, lambda: self.worker.kick(self.session_id, self.thread_id))

    def _next(self) -> None:
        if self.done:
            self.look(self.done.pop(0))
        elif not self.flying:
            self.lease = None
            self.look(None)
        elif self.again:
            self.look(None)

    def _start(self, step: Step) -> None:
        self.flying[step.id] = step
        if not self.worker.safe:
            return
        self.world.perform(step)
        rng = self.world.rng
        longest = 2_000 if step.kind == "model" else 7_000
        self._later(
            rng.randrange(10, longest), lambda: self._ended(step, random_outcome(rng, step, self.world.odds.mix))
        )

    def _ended(self, step: Step, outcome: StepOutcome) -> None:
        if self.flying.pop(step.id, None) is None:
            return
        if self.asking:
            self.done.append(outcome)
        else:
            self.look(outcome)

    def _stop(self) -> None:
        """Cancel what flies. What does not obey is left behind after the grace."""
        self.stopped = True
        rng = self.world.rng
        for step in self.flying.values():
            if rng.random() >= self.world.odds.deaf:
                self._later(rng.randrange(1, 400), lambda s=step: self._ended(s, random_stop(rng, s)))
        turn_id = None if self.lease is None else self.lease.turn_id
        self._later(STOP_GRACE_MS + 50, lambda: self._disown(turn_id))

    def _disown(self, turn_id: UUID | None) -> None:
        if self.lease is not None and self.lease.turn_id == turn_id and self.flying and not self.asking:
            self.lease = None
            self.look(None)

    def give_back(self) -> None:
        """Drain: models are dropped, what is in flight is lost without blame."""
        if self.lease is not None:
            self.world.commit(Release(session_id=self.session_id, thread_id=self.thread_id, lease=self.lease))


class SimClient:
    """One session's client: sends, interrupts, answers what it owes, repeats what it got no answer to."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.session_id = world.fresh()
        self.left = world.rng.randint(1, world.odds.sends_max)
        config = SessionConfig(session_id=self.session_id, title=None, metadata=b"{}", agent=b"{}", environment=b"{}")
        self._create = CreateSession(
            session_id=self.session_id,
            workspace_id=world.workspace,
            profile="managed_agents",
            agent_id=None,
            agent_version=1,
            environment_id=None,
            model="scripted",
            config=config,
            arrivals=(self._message(),) if world.rng.random() < 0.5 else (),
        )
        world.after(world.rng.randrange(500), self._begin)

    @property
    def content(self) -> bool:
        """Whether this client wants nothing more and owes nothing."""
        return not self.left and not self._owed()

    def _begin(self) -> None:
        self.world.commit(self._create)
        self._plan()
        self.world.after(self.world.rng.randrange(200, 1_500), self._look)

    def _plan(self) -> None:
        if self.left:
            gap_ms = self.world.odds.active_ms // (self.world.odds.sends_max + 1)
            self.world.after(self.world.rng.randrange(1, gap_ms), self._say)

    def _message(self) -> Arrival:
        text = f"say {self.world.rng.randrange(10_000)}"
        return Arrival(kind="message", body=encode({"content": [{"type": "text", "text": text}]}))

    def _say(self) -> None:
        rng = self.world.rng
        self.left -= 1
        arrivals = [self._message() for _ in range(rng.choice((1, 1, 2)))]
        if rng.random() < self.world.odds.interrupts:
            arrivals.insert(rng.randint(0, len(arrivals)), Arrival(kind="interrupt", body=b"{}"))
            arrivals = arrivals[: rng.choice((1, 3))]
        self._send(tuple(arrivals))
        self._plan()

    def _look(self) -> None:
        """Poll for what is owed, and answer some of it or all."""
        rng = self.world.rng
        owed = self._owed()
        if owed and rng.random() < 0.7:
            rng.shuffle(owed)
            self._send(tuple(self._answer(a) for a in owed[: rng.randint(1, len(owed))]))
        self.world.after(rng.randrange(200, 1_500), self._look)

    def _owed(self) -> list[Action]:
        session = self.world.oracle.tables.get(Session, {}).get((self.session_id,))
        if not isinstance(session, Session) or session.state != "open":
            self.left = 0 if isinstance(session, Session) else self.left
            return []
        return [a for a in self.world.oracle.rows(Action, self.session_id) if a.state == "open"]

    def _answer(self, action: Action) -> Arrival:
        name = f"sevt_{ids.token(action.id)}"
        if action.kind == "custom":
            body = encode({"content": [{"type": "text", "text": "42"}]})
            return Arrival(kind="custom_result", body=body, action_id=action.id, answer="result", reference=name)
        denied = self.world.rng.random() < 0.3
        return Arrival(
            kind="confirmation",
            body=encode({"result": "deny" if denied else "allow"}),
            action_id=action.id,
            answer="deny" if denied else "allow",
            reference=name,
        )

    def _send(self, arrivals: tuple[Arrival, ...]) -> None:
        """Sent once, and again when the answer was lost, under the same key."""
        digest = self.world.fresh().bytes
        key = SubmissionKey(digest=digest, body_digest=digest, explicit=True, attempt=0, request_id=self.world.fresh())
        thread_id = ids.primary_thread(self.session_id)
        server = self.world.rng.choice(self.world.workers)
        command = Accept(
            session_id=self.session_id,
            workspace_id=self.world.workspace,
            arrivals=arrivals,
            submission=key,
            claim_by=server.offer(thread_id) if self.world.rng.random() < 0.5 else None,
        )
        self.world.claimed = []
        self.world.commit(command)
        self._hand_over(server, command)
        if self.world.rng.random() < self.world.odds.lost_answer:
            self.world.after(300, lambda: self._repeat(command))

    def _hand_over(self, server: SimWorker, command: Accept) -> None:
        """The server that admitted runs what it claimed, unless it dies before it gets there."""
        for session_id, thread_id, perform in self.world.claimed:
            self.world.witness.claimed(command, perform)
            if self.world.rng.random() < self.world.odds.crash_after:
                server.die()
                return
            server.take(session_id, thread_id, perform)

    def _repeat(self, command: Accept) -> None:
        self.world.commit(msgspec.structs.replace(command, claim_by=None))


def simulate(seed: int, odds: Odds | None = None) -> World:
    """One run. Raises `Failed` with the seed that shows it again."""
    world = World(seed, odds)
    try:
        world.run()
    except Exception as error:
        raise Failed(f"simulate({seed}) fails at {world.now_ms} ms, commit {world.commits}: {error}") from error
    return world
