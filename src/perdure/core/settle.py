"""Endings and phases: what closes with a turn, and what the public sees of it. Shared by every command that can end a turn."""

from typing import Any, Literal
from uuid import UUID

import msgspec

from perdure.core.draft import Draft
from perdure.domain.barrier import still_owed
from perdure.domain.event import (
    ErrorSnap,
    InputSnap,
    ItemSnap,
    PhaseName,
    PhaseSnap,
    StepSnap,
    TurnSnap,
    encode,
)
from perdure.domain.item import call_id
from perdure.domain.mailbox import Custody, Input, companions
from perdure.domain.profile import PROFILES
from perdure.domain.projection import STATUS_OF_PHASE
from perdure.domain.step import Step
from perdure.domain.transcript import (
    AMBIGUOUS_TEXT,
    Ending,
    TranscriptEntry,
    running_text,
    text_result,
    unanswered_text,
    unstarted_text,
)
from perdure.domain.turn import Turn, TurnOutcome


def set_phase(
    draft: Draft,
    thread_id: UUID,
    name: PhaseName,
    *,
    stop_reason: Literal["end_turn", "requires_action", "retries_exhausted", "refusal"] | None = None,
    stop_details: dict[str, Any] | None = None,
    action_ids: tuple[UUID, ...] = (),
    reissue: bool = False,
) -> None:
    """MA-B3.1: publish a phase and move the status with it, in the same commit. Nothing else moves it."""
    status = STATUS_OF_PHASE[name]
    if status == "running" and draft.session.running_since is None:
        draft.touch(status=status, running_since=draft.now)
    elif status in ("idle", "terminated"):
        draft.touch(status=status, active_ms=draft.session.active_ms + draft.elapsed_ms(), running_since=None)
    else:
        draft.touch(status=status)
    snap = PhaseSnap(
        stop_reason=stop_reason,
        stop_details=stop_details,
        action_ids=action_ids,
        usage=draft.usage() if status in ("idle", "terminated") else None,
        reissue=reissue,
    )
    draft.emit("session.phase", thread_id=thread_id, kind=name, snap=snap)


def park_phase(draft: Draft, turn: Turn, *, reissue: bool) -> None:
    """Publish which answers are owed (after a partial answer, again, with the rest).

    MA-B6.4: for as long as one is, the session is idle with `requires_action`.
    """
    owed = tuple(a.id for a in still_owed(draft.turn_actions(turn.id)))
    set_phase(draft, turn.thread_id, "wait_action", stop_reason="requires_action", action_ids=owed, reissue=reissue)


def settle_input(draft: Draft, entry: Input, state: Custody, reason: str | None) -> None:
    """The last word on an input, and the second sighting of its event.

    MA-C2.3: an accepted input ends only here, with the custody and reason that say how. MA-B1.2: a message is processed from now on.
    MA-B7.7: what was processed on receipt is not stamped again, so streams show it once.
    """
    draft.change_input(entry, state=state, reason=reason, settled_at=draft.now)
    event = draft.emit(
        "input.settled",
        thread_id=entry.thread_id,
        kind=entry.kind,
        turn_id=entry.turn_id,
        ref_seq=entry.seq,
        snap=InputSnap(custody=state, reason=reason, causal_pos=entry.causal_pos, action_id=entry.action_id),
    )
    if entry.kind != "custom_result":
        draft.stamp(entry.seq, event.seq)


def settle_control(draft: Draft, seq: int, thread_id: UUID, outcome: str) -> None:
    """MA-B1.3: close an interrupt, and show its event as processed from now on."""
    control = draft.controls[seq]
    draft.put(msgspec.structs.replace(control, state="done", outcome=outcome))
    thread = draft.thread(thread_id)
    draft.change_thread(thread_id, control_count=thread.control_count - 1)
    event = draft.emit(
        "input.settled", thread_id=thread_id, kind="interrupt", ref_seq=seq, snap=InputSnap(custody="consumed")
    )
    draft.stamp(seq, event.seq)


def drop_waiting(draft: Draft, thread_id: UUID, state: Custody, reason: str) -> tuple[UUID, ...]:
    """Settle every waiting input of a thread; their ids."""
    gone = draft.waiting(thread_id)
    for entry in gone:
        settle_input(draft, entry, state, reason)
    return tuple(i.id for i in gone)


def interrupt_head(draft: Draft, thread_id: UUID) -> None:
    """MA-C8.10: end the head of the mailbox before any worker took it: its custody says so, and no model is called for it."""
    waiting = draft.waiting(thread_id)
    for entry in (waiting[0], *companions(waiting[0], waiting)):
        settle_input(draft, entry, "interrupted", "interrupt")


def after_interrupt(draft: Draft, thread_id: UUID) -> None:
    """The idle boundary of an interrupt, and the run of what waited behind it.

    MA-C8.3: an interrupted turn shows one idle `end_turn` and no error. MA-C8.7: what waits is kept and makes the session run again.
    """
    set_phase(draft, thread_id, "idle", stop_reason="end_turn")
    if draft.thread(thread_id).waiting_count:
        set_phase(draft, thread_id, "active")


def result_entry(draft: Draft, turn: Turn, position: int, body: bytes) -> None:
    """Pair a call of the current round with its result in the model's history.

    MA-C5.1: a call is paired when its step or its action is settled, which happens once: here, with its result or with why there is
    none, or by the answer that a client gave.
    """
    draft.remember(
        TranscriptEntry(
            session_id=turn.session_id,
            thread_id=turn.thread_id,
            causal_pos=turn.causal_pos,
            position=position,
            kind="result",
            turn_id=turn.id,
            ref_seq=None,
            body=body,
        )
    )


def close_tool(draft: Draft, turn: Turn, step: Step, text: str) -> None:
    """Close the item of a call that has no result of its own with an error that says why."""
    assert step.item_id is not None
    draft.emit(
        "item.closed",
        thread_id=turn.thread_id,
        kind="tool",
        turn_id=turn.id,
        item_id=step.item_id,
        step_id=step.id,
        snap=ItemSnap(state="failed"),
        body=encode({"content": [{"type": "text", "text": text}], "is_error": True}),
    )
    result_entry(draft, turn, step.position, text_result(call_id(step.item_id), text, is_error=True))


def end_model_step(draft: Draft, turn: Turn, step: Step, snap: StepSnap, *, state: Literal["done", "failed"]) -> None:
    """Close a model step and the span that its dispatch opened; one that was never dispatched has none."""
    draft.put(msgspec.structs.replace(step, state=state, settled_at=draft.now))
    if step.dispatched_at is None:
        return
    draft.emit(
        "step.model.ended",
        thread_id=turn.thread_id,
        turn_id=turn.id,
        step_id=step.id,
        ref_seq=step.event_seq,
        snap=snap,
    )


def lose_step(draft: Draft, turn: Turn, step: Step, *, text: str = AMBIGUOUS_TEXT) -> None:
    """MA-C9.2: a tool call that was started and has no result is never run again; both sides are told, and the turn goes on."""
    draft.put(msgspec.structs.replace(step, state="ambiguous", settled_at=draft.now))
    close_tool(draft, turn, step, text)


def _close_steps(draft: Draft, turn: Turn, ending: Ending) -> None:
    """MA-C8.5: a call that an interrupt cut off gets an error that says whether it was started; it is never run again.

    So does one that any other end of its turn cut off; each names that end.
    """
    for step in draft.unsettled_steps(turn.id):
        if step.kind == "model":
            end_model_step(draft, turn, step, StepSnap(is_error=True), state="failed")
        elif step.state == "prepared":
            draft.put(msgspec.structs.replace(step, state="failed", settled_at=draft.now))
            close_tool(draft, turn, step, unstarted_text(ending))
        else:
            lose_step(draft, turn, step, text=running_text(ending))


def _close_actions(draft: Draft, turn: Turn, ending: Ending) -> None:
    """Pair calls whose answers will not be read.

    MA-C8.6: only what had been published, when the turn parked, is closed in public; the others are never shown.
    """
    for action in draft.turn_actions(turn.id):
        text = unanswered_text(ending, answered=action.state == "claimed")
        draft.put(msgspec.structs.replace(action, state="closed"))
        result_entry(draft, turn, action.position, text_result(call_id(action.id), text, is_error=True))
        if action.state == "held":
            continue
        draft.emit("action.closed", thread_id=turn.thread_id, kind=action.kind, turn_id=turn.id, item_id=action.id)
        if action.kind == "confirm":
            draft.emit(
                "item.closed",
                thread_id=turn.thread_id,
                kind="tool",
                turn_id=turn.id,
                item_id=action.id,
                snap=ItemSnap(state="failed"),
                body=encode({"content": [{"type": "text", "text": text}], "is_error": True}),
            )


def end_turn(
    draft: Draft,
    turn: Turn,
    outcome: TurnOutcome,
    *,
    error_code: str | None = None,
    ending: Ending | None = None,
) -> None:
    """Settle a turn: everything it owns is closed, its inputs are accounted for, its slot is free.

    MA-C6.1: there is one `turn.ended`, in one commit with all that closes. MA-C8.12: every open interrupt is done with it. The caller
    publishes the phase that follows. `ending` says what the outcome alone doesn't.
    """
    _close_steps(draft, turn, ending or outcome)
    _close_actions(draft, turn, ending or outcome)
    for entry in draft.taken(turn.id):
        unread: Custody = "interrupted" if outcome == "interrupted" else "cancelled"
        custody: Custody = unread if entry.state == "claimed" else "consumed"
        settle_input(draft, entry, custody, None if outcome == "completed" else outcome)
    for control in draft.open_controls(turn.thread_id):
        settle_control(draft, control.seq, turn.thread_id, "ended_turn" if outcome == "interrupted" else "too_late")
    turn = draft.turns[turn.id]
    draft.change_turn(
        turn.id,
        state="settled",
        wait=None,
        wake_at=None,
        worker_id=None,
        outcome=outcome,
        error_code=error_code,
        ended_at=draft.now,
    )
    draft.change_thread(turn.thread_id, turn_id=None)
    draft.emit(
        "turn.ended",
        thread_id=turn.thread_id,
        turn_id=turn.id,
        snap=TurnSnap(gen=turn.gen, outcome=outcome, error_code=error_code, usage=turn_usage(turn)),
    )


def turn_usage(turn: Turn) -> StepSnap:
    """The usage of a turn so far."""
    return StepSnap(
        input_tokens=turn.input_tokens,
        output_tokens=turn.output_tokens,
        cache_read_tokens=turn.cache_read_tokens,
        cache_creation_5m_tokens=turn.cache_creation_5m_tokens,
        cache_creation_1h_tokens=turn.cache_creation_1h_tokens,
    )


def fail_turn(draft: Draft, turn: Turn, code: str, message: str, *, permanent: bool) -> None:
    """End a turn by an error.

    MA-C10.3: an exhausted one drops the input that waited, with that reason. MA-C10.4: the session stays usable. MA-C10.5: a permanent
    one drops it too, and terminates the session. MA-B4.4: the error names what was dropped. MA-B4.2: idle follows an exhausted error,
    terminated a terminal one. MA-B5.3: nothing else says `retries_exhausted`.
    """
    profile = PROFILES[draft.session.profile]
    terminate = permanent and profile.on_permanent_failure == "terminate"
    flush = terminate or profile.flush_on_exhaustion
    waiting = draft.waiting(turn.thread_id) if flush else ()
    snap = ErrorSnap(
        code=code, message=message, retry="terminal" if terminate else "exhausted", flushed=tuple(i.id for i in waiting)
    )
    draft.emit("session.error", thread_id=turn.thread_id, turn_id=turn.id, snap=snap)
    end_turn(draft, turn, "failed", error_code=code)
    if flush:
        drop_waiting(draft, turn.thread_id, "dropped", "session_terminated" if terminate else "retries_exhausted")
    if terminate:
        draft.touch(state="terminated")
        set_phase(draft, turn.thread_id, "terminated")
    else:
        set_phase(draft, turn.thread_id, "idle", stop_reason="retries_exhausted")
