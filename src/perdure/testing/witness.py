"""A witness of commands and answers: judges each answer by what was there before, without the rules' own code."""

from typing import Final
from uuid import UUID

from perdure.domain.errors import Fenced, Refused
from perdure.domain.event import Event
from perdure.domain.session import Session, Thread
from perdure.domain.submission import SubmissionKey
from perdure.domain.turn import Lease, Turn
from perdure.ports.ledger import (
    Accept,
    Accepted,
    Advance,
    ArchiveSession,
    Command,
    Created,
    CreateSession,
    DeleteSession,
    Done,
    Perform,
    Release,
    Result,
    UpdateSession,
    WithdrawInput,
    Working,
)
from perdure.testing.invariants import history_of
from perdure.testing.oracle import OracleLedger
from perdure.testing.small_model import check_messages

_CLIENTS: Final = (Accept, UpdateSession, ArchiveSession, DeleteSession, WithdrawInput)


class Witness:
    """Remembers what was promised, and says what broke a promise."""

    def __init__(self, oracle: OracleLedger) -> None:
        self.faults: list[str] = []
        self._oracle = oracle
        self._fenced = False
        self._foreign = False
        self._gone = False
        self._starts: dict[UUID, str] = {}
        self._tools: dict[tuple[UUID, int, int], UUID] = {}
        self._explicit: dict[bytes, tuple[UUID, ...]] = {}
        self._retries: dict[tuple[UUID, ...], int] = {}
        self._recorded: dict[bytes, SubmissionKey] = {}
        self._answers: dict[UUID, Result] = {}
        self._replayed = False
        self._admissions = 0

    def before(self, command: Command) -> None:
        """Look at what is there."""
        session = self._oracle.tables.get(Session, {}).get((command.session_id,))
        self._gone = isinstance(session, Session) and session.state in ("deleting", "deleted")
        owner = session.workspace_id if isinstance(session, Session) else None
        self._foreign = isinstance(command, _CLIENTS) and owner != command.workspace_id
        lease = command.lease if isinstance(command, (Advance, Release)) else None
        self._fenced = lease is not None and not self._owns(command.session_id, lease)
        self._replayed = isinstance(command, Advance) and not self._gone and self._is_last(command)

    def _owns(self, session_id: UUID, lease: Lease) -> bool:
        turn = self._oracle.tables.get(Turn, {}).get((session_id, lease.turn_id))
        if not isinstance(turn, Turn) or turn.state != "active":
            return False
        return (turn.attempt_no, turn.lease_token) == (lease.attempt_no, lease.token)

    def _is_last(self, command: Advance) -> bool:
        thread = self._oracle.tables.get(Thread, {}).get((command.session_id, command.thread_id))
        return isinstance(thread, Thread) and thread.command_id == command.command_id

    def after(self, command: Command, result: Result) -> None:
        """Judge the answer."""
        if self._foreign and not (isinstance(result, Refused) and result.kind == "not_found"):
            self._blame(command, result, "another workspace's session is not found")
        match command:
            case Advance():
                self._judge_advance(command, result)
            case Release():
                if isinstance(result, Done) == self._fenced:
                    self._blame(command, result, "a lease that is gone releases nothing")
            case Accept() | CreateSession():
                self._judge_admission(command, result)
            case _:
                pass

    def _blame(self, command: Command, result: Result, rule: str) -> None:
        self.faults.append(f"{rule}: {type(command).__name__} of session {command.session_id} was answered {result}")

    # ------------------------------------------------------------------------------------------------------------ workers

    def _judge_advance(self, command: Advance, result: Result) -> None:
        if self._replayed:
            if result != self._answers[command.command_id]:
                self._blame(command, result, "the same command is answered as the first time")
            return
        if self._fenced and not isinstance(result, Fenced):
            self._blame(command, result, "a worker that lost its turn is fenced")
        if isinstance(result, Perform):
            self._started(command, str(command.command_id), result)
        if isinstance(result, (Perform, Working)):
            self._judge_owner(command, command.worker_id, result)
        self._answers[command.command_id] = result

    def claimed(self, command: Accept, result: Perform) -> None:
        """Judge what an admission handed out."""
        assert command.claim_by is not None
        # No command hands out what an admission did, not even a repeat of it.
        self._admissions += 1
        self._started(command, f"admission {self._admissions}", result)
        self._judge_owner(command, command.claim_by, result)

    def _judge_owner(self, command: Command, worker_id: UUID, result: Perform | Working) -> None:
        turn = self._oracle.tables[Turn].get((command.session_id, result.lease.turn_id))
        if not isinstance(turn, Turn) or turn.worker_id != worker_id:
            self._blame(command, result, "who is told to work owns the turn")

    def _started(self, command: Command, by: str, result: Perform) -> None:
        """Each call is handed out once; a tool's call is made once in all, unless it is harmless."""
        for step in result.steps:
            first = self._starts.setdefault(step.id, by)
            if first != by:
                self._blame(command, result, f"step {step.id} is handed out twice")
            if step.kind == "model":
                faults = check_messages(history_of(self._oracle, command.session_id))
                self.faults += [f"a model call of session {command.session_id}: {f}" for f in faults]
            elif step.on_lost != "repeat":
                key = (step.turn_id, step.round, step.position)
                if self._tools.setdefault(key, step.id) != step.id:
                    self._blame(command, result, f"call {step.item_id} is made twice")

    # ------------------------------------------------------------------------------------------------------------ clients

    def _judge_admission(self, command: Accept | CreateSession, result: Result) -> None:
        events = result.events if isinstance(result, Accepted) else ()
        for event in events:
            if (event.session_id, event.seq) not in self._oracle.tables[Event]:
                self._blame(command, result, "what was acknowledged is in the ledger")
        if isinstance(result, Created) and (result.session_id,) not in self._oracle.tables[Session]:
            self._blame(command, result, "what was acknowledged is in the ledger")
        if isinstance(command, Accept) and isinstance(result, Accepted) and len(events) != len(command.arrivals):
            self._blame(command, result, "every event of a request is acknowledged")
        key = command.submission
        if key is None or not isinstance(result, (Accepted, Created)):
            return
        made = (result.session_id,) if isinstance(result, Created) else tuple(e.id for e in events)
        if key.explicit:
            if self._explicit.setdefault(key.digest, made) != made:
                self._blame(command, result, "one key is admitted once")
        else:
            self._judge_retry(command, result, key, made)

    def _judge_retry(
        self, command: Accept | CreateSession, result: Accepted | Created, key: SubmissionKey, made: tuple[UUID, ...]
    ) -> None:
        """Without an explicit key. Responses are never noted in the ledger here: a request knows what its process knows."""
        recorded = self._recorded.get(key.digest)
        if result.repeat:
            if self._retries.get(made, 0) >= key.attempt:
                self._blame(command, result, "an answer is given to one retry of each count")
            self._retries[made] = key.attempt
        if recorded is not None and key.attempt > recorded.attempt:
            read = key.known is not None and key.known.request_id == recorded.request_id and key.known.connection_reused
            if read and result.repeat:
                self._blame(command, result, "who has read an answer asks anew")
            if not read and not result.repeat:
                self._blame(command, result, "a retry that may have missed its answer is a repeat")
        self._recorded[key.digest] = key
