"""The ledger: a list of whole transactions, not of tables.

Each method is one commit. A crash before it leaves nothing, a crash after it leaves everything, and the same command sent again is
answered as the first time where its docstring says so. Two implementations exist: PostgreSQL, and the oracle of the test kit.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Final, Literal, Protocol, TypeAlias
from uuid import UUID

import msgspec

from perdure.domain.barrier import Action, Answer
from perdure.domain.errors import Fenced, Refused
from perdure.domain.event import Event
from perdure.domain.mailbox import Input, InputKind
from perdure.domain.session import Session, SessionConfig, SessionStatus, Thread
from perdure.domain.step import OnLost, Step
from perdure.domain.submission import SubmissionKey
from perdure.domain.transcript import TranscriptEntry
from perdure.domain.turn import Lease, Turn
from perdure.ports.model import StopReason, Usage

# ---------------------------------------------------------------------------------------------------------------- commands


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """One client event of a request, in canonical form. `body` is its content as every face will read it back."""

    kind: InputKind | Literal["interrupt"]
    body: bytes
    action_id: UUID | None = None
    answer: Answer | None = None
    reference: str = ""
    """The id of the action as the client wrote it, for messages."""
    param: str = ""
    """Where in the request it stands, for messages: `events.2`."""


class CreateSession(msgspec.Struct, frozen=True, kw_only=True):
    """Make a session and admit its first inputs."""

    session_id: UUID
    workspace_id: UUID
    profile: str
    agent_id: UUID | None
    agent_version: int
    environment_id: UUID | None
    model: str
    config: SessionConfig
    arrivals: tuple[Arrival, ...] = ()
    submission: SubmissionKey | None = None
    authority: UUID | None = None
    refused: Refused | None = None
    """Why it can't be made with what it asks for, unless it was made already: then this is a repeat, and answered as one."""


class Accept(msgspec.Struct, frozen=True, kw_only=True):
    """Admit a batch of client events, all or none."""

    session_id: UUID
    workspace_id: UUID
    arrivals: tuple[Arrival, ...]
    submission: SubmissionKey | None = None
    authority: UUID | None = None
    claim_by: UUID | None = None
    """A worker with a free place: what may run now is claimed for it in the same commit."""


class OutBlock(msgspec.Struct, frozen=True, kw_only=True):
    """One completed block of a reply that clients may see. `body` is its public content."""

    index: int
    kind: Literal["message", "thinking"]
    body: bytes


class CallPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One call of a reply, judged. `body` is its public name and input.

    `server` runs here; `ask` runs here once a client allows it; `custom` is the client's; `refused` never runs and is answered with
    `error`.
    """

    index: int
    name: str
    owner: Literal["server", "ask", "custom", "refused"]
    body: bytes
    on_lost: OnLost = "ambiguous"
    error: str = ""
    policy: str | None = None
    serial: bool = False
    """Shares one shell with its like: such calls run one after the other."""


class ModelReplied(msgspec.Struct, frozen=True, kw_only=True):
    """A model step ended with a whole reply."""

    step_id: UUID
    blocks: tuple[OutBlock, ...]
    calls: tuple[CallPlan, ...]
    transcript: bytes | None
    """The reply's native blocks with our call ids, or None when nothing of it may be sent back."""
    stop_reason: StopReason
    stop_details: bytes | None
    usage: Usage


class ModelErred(msgspec.Struct, frozen=True, kw_only=True):
    """A model step ended without a reply."""

    step_id: UUID
    code: str
    message: str
    retryable: bool
    retry_after_ms: int | None = None
    usage: Usage | None = None


class ToolReturned(msgspec.Struct, frozen=True, kw_only=True):
    """A tool step ended. `body` is the public result, `transcript` the model's."""

    step_id: UUID
    body: bytes
    transcript: bytes
    is_error: bool


class Stopped(msgspec.Struct, frozen=True, kw_only=True):
    """A step was cancelled because its turn is interrupted. What had been completed of a reply comes with it."""

    step_id: UUID
    blocks: tuple[OutBlock, ...] = ()
    calls: tuple[CallPlan, ...] = ()
    transcript: bytes | None = None
    usage: Usage | None = None


StepOutcome: TypeAlias = ModelReplied | ModelErred | ToolReturned | Stopped


class Advance(msgspec.Struct, frozen=True, kw_only=True):
    """Look at a thread, and record what a step gave.

    Without a lease the caller asks to own the thread's work; with one it goes on. The same `command_id` gets the same answer.
    """

    session_id: UUID
    thread_id: UUID
    worker_id: UUID
    command_id: UUID
    lease: Lease | None = None
    outcome: StepOutcome | None = None
    draining: bool = False
    """The caller is on its way out: record, start nothing, and give the turn back once nothing is in flight."""


class Release(msgspec.Struct, frozen=True, kw_only=True):
    """Give a turn back in order (drain): its charge is returned and another worker takes it at once."""

    session_id: UUID
    thread_id: UUID
    lease: Lease


class UpdateSession(msgspec.Struct, frozen=True, kw_only=True):
    """Change a session's title, metadata or agent. `agent` holds the replaced fields of the snapshot, JSON."""

    session_id: UUID
    workspace_id: UUID
    title: str | msgspec.UnsetType | None = msgspec.UNSET
    metadata: dict[str, str | None] | msgspec.UnsetType = msgspec.UNSET
    agent: bytes | None = None


class ArchiveSession(msgspec.Struct, frozen=True, kw_only=True):
    """End a session and keep its history. Repeatable."""

    session_id: UUID
    workspace_id: UUID


class DeleteSession(msgspec.Struct, frozen=True, kw_only=True):
    """Fence a session for deletion; its rows and workspace go afterwards. A repeat joins it."""

    session_id: UUID
    workspace_id: UUID
    submission: SubmissionKey | None = None


class WithdrawInput(msgspec.Struct, frozen=True, kw_only=True):
    """Take back one waiting input."""

    session_id: UUID
    workspace_id: UUID
    input_id: UUID


class Wake(msgspec.Struct, frozen=True, kw_only=True):
    """Make sure a thread whose worker died is looked at."""

    session_id: UUID
    thread_id: UUID


Command: TypeAlias = (
    CreateSession | Accept | Advance | Release | UpdateSession | ArchiveSession | DeleteSession | WithdrawInput | Wake
)

# ----------------------------------------------------------------------------------------------------------------- results


class Accepted(msgspec.Struct, frozen=True, kw_only=True):
    """The events that the request became. `repeat` when it had been admitted before."""

    events: tuple[Event, ...]
    repeat: bool = False
    span: tuple[int, int] = (0, 0)
    """First and last sequence of the first admission, of a repeat."""


class Created(msgspec.Struct, frozen=True, kw_only=True):
    """The session, as the commit left it. `repeat` when the request had been admitted before."""

    session_id: UUID
    repeat: bool = False


class Perform(msgspec.Struct, frozen=True, kw_only=True, tag="perform"):
    """Make these calls; they are marked dispatched. Calls of this attempt already in flight go on."""

    lease: Lease
    steps: tuple[Step, ...]


class Working(msgspec.Struct, frozen=True, kw_only=True, tag="working"):
    """Calls of this attempt are in flight; nothing new. With `stop` they are to be cancelled."""

    lease: Lease
    stop: bool = False


class Parked(msgspec.Struct, frozen=True, tag="parked"):
    """The turn waits for a client."""


class Retry(msgspec.Struct, frozen=True, tag="retry"):
    """The turn waits until `at`."""

    at: datetime


class Idle(msgspec.Struct, frozen=True, tag="idle"):
    """Nothing here is the caller's to do."""


Answered: TypeAlias = Perform | Working | Parked | Retry | Idle | Fenced


class Done(msgspec.Struct, frozen=True):
    """It is so, now or already."""


Result: TypeAlias = Accepted | Created | Answered | Done | Refused


class Committed(msgspec.Struct, frozen=True, kw_only=True):
    """What one commit did to one session, for the live plane of the same process. A hint: the ledger is the truth."""

    session_id: UUID
    events: tuple[Event, ...]
    woken: tuple[tuple[UUID, int], ...]
    """Threads with a wakeup, and in how many milliseconds it is due."""
    stopped: tuple[UUID, ...]
    """Threads with an open stop."""
    claimed: "tuple[tuple[UUID, Perform], ...]" = ()
    """Threads whose turn was claimed at admission for a worker of this process, and the calls it owes."""
    deleted: bool = False


# ------------------------------------------------------------------------------------------------------------------- reads


READ_ROWS_MAX: Final = 200
"""What callers ask one read of events for. Such a read takes about a millisecond, and a connection is free for the next."""

READ_BYTES_MAX: Final = 1024 * 1024
"""A read of events ends with the row that reaches this much, whatever `limit` says.

A body may be as large as a request, so rows alone bound nothing. It is what MA-F11 keeps in memory for a stream's reader that is
behind: a read for it holds no more, but for the one row that goes beyond.
"""


class SeenEvent(msgspec.Struct, frozen=True):
    """A row as a reader meets it: `event` with the body of the row it refers to, and that row."""

    event: Event
    referred: Event | None

    @property
    def size_bytes(self) -> int:
        """What it counts for where bytes are bounded."""
        return stored_bytes(self.event) + len((self.referred.body if self.referred else None) or b"")


def stored_bytes(event: Event) -> int:
    """What a row's content takes."""
    return len(event.snap) + len(event.body or b"")


def is_full(read: Sequence[SeenEvent], limit: int) -> bool:
    """Whether a read of events with this `limit` ended at one of its bounds. Then more may follow; else nothing did."""
    return len(read) >= limit or sum(seen.size_bytes for seen in read) >= READ_BYTES_MAX


class EventQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which rows of a session a list wants. `after_seq` is exclusive in the direction of `descending`."""

    session_id: UUID
    types: tuple[tuple[str, str | None], ...] | None = None
    """Pairs (type, kind or None for any kind)."""
    after_seq: int | None = None
    descending: bool = False
    processed_after: datetime | None = None
    processed_from: datetime | None = None
    processed_before: datetime | None = None
    processed_until: datetime | None = None
    limit: int


class SessionQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which sessions of a workspace a list wants, ordered by (created_at, id)."""

    workspace_id: UUID
    profile: str
    agent_id: UUID | None = None
    agent_version: int | None = None
    statuses: tuple[SessionStatus, ...] | None = None
    include_archived: bool = False
    created_after: datetime | None = None
    created_from: datetime | None = None
    created_before: datetime | None = None
    created_until: datetime | None = None
    descending: bool = True
    after: tuple[datetime, UUID] | None = None
    limit: int


class SessionView(msgspec.Struct, frozen=True, kw_only=True):
    """A session with its configuration and primary thread, read in one snapshot."""

    session: Session
    config: SessionConfig
    thread: Thread


class Work(msgspec.Struct, frozen=True):
    """A thread the sweep found, and since when it is due."""

    due_at: datetime
    session_id: UUID
    thread_id: UUID


class StepInput(msgspec.Struct, frozen=True, kw_only=True):
    """What a performer needs to make a call, read outside transactions."""

    config: SessionConfig
    turn: Turn
    call: Event | None
    """The event with the call's name and arguments; None for a model step."""


class Ledger(Protocol):
    """Sessions, their inputs, turns, steps and events."""

    async def create(self, command: CreateSession) -> Created | Refused:
        """Make a session, its thread and its first inputs. A repeat by `submission` answers with the first one's session."""
        ...

    async def accept(self, command: Accept) -> Accepted | Refused:
        """Custody of the inputs, their receipt events, status and wakeup, all or none. A repeat gets the first answer."""
        ...

    async def advance(self, command: Advance) -> Answered:
        """Record a step's outcome, then claim, adopt, go on, park, retry, finish or end the turn: one of the answers."""
        ...

    async def release(self, command: Release) -> Done | Fenced:
        """End the attempt in order. Steps still in flight count as lost without blame."""
        ...

    async def update(self, command: UpdateSession) -> Done | Refused:
        """Change the configuration and publish what changed; a change to what is so already publishes nothing."""
        ...

    async def archive(self, command: ArchiveSession) -> Done | Refused:
        """End the session visibly; a parked turn is closed with it."""
        ...

    async def delete(self, command: DeleteSession) -> Done | Refused:
        """Raise the fence: from this commit on every read is 404 and late writers find nothing."""
        ...

    async def withdraw(self, command: WithdrawInput) -> Done | Refused:
        """Cancel one waiting input; refused once a turn took it."""
        ...

    async def wake(self, command: Wake) -> Done:
        """Add the wakeup that the rules ask for, if it is missing."""
        ...

    async def read_session(self, workspace_id: UUID, session_id: UUID) -> SessionView | None:
        """One session; None when missing, deleted, or another workspace's."""
        ...

    async def read_sessions(self, query: SessionQuery) -> list[SessionView]:
        """A page."""
        ...

    async def read_events(self, query: EventQuery) -> list[SeenEvent]:
        """The next rows, without those that only a stream shows: up to `limit` or `READ_BYTES_MAX`, and one at least. See `is_full`."""
        ...

    async def read_feed(self, session_id: UUID, after_seq: int, limit: int) -> list[SeenEvent] | None:
        """Every row after a cursor, in order, bounded like `read_events`; None when the session is gone."""
        ...

    async def read_head(self, session_id: UUID) -> int | None:
        """The latest sequence; None when the session is gone."""
        ...

    async def read_heads(self, session_ids: Sequence[UUID]) -> dict[UUID, int]:
        """The latest sequences of many sessions; one that is gone is not among them."""
        ...

    async def read_transcript(self, session_id: UUID, thread_id: UUID) -> list[TranscriptEntry]:
        """The model's history in causal order, bodies filled in."""
        ...

    async def read_step(self, step: Step) -> StepInput | None:
        """What the performer of a step needs; None when the session is gone."""
        ...

    async def read_inputs(self, session_id: UUID, *, limit: int) -> list[Input]:
        """The custody of a session's inputs, newest first."""
        ...

    async def read_actions(self, session_id: UUID) -> list[Action]:
        """The open actions."""
        ...

    async def read_work(self, limit: int, after: Work | None = None) -> Sequence[Work]:
        """Threads whose wakeup is due, oldest first, or those behind `after` in that order; looking moves nothing."""
        ...

    async def read_held(self, worker_id: UUID) -> Sequence[Work]:
        """Threads whose turn is active under a worker; `due_at` is when each last made progress."""
        ...
