"""What a step gave, written into the turn: items, results, usage, the model's history."""

from datetime import timedelta
from typing import Any
from uuid import UUID

import msgspec

from perdure.core.draft import Draft
from perdure.core.settle import close_tool, end_model_step, end_turn, fail_turn, lose_step, result_entry, set_phase
from perdure.core.turns import give_back
from perdure.domain import ids
from perdure.domain.barrier import Action
from perdure.domain.event import ErrorSnap, ItemSnap, StepSnap, encode
from perdure.domain.item import call_id, item_id
from perdure.domain.profile import PROFILES
from perdure.domain.step import Step, decide_retry
from perdure.domain.transcript import (
    AMBIGUOUS_TEXT,
    CONTINUE_TEXT,
    INTERRUPTED_TEXT,
    STOPPED_TEXT,
    TranscriptEntry,
    text_result,
)
from perdure.domain.turn import CUT_ROUNDS_MAX, Turn
from perdure.ports.ledger import (
    Answered,
    CallPlan,
    ModelErred,
    ModelReplied,
    OutBlock,
    Parked,
    Retry,
    StepOutcome,
    Stopped,
    ToolReturned,
)
from perdure.ports.model import Usage


def record(draft: Draft, turn: Turn, outcome: StepOutcome) -> None:
    """Write the outcome of a dispatched step. One that is settled already is a repeat and changes nothing."""
    step = draft.steps.get(outcome.step_id)
    if step is None or step.state != "dispatched":
        return
    draft.change_turn(turn.id, progress_at=draft.now)
    turn = draft.turns[turn.id]
    match outcome:
        case ModelReplied():
            _replied(draft, turn, step, outcome)
        case ModelErred():
            _erred(draft, turn, step, outcome)
        case ToolReturned():
            _returned(draft, turn, step, outcome)
        case Stopped():
            _stopped(draft, turn, step, outcome)


def start_model(draft: Draft, turn: Turn, *, ordinal: int, try_no: int, failures: int) -> None:
    """Prepare a try of a model step. Its span opens when it is dispatched, which may be a retry's delay later."""
    if ordinal != turn.round:
        draft.change_turn(turn.id, round=ordinal)
    step_id = ids.derived(turn.id, "step", ordinal, 0, try_no)
    draft.put(
        Step(
            session_id=turn.session_id,
            id=step_id,
            turn_id=turn.id,
            thread_id=turn.thread_id,
            kind="model",
            ordinal=ordinal,
            try_no=try_no,
            failures=failures,
            round=ordinal,
            position=0,
            name="model",
            state="prepared",
            on_lost="repeat",
            serial=False,
            item_id=None,
            event_seq=0,
            attempt_no=turn.attempt_no,
            dispatched_at=None,
            settled_at=None,
        )
    )


def retry_wait(turn: Turn) -> Answered:
    """What the holder of a turn that just gave its lease back is told."""
    if turn.wait == "retry" and turn.wake_at is not None:
        return Retry(turn.wake_at)
    return Parked()


# ------------------------------------------------------------------------------------------------------------- model steps


def _replied(draft: Draft, turn: Turn, step: Step, outcome: ModelReplied) -> None:
    """A whole reply. MA-C8.2: an interrupt that was accepted before this commit wins: no call is planned, no end is concluded."""
    turn = _account(draft, turn, outcome.usage)
    interrupted = bool(draft.open_controls(turn.thread_id))
    turn = _history(draft, turn, outcome.transcript)
    pending = list(outcome.calls)
    for block in outcome.blocks:
        while pending and pending[0].index < block.index and not interrupted:
            turn = _plan(draft, turn, step, pending.pop(0), outcome.calls)
        turn = _publish(draft, turn, step, block)
    if interrupted:
        _pair_unstarted(draft, turn, step, outcome.calls)
    else:
        for call in pending:
            turn = _plan(draft, turn, step, call, outcome.calls)
    end_model_step(draft, turn, step, _usage_snap(outcome.usage), state="done")
    if not interrupted:
        _conclude(draft, draft.turns[turn.id], outcome)


def _conclude(draft: Draft, turn: Turn, outcome: ModelReplied) -> None:
    """End the turn when the reply asks for nothing more.

    MA-B6.3: without more input the session becomes idle. MA-C6.2: with more it goes on without an idle between. MA-C10.7: a refusal is
    an end too, without a retry, and always shows its idle. MA-F13: a reply cut at its output limit is continued at most 3 times; a cut
    call is given up at the third in a row.
    """
    if outcome.calls:
        cut = all(c.owner == "refused" for c in outcome.calls) and outcome.stop_reason == "max_tokens"
        turn = draft.change_turn(turn.id, cut_rounds=turn.cut_rounds + 1 if cut else 0)
        if turn.cut_rounds >= CUT_ROUNDS_MAX:
            message = f"The model's tool call was cut off by its output limit {CUT_ROUNDS_MAX} times in a row."
            fail_turn(draft, turn, "tool_use_limit_reached_error", message, permanent=False)
        return
    if outcome.stop_reason == "pause_turn":
        return
    if outcome.stop_reason == "max_tokens" and turn.cut_rounds < CUT_ROUNDS_MAX:
        _continue(draft, turn)
        return
    refused = outcome.stop_reason == "refusal"
    end_turn(draft, turn, "refused" if refused else "completed")
    if draft.thread(turn.thread_id).waiting_count and not refused:
        return
    details: dict[str, Any] | None = None
    if outcome.stop_details is not None:
        details = msgspec.json.decode(outcome.stop_details)
    set_phase(draft, turn.thread_id, "idle", stop_reason="refusal" if refused else "end_turn", stop_details=details)
    if draft.thread(turn.thread_id).waiting_count:
        set_phase(draft, turn.thread_id, "active")


def _continue(draft: Draft, turn: Turn) -> None:
    """MA-C6.3: ask the model to go on where its output limit stopped it; the request is ours, so only the model sees it."""
    position = draft.thread(turn.thread_id).causal_pos + 1
    draft.change_thread(turn.thread_id, causal_pos=position)
    draft.change_turn(turn.id, causal_pos=position, cut_rounds=turn.cut_rounds + 1)
    draft.remember(
        TranscriptEntry(
            session_id=turn.session_id,
            thread_id=turn.thread_id,
            causal_pos=position,
            position=0,
            kind="note",
            turn_id=turn.id,
            ref_seq=None,
            body=encode(CONTINUE_TEXT),
        )
    )


def _erred(draft: Draft, turn: Turn, step: Step, outcome: ModelErred) -> None:
    """What a failed try costs and shows.

    MA-C10.1: a retryable failure is one commit: the error that says `retrying`, `rescheduling`, and the next try with its time.
    """
    usage = outcome.usage or Usage()
    turn = _account(draft, turn, usage)
    snap = msgspec.structs.replace(_usage_snap(usage), is_error=True)
    end_model_step(draft, turn, step, snap, state="failed")
    if draft.open_controls(turn.thread_id):
        return
    if not outcome.retryable:
        fail_turn(draft, turn, outcome.code, outcome.message, permanent=True)
        return
    failures = step.failures + 1
    delay_ms = decide_retry(failures, outcome.retry_after_ms)
    if delay_ms is None:
        fail_turn(draft, turn, outcome.code, outcome.message, permanent=False)
        return
    if PROFILES[draft.session.profile].publish_retries:
        error = ErrorSnap(code=outcome.code, message=outcome.message, retry="retrying")
        draft.emit("session.error", thread_id=turn.thread_id, turn_id=turn.id, snap=error)
        set_phase(draft, turn.thread_id, "retrying")
    give_back(draft, turn, wait="retry", wake_at=draft.now + timedelta(milliseconds=delay_ms))
    start_model(draft, draft.turns[turn.id], ordinal=step.ordinal, try_no=step.try_no + 1, failures=failures)


def _account(draft: Draft, turn: Turn, usage: Usage) -> Turn:
    """Add the tokens of one call, once, to the turn and to the session."""
    s = draft.session
    draft.touch(
        input_tokens=s.input_tokens + usage.input_tokens,
        output_tokens=s.output_tokens + usage.output_tokens,
        cache_read_tokens=s.cache_read_tokens + usage.cache_read_input_tokens,
        cache_creation_5m_tokens=s.cache_creation_5m_tokens + usage.cache_creation_5m_input_tokens,
        cache_creation_1h_tokens=s.cache_creation_1h_tokens + usage.cache_creation_1h_input_tokens,
    )
    return draft.change_turn(
        turn.id,
        input_tokens=turn.input_tokens + usage.input_tokens,
        output_tokens=turn.output_tokens + usage.output_tokens,
        cache_read_tokens=turn.cache_read_tokens + usage.cache_read_input_tokens,
        cache_creation_5m_tokens=turn.cache_creation_5m_tokens + usage.cache_creation_5m_input_tokens,
        cache_creation_1h_tokens=turn.cache_creation_1h_tokens + usage.cache_creation_1h_input_tokens,
    )


def _usage_snap(usage: Usage) -> StepSnap:
    return StepSnap(
        input_tokens=usage.input_tokens,
        output_tokens=usage.output_tokens,
        cache_read_tokens=usage.cache_read_input_tokens,
        cache_creation_5m_tokens=usage.cache_creation_5m_input_tokens,
        cache_creation_1h_tokens=usage.cache_creation_1h_input_tokens,
    )


def _history(draft: Draft, turn: Turn, transcript: bytes | None) -> Turn:
    """Append the reply to the model's history; its calls will be paired at the same place."""
    position = draft.thread(turn.thread_id).causal_pos + 1
    draft.change_thread(turn.thread_id, causal_pos=position)
    turn = draft.change_turn(turn.id, causal_pos=position)
    if transcript is not None:
        draft.remember(
            TranscriptEntry(
                session_id=turn.session_id,
                thread_id=turn.thread_id,
                causal_pos=position,
                position=0,
                kind="model",
                turn_id=turn.id,
                ref_seq=None,
                body=transcript,
            )
        )
    return turn


def _publish(draft: Draft, turn: Turn, step: Step, block: OutBlock) -> Turn:
    """Show a completed block: the item opens and closes in this commit."""
    identity = item_id(turn.id, step.ordinal, step.try_no, block.index)
    index = turn.out_index
    for kind, snap in (("item.opened", ItemSnap()), ("item.closed", ItemSnap(state="completed"))):
        draft.emit(
            "item.opened" if kind == "item.opened" else "item.closed",
            thread_id=turn.thread_id,
            kind=block.kind,
            turn_id=turn.id,
            item_id=identity,
            step_id=step.id,
            out_index=index,
            snap=snap,
            body=block.body if kind == "item.closed" else None,
        )
    return draft.change_turn(turn.id, out_index=index + 1)


# ------------------------------------------------------------------------------------------------------------------- calls


def _position(call: CallPlan, calls: tuple[CallPlan, ...]) -> int:
    return next(i for i, c in enumerate(calls, start=1) if c is call)


def _plan(draft: Draft, turn: Turn, step: Step, call: CallPlan, calls: tuple[CallPlan, ...]) -> Turn:
    """Give a call its journal row: a step that runs here, an action that a client owes, or an error at once.

    What the server runs is published with the reply; what a client owes is held back until the turn parks. MA-B2.4: a built-in call is
    shown with its permission, and its row is settled once, with the one result that names it.
    """
    position = _position(call, calls)
    identity = item_id(turn.id, step.ordinal, step.try_no, call.index)
    if call.owner in ("custom", "ask"):
        held = draft.emit(
            "item.held",
            thread_id=turn.thread_id,
            kind="custom" if call.owner == "custom" else "tool",
            turn_id=turn.id,
            item_id=identity,
            step_id=step.id,
            body=call.body,
        )
        draft.put(_action(draft, turn, call, position, identity, held.seq))
        return turn
    opened = draft.emit(
        "item.opened",
        thread_id=turn.thread_id,
        kind="tool",
        turn_id=turn.id,
        item_id=identity,
        step_id=step.id,
        out_index=turn.out_index,
        snap=ItemSnap(permission="deny" if call.owner == "refused" else "allow", policy=call.policy),
        body=call.body,
    )
    turn = draft.change_turn(turn.id, out_index=turn.out_index + 1)
    tool = _tool_step(turn, call, position, identity, opened.seq)
    if call.owner == "refused":
        draft.put(msgspec.structs.replace(tool, state="failed", settled_at=draft.now))
        close_tool(draft, turn, tool, call.error)
    else:
        draft.put(tool)
    return turn


def _action(draft: Draft, turn: Turn, call: CallPlan, position: int, identity: UUID, event_seq: int) -> Action:
    return Action(
        session_id=turn.session_id,
        id=identity,
        thread_id=turn.thread_id,
        turn_id=turn.id,
        round=turn.round,
        position=position,
        kind="custom" if call.owner == "custom" else "confirm",
        name=call.name,
        on_lost=call.on_lost,
        serial=call.serial,
        state="held",
        event_seq=event_seq,
        answer=None,
        answer_seq=None,
        opened_at=draft.now,
    )


def _tool_step(turn: Turn, call: CallPlan, position: int, identity: UUID, event_seq: int) -> Step:
    return Step(
        session_id=turn.session_id,
        id=ids.derived(turn.id, "step", turn.round, position, 1),
        turn_id=turn.id,
        thread_id=turn.thread_id,
        kind="tool",
        ordinal=turn.round,
        try_no=1,
        failures=0,
        round=turn.round,
        position=position,
        name=call.name,
        state="prepared",
        on_lost=call.on_lost,
        serial=call.serial,
        item_id=identity,
        event_seq=event_seq,
        attempt_no=turn.attempt_no,
        dispatched_at=None,
        settled_at=None,
    )


def _pair_unstarted(draft: Draft, turn: Turn, step: Step, calls: tuple[CallPlan, ...]) -> None:
    """Calls of a reply that an interrupt met before they were planned: unseen in public, paired for the model."""
    for position, call in enumerate(calls, start=1):
        identity = item_id(turn.id, step.ordinal, step.try_no, call.index)
        result_entry(draft, turn, position, text_result(call_id(identity), INTERRUPTED_TEXT, is_error=True))


def _returned(draft: Draft, turn: Turn, step: Step, outcome: ToolReturned) -> None:
    draft.put(msgspec.structs.replace(step, state="done", settled_at=draft.now))
    draft.emit(
        "item.closed",
        thread_id=turn.thread_id,
        kind="tool",
        turn_id=turn.id,
        item_id=step.item_id,
        step_id=step.id,
        snap=ItemSnap(state="failed" if outcome.is_error else "completed"),
        body=outcome.body,
    )
    result_entry(draft, turn, step.position, outcome.transcript)


def _stopped(draft: Draft, turn: Turn, step: Step, outcome: Stopped) -> None:
    """A cancelled step: an unfinished call's outcome is unknown.

    MA-C8.4: of an interrupted reply the finished blocks are published and kept; the unfinished one is in no event and no history.
    """
    interrupted = bool(draft.open_controls(turn.thread_id))
    if step.kind != "model":
        lose_step(draft, turn, step, text=STOPPED_TEXT if interrupted else AMBIGUOUS_TEXT)
        return
    if not interrupted:
        repeat_model(draft, turn, step)
        return
    usage = outcome.usage or Usage()
    turn = _account(draft, turn, usage)
    turn = _history(draft, turn, outcome.transcript)
    for block in outcome.blocks:
        turn = _publish(draft, turn, step, block)
    _pair_unstarted(draft, turn, step, outcome.calls)
    end_model_step(draft, turn, step, msgspec.structs.replace(_usage_snap(usage), is_error=True), state="failed")


def repeat_model(draft: Draft, turn: Turn, step: Step) -> None:
    """MA-C9.5: end a try of a model step without blame and prepare the next; nothing of the old try is ever completed."""
    end_model_step(draft, turn, step, StepSnap(is_error=True), state="failed")
    start_model(draft, turn, ordinal=step.ordinal, try_no=step.try_no + 1, failures=step.failures)


def tool_result_body(content: list[dict[str, Any]], *, is_error: bool) -> bytes:
    """The public result of a call."""
    return encode({"content": content, "is_error": is_error})
