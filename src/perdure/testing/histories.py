"""Random histories of ledger commands, and the play that applies and checks them.

A history is a list of integers: each one seeds the choice of the next move, given what the oracle holds by then. So a history without
some of its integers is a history again, which is what makes failures shrink (`testing.shrinking`).
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import timedelta
from itertools import count
from random import Random
from typing import Final, Literal
from uuid import UUID

import msgspec

from perdure.domain import ids
from perdure.domain.barrier import Action
from perdure.domain.errors import Refused
from perdure.domain.event import encode
from perdure.domain.mailbox import Input
from perdure.domain.session import Session, SessionConfig
from perdure.domain.step import Step
from perdure.domain.submission import SubmissionKey, Written
from perdure.domain.turn import Lease
from perdure.domain.wakeup import Wakeup
from perdure.ports.ledger import (
    Accept,
    Advance,
    ArchiveSession,
    Arrival,
    Command,
    Committed,
    CreateSession,
    DeleteSession,
    Perform,
    Release,
    Result,
    UpdateSession,
    Wake,
    WithdrawInput,
    Working,
)
from perdure.testing.invariants import check_sessions
from perdure.testing.oracle import OracleLedger
from perdure.testing.step_outcomes import Mix, random_outcome, random_stop
from perdure.testing.witness import Witness

KEYED_REPEAT_CHANCE: Final = 0.6
"""How often a repeat is that of a request which the ledger has a record of: few are, and they have rules of their own."""

STEP_BITS: Final = 32
_salts: Final[Iterator[int]] = count(1)
"""Two histories of one process share no id, so that they can share a database."""

Fault = Literal["none", "lost_before_commit", "lost_after_commit"]


class Move(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a history: time passes, a worker dies, another process commits `between`, then a batch is sent at once."""

    pass_ms: int = 0
    buried: UUID | None = None
    between: Command | None = None
    """Committed by another process after the batch read its facts and before it wrote."""
    commands: tuple[Command, ...] = ()
    misses: int = 0
    """How often the batch finds its sessions moved by others, beyond `between`."""
    fault: Fault = "none"


class Seat:
    """A worker as the generator knows it: its leases and the calls that it has in flight."""

    def __init__(self, identity: UUID) -> None:
        self.id = identity
        self.leases: dict[UUID, Lease] = {}
        self.flying: dict[UUID, Step] = {}
        self.stopping: set[UUID] = set()


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """What histories are made of."""

    sessions_max: int = 3
    workers_count: int = 3
    mix: Mix = Mix(calls=0.5, retryable=0.12, permanent=0.02)
    weights: dict[str, int] = msgspec.field(
        default_factory=lambda: {
            "create": 6,
            "accept": 24,
            "look": 16,
            "outcome": 42,
            "poke": 3,
            "stale_outcome": 4,
            "repeat": 6,
            "release": 2,
            "drain": 3,
            "update": 2,
            "archive": 1,
            "delete": 1,
            "withdraw": 2,
            "wake": 1,
            "foreign": 1,
        }
    )
    batch_chance: float = 0.3
    fault_chance: float = 0.04
    miss_chance: float = 0.06


class History:
    """Chooses moves that mostly make sense for what the oracle holds."""

    def __init__(self, oracle: OracleLedger, shape: Shape | None = None) -> None:
        self.oracle = oracle
        self.shape = shape or Shape()
        self.workspace = self._fresh(Random(next(_salts)))
        self.sessions: list[UUID] = []
        self.seats: list[Seat] = []
        self._stale: list[tuple[Seat, Step, Lease]] = []
        self._recent: list[Command] = []
        self._uses: Counter[int] = Counter()
        self._salt = self.workspace.int

    def _fresh(self, rng: Random) -> UUID:
        return UUID(int=rng.getrandbits(128) ^ getattr(self, "_salt", 0))

    # ---------------------------------------------------------------------------------------------------------- choosing

    def choose(self, seed: int) -> Move:
        """The next move. An integer that comes again makes other ids."""
        self._uses[seed] += 1
        rng = Random(seed ^ (self._uses[seed] - 1) << STEP_BITS)
        while len(self.seats) < self.shape.workers_count:
            self.seats.append(Seat(self._fresh(rng)))
        buried = rng.choice(self.seats) if rng.random() < 0.03 else None
        if buried is not None:
            self.bury(buried.id)
        number = 1 if rng.random() > self.shape.batch_chance else rng.randint(2, 7)
        commands = tuple(self._command(rng) for _ in range(number))
        return Move(
            pass_ms=self._pass_ms(rng),
            buried=None if buried is None else buried.id,
            between=self._between(rng, commands),
            commands=commands,
            misses=rng.choice((1, 2, 3, 4)) if rng.random() < self.shape.miss_chance else 0,
            fault=rng.choice(("lost_before_commit", "lost_after_commit"))
            if rng.random() < self.shape.fault_chance
            else "none",
        )

    def _pass_ms(self, rng: Random) -> int:
        dice = rng.random()
        if dice < 0.5:
            return rng.randrange(40)
        if dice < 0.8:
            return 0
        if dice < 0.97:
            due = [w.due_at for w in self.oracle.all(Wakeup) if w.due_at > self.oracle.clock.now]
            gap = (min(due) - self.oracle.clock.now).total_seconds() * 1000 if due else 500
            return max(0, int(gap) + rng.choice((-1, 0, 1, 1, 1)))
        return 70_000

    def _between(self, rng: Random, commands: tuple[Command, ...]) -> Command | None:
        """Another process does something to a session of the batch meanwhile."""
        if rng.random() > self.shape.miss_chance or any(isinstance(c, CreateSession) for c in commands):
            return None
        targets = {c.session_id for c in commands}
        found = (self._command(rng) for _ in range(10))
        return next((c for c in found if c.session_id in targets and not isinstance(c, CreateSession)), None)

    def _command(self, rng: Random) -> Command:
        weights = dict(self.shape.weights)
        if len(self.sessions) >= self.shape.sessions_max:
            weights["create"] = 0
        if not self.sessions:
            return self._create(rng)
        if not any(s.flying for s in self.seats):
            weights["outcome"] = weights["poke"] = weights["drain"] = weights["release"] = 0
        if not self._stale:
            weights["stale_outcome"] = 0
        kinds = list(weights)
        for kind in rng.choices(kinds, [weights[k] for k in kinds], k=20):
            command: Command | None = getattr(self, f"_{kind}")(rng)
            if command is not None:
                return command
        return self._look(rng)

    def _session(self, rng: Random) -> UUID:
        """One of the newest most often, so that histories also get deep."""
        return rng.choice((*self.sessions, *self.sessions[-2:]))

    # ------------------------------------------------------------------------------------------------------------ clients

    def _create(self, rng: Random) -> CreateSession:
        session_id = self._fresh(rng)
        arrivals = tuple(self._message(rng) for _ in range(rng.choice((0, 0, 1, 2))))
        config = SessionConfig(session_id=session_id, title=None, metadata=b"{}", agent=b"{}", environment=b"{}")
        return CreateSession(
            session_id=session_id,
            workspace_id=self.workspace,
            profile="managed_agents",
            agent_id=None,
            agent_version=1,
            environment_id=None,
            model="scripted",
            config=config,
            arrivals=arrivals,
            submission=self._key(rng, 0.3),
        )

    def _key(self, rng: Random, chance: float) -> SubmissionKey | None:
        if rng.random() > chance:
            return None
        digest = self._fresh(rng).bytes * 2
        return SubmissionKey(
            digest=digest,
            body_digest=digest,
            explicit=rng.random() < 0.5,
            attempt=0,
            request_id=self._fresh(rng),
        )

    def _message(self, rng: Random) -> Arrival:
        text = f"say {rng.randrange(10_000)}" if rng.random() < 0.95 else " \u200b"
        return Arrival(kind="message", body=encode({"content": [{"type": "text", "text": text}]}))

    def _system(self) -> Arrival:
        return Arrival(
            kind="system", body=encode({"content": [{"type": "text", "text": "be brief"}]}), param="events.1"
        )

    def _interrupt(self) -> Arrival:
        return Arrival(kind="interrupt", body=b"{}")

    def _answers(self, rng: Random, session_id: UUID) -> list[Arrival]:
        """Answers to open actions: usually some or all of them, sometimes wrong ones."""
        owed = [a for a in self.oracle.rows(Action, session_id) if a.state == "open"]
        rng.shuffle(owed)
        if owed and rng.random() < 0.5:
            owed = owed[: rng.randint(1, len(owed))]
        arrivals = [self._answer(rng, a.id, a.kind) for a in owed]
        dice = rng.random()
        if dice < 0.08:
            closed = self.oracle.rows(Action, session_id)
            known = rng.choice(closed) if closed else None
            arrivals.append(
                self._answer(rng, known.id if known else self._fresh(rng), rng.choice(("custom", "confirm")))
            )
        elif dice < 0.12 and arrivals:
            arrivals.append(rng.choice(arrivals))
        return arrivals

    def _answer(self, rng: Random, action_id: UUID, kind: str) -> Arrival:
        name = f"sevt_{ids.token(action_id)}"
        if kind == "custom":
            body = encode({"content": [{"type": "text", "text": "42"}], "is_error": rng.random() < 0.2})
            return Arrival(kind="custom_result", body=body, action_id=action_id, answer="result", reference=name)
        deny = rng.random() < 0.4
        body = encode({"result": "deny" if deny else "allow", "deny_message": "no" if deny else None})
        answer: Literal["deny", "allow"] = "deny" if deny else "allow"
        return Arrival(kind="confirmation", body=body, action_id=action_id, answer=answer, reference=name)

    def _accept(self, rng: Random) -> Accept:
        session_id = self._session(rng)
        arrivals = self._answers(rng, session_id) if rng.random() < 0.75 else []
        if not arrivals or rng.random() < 0.2:
            for _ in range(rng.choice((1, 1, 1, 2, 3)) if rng.random() > 0.02 else 40):
                arrivals.insert(rng.randint(0, len(arrivals)), self._message(rng))
        if rng.random() < 0.15:
            arrivals.insert(rng.randint(0, len(arrivals)), self._interrupt())
        elif rng.random() < 0.05:
            arrivals = [self._interrupt()]
        if rng.random() < 0.15:
            arrivals.append(self._system())
        elif rng.random() < 0.02:
            arrivals.insert(0, self._system())
        return Accept(
            session_id=session_id,
            workspace_id=self.workspace,
            arrivals=tuple(arrivals),
            submission=self._key(rng, 0.25),
            authority=self.workspace if rng.random() < 0.5 else None,
            claim_by=self._living(rng).id if rng.random() < 0.4 else None,
        )

    def _update(self, rng: Random) -> UpdateSession:
        return UpdateSession(
            session_id=self._session(rng),
            workspace_id=self.workspace,
            title=rng.choice((msgspec.UNSET, None, "one", "two")),
            metadata=rng.choice((msgspec.UNSET, {"a": "1"}, {"a": None, "b": "2"}, {f"k{i}": "v" for i in range(17)})),
            agent=rng.choice((None, None, b'{"system":"s"}')),
        )

    def _archive(self, rng: Random) -> ArchiveSession:
        return ArchiveSession(session_id=self._session(rng), workspace_id=self.workspace)

    def _delete(self, rng: Random) -> DeleteSession:
        return DeleteSession(session_id=self._session(rng), workspace_id=self.workspace)

    def _withdraw(self, rng: Random) -> WithdrawInput | None:
        session_id = self._session(rng)
        rows = self.oracle.rows(Input, session_id)
        waiting = [i for i in rows if i.state == "waiting"] or rows
        if not waiting:
            return None
        return WithdrawInput(session_id=session_id, workspace_id=self.workspace, input_id=rng.choice(waiting).id)

    def _foreign(self, rng: Random) -> Command:
        """A command for a session of another workspace, or for none."""
        foreign = self._fresh(rng)
        made = rng.choice((self._accept, self._update, self._archive, self._delete))(rng)
        if rng.random() < 0.2:
            return msgspec.structs.replace(made, session_id=foreign)
        return msgspec.structs.replace(made, workspace_id=foreign)

    # ------------------------------------------------------------------------------------------------------------ workers

    def _look(self, rng: Random) -> Advance:
        session_id = self._session(rng)
        return Advance(
            session_id=session_id,
            thread_id=ids.primary_thread(session_id),
            worker_id=self._living(rng).id,
            command_id=self._fresh(rng),
        )

    def _living(self, rng: Random) -> Seat:
        return rng.choice(self.seats)

    def _lives(self, worker_id: UUID) -> bool:
        return any(s.id == worker_id for s in self.seats)

    def _flight(self, rng: Random) -> tuple[Seat, Step, Lease] | None:
        flights = [(s, step) for s in self.seats for step in s.flying.values() if step.thread_id in s.leases]
        if not flights:
            return None
        seat, step = rng.choice(flights)
        return seat, step, seat.leases[step.thread_id]

    def _outcome(self, rng: Random, *, draining: bool = False) -> Advance | None:
        flight = self._flight(rng)
        if flight is None:
            return None
        seat, step, lease = flight
        stopped = step.thread_id in seat.stopping and rng.random() < 0.7
        outcome = (
            random_stop(rng, step) if stopped or rng.random() < 0.02 else random_outcome(rng, step, self.shape.mix)
        )
        return Advance(
            session_id=step.session_id,
            thread_id=step.thread_id,
            worker_id=seat.id,
            command_id=self._fresh(rng),
            lease=lease,
            outcome=outcome,
            draining=draining,
        )

    def _poke(self, rng: Random) -> Advance | None:
        made = self._outcome(rng)
        return None if made is None else msgspec.structs.replace(made, outcome=None)

    def _drain(self, rng: Random) -> Advance | None:
        return self._outcome(rng, draining=True)

    def _release(self, rng: Random) -> Release | None:
        flight = self._flight(rng)
        if flight is None:
            return None
        _, step, lease = flight
        if rng.random() < 0.1:
            lease = Lease(lease.turn_id, lease.attempt_no, lease.token + 1)
        return Release(session_id=step.session_id, thread_id=step.thread_id, lease=lease)

    def _stale_outcome(self, rng: Random) -> Advance:
        seat, step, lease = rng.choice(self._stale)
        return Advance(
            session_id=step.session_id,
            thread_id=step.thread_id,
            worker_id=seat.id,
            command_id=self._fresh(rng),
            lease=lease,
            outcome=random_outcome(rng, step, self.shape.mix) if rng.random() < 0.8 else None,
        )

    def _repeat(self, rng: Random) -> Command | None:
        """The same command again, as a client or worker does who missed the answer."""
        if not self._recent:
            return None
        keyed = [c for c in self._recent if isinstance(c, (Accept, CreateSession)) and c.submission is not None]
        command = rng.choice(keyed if keyed and rng.random() < KEYED_REPEAT_CHANCE else self._recent)
        if isinstance(command, CreateSession) and command.submission is None:
            return None
        if isinstance(command, Advance) and command.lease is None and not self._lives(command.worker_id):
            return None
        if isinstance(command, Accept) and command.claim_by is not None and not self._lives(command.claim_by):
            return None
        if isinstance(command, (Accept, CreateSession)) and command.submission is not None:
            key = self._retried(rng, command.submission)
            if isinstance(command, CreateSession):
                fresh = self._fresh(rng)
                config = msgspec.structs.replace(command.config, session_id=fresh)
                return msgspec.structs.replace(command, submission=key, session_id=fresh, config=config)
            return msgspec.structs.replace(command, submission=key)
        return command

    def _retried(self, rng: Random, key: SubmissionKey) -> SubmissionKey:
        """The key of a repeat, whose process remembers a response: that of the request before, another one's, or none."""
        answered = rng.choice((None, key.request_id, self._fresh(rng)))
        known = None if answered is None else Written(answered, timedelta(0), rng.random() < 0.5)
        attempt = key.attempt + rng.choice((0, 1, 1, 1))
        return msgspec.structs.replace(key, attempt=attempt, request_id=self._fresh(rng), known=known)

    def _wake(self, rng: Random) -> Wake:
        session_id = self._session(rng)
        return Wake(session_id=session_id, thread_id=ids.primary_thread(session_id))

    # ----------------------------------------------------------------------------------------------------------- learning

    def saw(self, command: Command, result: Result) -> None:
        """Learn from an answer."""
        self._recent = [*self._recent[-7:], command]
        made = isinstance(command, CreateSession) and not isinstance(result, Refused)
        if made and (command.session_id,) in self.oracle.tables[Session] and command.session_id not in self.sessions:
            self.sessions.append(command.session_id)
        seat = next((s for s in self.seats if isinstance(command, Advance) and s.id == command.worker_id), None)
        if seat is not None and isinstance(command, Advance):
            self._worked(seat, command, result)

    def _worked(self, seat: Seat, command: Advance, result: Result) -> None:
        if command.outcome is not None:
            seat.flying.pop(command.outcome.step_id, None)
        if isinstance(result, (Perform, Working)):
            self._ground(seat, command.thread_id, keep=result.lease)
            seat.leases[command.thread_id] = result.lease
            if isinstance(result, Working) and result.stop:
                seat.stopping.add(command.thread_id)
            if isinstance(result, Perform):
                seat.flying |= {s.id: s for s in result.steps}
            return
        self._ground(seat, command.thread_id, keep=None)

    def claimed(self, worker_id: UUID, thread_id: UUID, perform: Perform) -> None:
        """An admission claimed a turn for a worker."""
        for seat in self.seats:
            if seat.id == worker_id:
                self._ground(seat, thread_id, keep=perform.lease)
                seat.leases[thread_id] = perform.lease
                seat.flying |= {s.id: s for s in perform.steps}

    def _ground(self, seat: Seat, thread_id: UUID, *, keep: Lease | None) -> None:
        """Calls of a lease that is gone are remembered: their results may still come, late."""
        old = seat.leases.get(thread_id)
        if old is None or old == keep:
            return
        seat.stopping.discard(thread_id)
        for step in [s for s in seat.flying.values() if s.thread_id == thread_id]:
            self._stale = [*self._stale[-9:], (seat, step, old)]
            del seat.flying[step.id]
        del seat.leases[thread_id]

    def bury(self, worker_id: UUID) -> None:
        """A worker is gone; a new one takes its place. What it had in flight may still report, late."""
        for place, seat in enumerate(self.seats):
            if seat.id == worker_id:
                for thread_id in list(seat.leases):
                    self._ground(seat, thread_id, keep=None)
                self.seats[place] = Seat(UUID(int=(worker_id.int + 1) % (1 << 128)))


class Failed(AssertionError):
    """A history broke a rule. The message says which, and how to see it again."""


class Play:
    """A history, move by move, on the oracle, checked after each commit."""

    def __init__(self, shape: Shape | None = None) -> None:
        self.oracle = OracleLedger()
        self.history = History(self.oracle, shape)
        self.witness = Witness(self.oracle)
        self.moves: list[Move] = []
        self.claims: dict[UUID, Perform] = {}
        """What the last batch claimed at admission, by thread."""
        self._new_claims: dict[UUID, Perform] = {}
        self.oracle.on_commit = self._heard

    def choose(self, seed: int) -> Move:
        """The next move, not yet played."""
        move = self.history.choose(seed)
        self.moves.append(move)
        return move

    def prepare(self, move: Move) -> None:
        """What happens before the batch: time, a death."""
        self.claims.clear()
        self.oracle.clock.advance(milliseconds=move.pass_ms)
        if move.buried is not None:
            self.oracle.bury(move.buried)

    def _heard(self, committed: Committed) -> None:
        self.claims |= dict(committed.claimed)
        self._new_claims = dict(committed.claimed)

    def commit(self, command: Command) -> Result:
        """One command; its answer is judged on the spot."""
        self._new_claims.clear()
        self.witness.before(command)
        result = self.oracle.apply(command)
        self.witness.after(command, result)
        if isinstance(command, Accept) and command.claim_by is not None:
            for thread_id, perform in self._new_claims.items():
                self.witness.claimed(command, perform)
                self.history.claimed(command.claim_by, thread_id, perform)
        return result

    def apply(self, move: Move, *, between_first: bool = True) -> tuple[Result | None, list[Result]]:
        """The answers of `between` and of the batch. A `between` that met no write of its session came after the batch."""
        between = None
        if move.between is not None and between_first:
            between = self.commit(move.between)
        results = [self.commit(c) for c in move.commands]
        if move.between is not None and not between_first:
            between = self.commit(move.between)
        return between, results

    def play(self, move: Move) -> list[Result]:
        """A whole move, checked."""
        self.prepare(move)
        between, results = self.apply(move)
        self.learn(move, between, results)
        return results

    def learn(self, move: Move, between: Result | None, results: Sequence[Result]) -> None:
        """Tell the generator and check what must hold now."""
        if move.between is not None and between is not None:
            self.history.saw(move.between, between)
        for command, result in zip(move.commands, results, strict=True):
            self.history.saw(command, result)
        touched = {c.session_id for c in (*move.commands, *((move.between,) if move.between else ()))}
        faults = self.witness.faults + check_sessions(self.oracle, touched if move.buried is None else None)
        if faults:
            raise Failed(f"{faults[0]} (and {len(faults) - 1} more)\nafter {_told(move)}")


def _told(move: Move) -> str:
    return "\n".join(str(msgspec.to_builtins(c, builtin_types=(bytes,))) for c in move.commands)


def step_seeds(seed: int, length: int) -> list[int]:
    """A history's integers from one."""
    rng = Random(seed)
    return [rng.getrandbits(STEP_BITS) for _ in range(length)]


def play_all(seeds: Sequence[int], shape: Shape | None = None) -> Play:
    """A whole history on the oracle alone. Raises `Failed`."""
    play = Play(shape)
    for seed in seeds:
        play.play(play.choose(seed))
    return play
