"""What holds of the ledger's rows between any two commits. Checked over the oracle's tables, which the differential test compares with
PostgreSQL's row by row.
"""

from collections import Counter
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from perdure.domain.barrier import Action
from perdure.domain.control import STOP_GRACE_MS, Control
from perdure.domain.event import Event
from perdure.domain.mailbox import Input
from perdure.domain.session import Session, Thread
from perdure.domain.step import Step
from perdure.domain.submission import Submission
from perdure.domain.transcript import TranscriptEntry, build_messages
from perdure.domain.turn import CHARGE_MAX, PARALLEL_TOOLS_MAX, Turn
from perdure.domain.wakeup import Wakeup
from perdure.testing.oracle import OracleLedger
from perdure.testing.small_model import Trace, check_messages, check_trace


def trace_of(oracle: OracleLedger, session: Session) -> Trace:
    """One session's rows, as the small model wants them."""
    return Trace(
        session=session,
        threads=oracle.rows(Thread, session.id),
        inputs=sorted(oracle.rows(Input, session.id), key=lambda i: i.seq),
        turns=oracle.rows(Turn, session.id),
        steps=oracle.rows(Step, session.id),
        actions=oracle.rows(Action, session.id),
        events=sorted(oracle.rows(Event, session.id), key=lambda e: e.seq),
        transcript=oracle.rows(TranscriptEntry, session.id),
    )


def history_of(oracle: OracleLedger, session_id: UUID) -> list[dict[str, Any]]:
    """The messages that the next model call of a session would send."""
    bodies = {e.seq: e.body for e in oracle.rows(Event, session_id)}
    rows = sorted(oracle.rows(TranscriptEntry, session_id), key=lambda t: (t.causal_pos, t.position))
    filled = (_with_body(r, None if r.ref_seq is None else bodies.get(r.ref_seq)) for r in rows)
    return build_messages(filled)


def _with_body(row: TranscriptEntry, body: bytes | None) -> TranscriptEntry:
    return TranscriptEntry(**{f: getattr(row, f) for f in row.__struct_fields__ if f != "ref_body"}, ref_body=body)


def check_sessions(
    oracle: OracleLedger, session_ids: Iterable[UUID] | None = None, *, before_reaping: bool = False
) -> list[str]:
    """Everything that must hold of these sessions, or of all, between two commits.

    `before_reaping`: somebody may have claimed under the id of a dead worker, and nobody has looked for such threads since.
    """
    faults: list[str] = []
    wanted = None if session_ids is None else set(session_ids)
    for session in oracle.all(Session):
        if wanted is not None and session.id not in wanted:
            continue
        faults += check_trace(trace_of(oracle, session))
        faults += [f"session {session.id}: {f}" for f in _check_session(oracle, session, reaped=not before_reaping)]
    return faults


def check_quiet(oracle: OracleLedger) -> list[str]:
    """What must hold besides when nothing is in flight and nobody owes anything."""
    faults = check_sessions(oracle)
    faults += [f"input {i.seq} of {i.session_id} is {i.state}" for i in oracle.all(Input) if i.settled_at is None]
    faults += [f"turn {t.id} is {t.state}" for t in oracle.all(Turn) if t.state != "settled"]
    faults += [f"wakeup of thread {w.thread_id}" for w in oracle.all(Wakeup)]
    faults += [f"control {c.seq} of {c.session_id} is open" for c in oracle.all(Control) if c.state == "open"]
    for session in oracle.all(Session):
        faults += check_messages(_closed(history_of(oracle, session.id)))
    return faults


def _closed(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The history with a next message behind it, as a next turn would send it."""
    said = {"type": "text", "text": "next"}
    if messages and messages[-1]["role"] == "user":
        return [*messages[:-1], {"role": "user", "content": [*messages[-1]["content"], said]}]
    return [*messages, {"role": "user", "content": [said]}]


def _check_session(oracle: OracleLedger, session: Session, *, reaped: bool) -> list[str]:
    faults: list[str] = []
    inputs = oracle.rows(Input, session.id)
    turns = oracle.rows(Turn, session.id)
    controls = [c for c in oracle.rows(Control, session.id) if c.state == "open"]
    for thread in oracle.rows(Thread, session.id):
        waiting = [i for i in inputs if i.thread_id == thread.id and i.state == "waiting"]
        counts = (len(waiting), sum(i.size_bytes for i in waiting), sum(c.thread_id == thread.id for c in controls))
        if counts != (thread.waiting_count, thread.waiting_bytes, thread.control_count):
            faults.append(f"thread {thread.id} counts {thread}, the rows say {counts}")
        unsettled = [t for t in turns if t.thread_id == thread.id and t.state != "settled"]
        if [t.id for t in unsettled] != ([] if thread.turn_id is None else [thread.turn_id]):
            faults.append(f"slot {thread.turn_id}, unsettled turns {[t.id for t in unsettled]}")
        if reaped or not _is_orphan(oracle, unsettled):
            faults += _check_wakeup(oracle, session, thread, unsettled, controls)
    for turn in turns:
        faults += _check_turn(oracle, turn)
    answers = Counter(a.answer_seq for a in oracle.rows(Action, session.id) if a.answer_seq is not None)
    faults += [f"input {seq} answers {n} actions" for seq, n in answers.items() if n > 1]
    running = session.running_since is not None
    if running != (session.status in ("running", "rescheduling")):
        faults.append(f"status {session.status} with running_since {session.running_since}")
    faults += [f"row of nobody: {s}" for s in oracle.all(Submission) if (s.session_id,) not in oracle.tables[Session]]
    return faults


def _is_orphan(oracle: OracleLedger, unsettled: list[Turn]) -> bool:
    workers = (oracle.workers.get(t.worker_id) for t in unsettled if t.worker_id is not None)
    return any(w is not None and w.dead_at is not None for w in workers)


def _check_wakeup(
    oracle: OracleLedger, session: Session, thread: Thread, unsettled: list[Turn], controls: list[Control]
) -> list[str]:
    """A thread with claimable work, an open stop, a due retry or a lapsed lease has a wakeup row that is due in time."""
    if session.state != "open":
        return []
    due = _due_by(oracle, thread, unsettled[0] if unsettled else None, controls)
    row = oracle.tables.get(Wakeup, {}).get((session.id, thread.id))
    if due is None or (isinstance(row, Wakeup) and row.due_at <= due):
        return []
    return [f"thread {thread.id} must be looked at by {due}, its wakeup is {row}"]


def _due_by(oracle: OracleLedger, thread: Thread, turn: Turn | None, controls: list[Control]) -> datetime | None:
    now = oracle.clock.now
    if turn is None:
        return now if thread.waiting_count else None
    if turn.state == "waiting":
        if turn.wait == "action":
            return None
        return max(now, turn.wake_at) if turn.wake_at else now
    worker = None if turn.worker_id is None else oracle.workers.get(turn.worker_id)
    if worker is not None and worker.dead_at is not None:
        return now
    stops = [c.at for c in controls if c.thread_id == thread.id]
    return min(stops) + timedelta(milliseconds=STOP_GRACE_MS) if stops else None


def _check_turn(oracle: OracleLedger, turn: Turn) -> list[str]:
    faults: list[str] = []
    steps = [s for s in oracle.rows(Step, turn.session_id) if s.turn_id == turn.id]
    flying = [s for s in steps if s.state == "dispatched"]
    if len(flying) > PARALLEL_TOOLS_MAX:
        faults.append(f"turn {turn.id} has {len(flying)} calls in flight")
    if sum(s.serial for s in flying) > 1:
        faults.append(f"turn {turn.id} uses its shell twice at once")
    if turn.state == "active" and not flying:
        faults.append(f"turn {turn.id} is active and nothing is in flight")
    if turn.state == "active" and not (turn.charged and 1 <= turn.charge <= CHARGE_MAX):
        faults.append(f"turn {turn.id} runs with charge {turn.charge}, charged {turn.charged}")
    if turn.state == "waiting" and (turn.worker_id or turn.charged or flying or turn.charge >= CHARGE_MAX):
        faults.append(f"turn {turn.id} waits with a worker, a charge or calls: {turn}")
    if turn.state == "waiting" and turn.wait == "retry" and turn.wake_at is None:
        faults.append(f"turn {turn.id} waits for a retry at no time")
    if (turn.state == "settled") != (turn.outcome is not None):
        faults.append(f"turn {turn.id} is {turn.state} with outcome {turn.outcome}")
    return faults
