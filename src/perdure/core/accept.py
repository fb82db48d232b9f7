"""Accept: custody of client events. One commit gives receipt, status and wakeup, or none of them.

A batch is admitted whole or not at all, in the order given.
"""

from itertools import pairwise
from uuid import UUID

import msgspec

from perdure.core.advance import claim_at_once
from perdure.core.draft import Draft
from perdure.core.settle import after_interrupt, end_turn, interrupt_head, park_phase, set_phase, settle_control
from perdure.domain.barrier import Action, refuse_answer, still_owed
from perdure.domain.control import Control, decide_interrupt
from perdure.domain.errors import Refused
from perdure.domain.event import Event, InputSnap
from perdure.domain.mailbox import Input, InputKind, Room, decide_room, refuse_system
from perdure.domain.session import refuse_input
from perdure.domain.submission import Repeat, Submission, SubmissionKey, decide_submission
from perdure.ports.ledger import Accept, Accepted, Arrival


def accept(draft: Draft, command: Accept) -> Accepted | Refused:
    """Admit a batch to the primary thread of a session that exists.

    MA-E1.5: a repeat is recognised before the session's state is looked at, so it gets its first answer whatever happened since.
    """
    if draft.session_row is None or draft.session.workspace_id != command.workspace_id:
        return Refused("not_found", "session_not_found", "Session not found.")
    key = command.submission
    match decide_submission(key, draft.submissions.get(key.digest) if key else None, draft.now):
        case Refused() as refused:
            return refused
        case Repeat(record):
            count_retry(draft, key, record)
            return Accepted(events=(), repeat=True, span=(record.first_seq, record.last_seq))
        case _:
            pass
    refused = refuse_input(draft.session.state)
    if refused is not None:
        return refused
    thread_id = _primary(draft)
    refused = check(draft, thread_id, command.arrivals)
    if refused is not None:
        return refused
    events = admit(draft, thread_id, command.arrivals, command.authority)
    if key is not None:
        record_submission(draft, key, events)
    if command.claim_by is not None:
        claim_at_once(draft, thread_id, command.claim_by)
    return Accepted(events=events)


def _primary(draft: Draft) -> UUID:
    return next(t.id for t in draft.threads.values() if t.parent_id is None)


def count_retry(draft: Draft, key: SubmissionKey | None, record: Submission) -> None:
    """Note the repeat in the record that it found, so that no other retry takes the same answer."""
    assert key is not None
    if key.attempt > record.attempt:
        draft.put(
            msgspec.structs.replace(
                record, attempt=key.attempt, request_id=key.request_id, written_at=None, connection_reused=False
            )
        )


def record_submission(draft: Draft, key: SubmissionKey, events: tuple[Event, ...]) -> None:
    """Remember what a request became, in the commit that admits it."""
    draft.put(
        Submission(
            digest=key.digest,
            session_id=draft.session.id,
            body_digest=key.body_digest,
            explicit=key.explicit,
            attempt=key.attempt,
            first_seq=events[0].seq if events else 0,
            last_seq=events[-1].seq if events else 0,
            request_id=key.request_id,
            written_at=None,
            connection_reused=False,
            created_at=draft.now,
        )
    )


def check(draft: Draft, thread_id: UUID, arrivals: tuple[Arrival, ...]) -> Refused | None:
    """Whether the whole batch may be admitted.

    MA-A2.3: all or nothing: nothing is written before every event has passed.
    """
    thread = draft.thread(thread_id)
    turn = draft.turn_of(thread_id)
    parked = turn is not None and turn.state == "waiting" and turn.wait == "action"
    queued = [a for before, a in pairwise((None, *arrivals)) if a is not None and _waits(a, before)]
    refused = decide_room(
        Room(thread.waiting_count, thread.waiting_bytes), count=len(queued), size_bytes=sum(len(a.body) for a in queued)
    )
    if refused is not None:
        return refused
    answered: set[UUID] = set()
    previous: str | None = None
    for place, arrival in enumerate(arrivals):
        refused = None
        if arrival.action_id is not None and arrival.answer is not None:
            refused = _check_answer(draft.actions.get(arrival.action_id), arrival, answered)
            answered.add(arrival.action_id)
        elif arrival.kind == "system":
            refused = refuse_system(_kind(previous), last=place == len(arrivals) - 1, parked=parked)
        if refused is not None:
            return msgspec.structs.replace(refused, param=arrival.param)
        previous = arrival.kind
    return None


def _waits(arrival: Arrival, before: Arrival | None) -> bool:
    """Whether an event will wait in the mailbox: a message does, and a system message unless it goes with an answer."""
    if arrival.kind == "system":
        return before is None or before.answer is None
    return arrival.kind == "message"


def _kind(previous: str | None) -> InputKind | None:
    if previous == "message":
        return "message"
    return "custom_result" if previous == "custom_result" else None


def _check_answer(action: Action | None, arrival: Arrival, answered: set[UUID]) -> Refused | None:
    """MA-C7.8: a second answer within one request finds the action taken by the first, so the request is refused."""
    assert arrival.answer is not None
    if arrival.action_id in answered and action is not None:
        action = msgspec.structs.replace(action, state="claimed")
    return refuse_answer(action, arrival.answer, arrival.reference)


def admit(draft: Draft, thread_id: UUID, arrivals: tuple[Arrival, ...], authority: UUID | None) -> tuple[Event, ...]:
    """Write a checked batch, each event upon what the ones before it did. Returns the receipt events, in order.

    MA-C8.11: `[message, interrupt]` on an idle session: the message makes it run, then the interrupt ends that message. MA-C8.13:
    `[interrupt, answer]` on a parked session: the interrupt changes nothing, then the answer counts.
    """
    received: list[Event] = []
    answered = False
    for arrival in arrivals:
        if arrival.kind == "interrupt":
            _resume_or_remind(draft, thread_id, answered)
            answered = False
            _activate(draft, thread_id)
            received.append(_interrupt(draft, thread_id, arrival))
            continue
        event = _receive(draft, thread_id, arrival)
        received.append(event)
        if arrival.answer is not None:
            _answer(draft, event, arrival, authority)
            answered = True
        else:
            _enqueue(draft, event, arrival, received, authority)
    _resume_or_remind(draft, thread_id, answered)
    _activate(draft, thread_id)
    draft.settle_wakeup(thread_id, consume=False)
    stamped = {e.seq: e for e in draft.events}
    return tuple(stamped[e.seq] for e in received)


def _receive(draft: Draft, thread_id: UUID, arrival: Arrival, *, processed: bool = False) -> Event:
    """The row of a receipt. MA-B1.6: a custom tool's result is processed with it."""
    return draft.emit(
        "input.received",
        thread_id=thread_id,
        kind=arrival.kind,
        body=arrival.body,
        snap=InputSnap(action_id=arrival.action_id),
        processed=processed or arrival.kind == "custom_result",
    )


def _enqueue(draft: Draft, event: Event, arrival: Arrival, received: list[Event], authority: UUID | None) -> None:
    """Put a message, or the system message behind it, into the mailbox.

    MA-B1.10: a system message goes where the event before it goes: to that message's turn, or to the turn that the answer resumes.
    """
    companion_of = received[-2].seq if arrival.kind == "system" else None
    leader = draft.inputs.get(companion_of) if companion_of is not None else None
    claimed = leader is not None and leader.state == "claimed"
    entry = Input(
        session_id=event.session_id,
        seq=event.seq,
        id=event.id,
        thread_id=event.thread_id,
        kind="system" if arrival.kind == "system" else "message",
        state="claimed" if claimed else "waiting",
        reason=None,
        turn_id=leader.turn_id if claimed and leader is not None else None,
        action_id=None,
        companion_of=companion_of,
        causal_pos=None,
        size_bytes=len(arrival.body),
        authority=authority,
        received_at=draft.now,
        settled_at=None,
    )
    draft.put(entry)
    if not claimed:
        thread = draft.thread(event.thread_id)
        draft.change_thread(
            thread.id, waiting_count=thread.waiting_count + 1, waiting_bytes=thread.waiting_bytes + entry.size_bytes
        )


def _answer(draft: Draft, event: Event, arrival: Arrival, authority: UUID | None) -> None:
    """The barrier takes the answer; the resume will read it."""
    assert arrival.action_id is not None and arrival.answer is not None
    action = draft.actions[arrival.action_id]
    draft.put(msgspec.structs.replace(action, state="claimed", answer=arrival.answer, answer_seq=event.seq))
    draft.put(
        Input(
            session_id=event.session_id,
            seq=event.seq,
            id=event.id,
            thread_id=event.thread_id,
            kind="custom_result" if arrival.answer == "result" else "confirmation",
            state="claimed",
            reason=None,
            turn_id=action.turn_id,
            action_id=action.id,
            companion_of=None,
            causal_pos=None,
            size_bytes=len(arrival.body),
            authority=authority,
            received_at=draft.now,
            settled_at=None,
        )
    )
    draft.emit(
        "action.answered", thread_id=event.thread_id, kind=action.kind, turn_id=action.turn_id, item_id=action.id
    )


def _resume_or_remind(draft: Draft, thread_id: UUID, answered: bool) -> None:
    """After answers: wake the turn when none is owed any more, else say again which are.

    MA-C7.5: while some are owed the idle is said again with the rest, and nothing starts. MA-C7.6: the last answer makes the session
    run, once, and the turn goes on with all of them.
    """
    turn = draft.turn_of(thread_id)
    if not answered or turn is None or turn.wait != "action":
        return
    if still_owed(draft.turn_actions(turn.id)):
        park_phase(draft, turn, reissue=True)
        return
    draft.change_turn(turn.id, wait="capacity", wake_at=None)
    set_phase(draft, thread_id, "active")


def _activate(draft: Draft, thread_id: UUID) -> None:
    """Work waits on an idle thread: from now on the session runs.

    MA-B6.2: claimable input makes an idle session run in the commit that accepts it. MA-C7.13: input behind an open action waits, and
    the session stays idle. MA-C2.5: input that comes while a retry is due later waits too, and the session stays `rescheduling`.
    """
    idle = draft.session.status == "idle" and draft.turn_of(thread_id) is None
    if idle and draft.thread(thread_id).waiting_count:
        set_phase(draft, thread_id, "active")


def _interrupt(draft: Draft, thread_id: UUID, arrival: Arrival) -> Event:
    """Capture what the interrupt ends, and end it now when no call is in flight."""
    turn = draft.turn_of(thread_id)
    thread = draft.thread(thread_id)
    in_flight = turn is not None and any(s.state == "dispatched" for s in draft.unsettled_steps(turn.id))
    decision = decide_interrupt(turn, in_flight=in_flight, waiting_count=thread.waiting_count)
    event = _receive(draft, thread_id, arrival, processed=decision == "nothing")
    if decision == "nothing":
        return event
    draft.put(
        Control(
            session_id=event.session_id,
            seq=event.seq,
            thread_id=thread_id,
            kind="interrupt",
            state="open",
            target_turn_id=turn.id if turn is not None else None,
            target_gen=turn.gen if turn is not None else thread.turn_gen + 1,
            outcome=None,
            at=draft.now,
        )
    )
    draft.change_thread(thread_id, control_count=thread.control_count + 1)
    if decision == "capture":
        return event
    if turn is not None:
        end_turn(draft, turn, "interrupted")
    else:
        interrupt_head(draft, thread_id)
        close_controls(draft, thread_id)
    after_interrupt(draft, thread_id)
    return event


def close_controls(draft: Draft, thread_id: UUID) -> None:
    """An interrupt that met no turn is done with the input that it ended."""
    for control in draft.open_controls(thread_id):
        settle_control(draft, control.seq, thread_id, "ended_input")
