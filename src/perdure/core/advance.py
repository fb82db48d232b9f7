"""Advance: look at a thread and take it one step further. The only way a turn moves.

Every answer is one commit. A decider that finds the caller's lease gone answers `Fenced` and changes nothing.
"""

from typing import Final
from uuid import UUID

import msgspec

from perdure.core.draft import Draft
from perdure.core.outcomes import record, repeat_model, retry_wait, start_model
from perdure.core.settle import after_interrupt, end_turn, fail_turn, lose_step, park_phase, set_phase
from perdure.core.turns import adopt, claim, give_back, resume_actions
from perdure.domain import ids
from perdure.domain.control import STOP_GRACE_MS
from perdure.domain.errors import Fenced
from perdure.domain.event import ItemSnap
from perdure.domain.session import Thread
from perdure.domain.step import Step, decide_dispatch, decide_lost
from perdure.domain.turn import PARALLEL_TOOLS_MAX, ROUNDS_MAX, Lease, Turn, holds, may_take_over
from perdure.ports.ledger import Advance, Answered, Done, Idle, Parked, Perform, Release, Retry, Working

_ANSWER_ENCODER: Final = msgspec.json.Encoder()
_ANSWER_DECODER: Final = msgspec.json.Decoder[Answered](Answered)


def advance(draft: Draft, command: Advance) -> Answered:
    """One look at a thread for one worker."""
    thread = draft.threads.get(command.thread_id)
    if draft.session_row is None or thread is None or draft.session.state in ("deleting", "deleted"):
        return Fenced() if command.lease else Idle()
    if thread.command_id == command.command_id and thread.answer is not None:
        return _ANSWER_DECODER.decode(thread.answer)
    turn = draft.turn_of(thread.id)
    began = draft.writes
    if command.lease is not None:
        if turn is None or not holds(turn, command.lease):
            return Fenced()
        if command.outcome is not None:
            record(draft, turn, command.outcome)
        answer = _drain(draft, thread.id) if command.draining else _go_on(draft, thread.id, command.worker_id)
    else:
        answer = _look(draft, thread, turn, command)
    draft.settle_wakeup(thread.id, consume=True)
    if draft.writes != began:
        draft.change_thread(thread.id, command_id=command.command_id, answer=_ANSWER_ENCODER.encode(answer))
    return answer


def _look(draft: Draft, thread: Thread, turn: Turn | None, command: Advance) -> Answered:
    """A caller without a lease: what is there to own?

    MA-C4.3: a turn that may go on is taken before any input that waits. MA-B6.5: a retry that is due makes the session run again.
    """
    worker_id = command.worker_id
    if turn is None:
        return _claim_next(draft, thread.id, worker_id)
    if turn.state == "active":
        if turn.worker_id == worker_id or draft.is_dead(turn.worker_id):
            return _take_over(draft, turn, worker_id)
        return _overdue_stop(draft, turn, worker_id)
    if turn.wait == "action":
        return Parked()
    if turn.wait == "retry" and turn.wake_at is not None and turn.wake_at > draft.now:
        return Retry(turn.wake_at)
    if turn.wait == "retry":
        set_phase(draft, thread.id, "active")
    adopt(draft, turn, worker_id)
    return _go_on(draft, thread.id, worker_id)


def claim_at_once(draft: Draft, thread_id: UUID, worker_id: UUID) -> None:
    """Right after an admission: give what may run now to a worker that waits for it, so that a plain turn costs two commits."""
    turn = draft.turn_of(thread_id)
    if turn is not None and not (turn.state == "waiting" and turn.wait == "capacity"):
        return
    if turn is not None:
        adopt(draft, turn, worker_id)
    answer = _go_on(draft, thread_id, worker_id)
    if isinstance(answer, Perform):
        draft.claimed[thread_id] = answer
    draft.settle_wakeup(thread_id, consume=True)


def _claim_next(draft: Draft, thread_id: UUID, worker_id: UUID) -> Answered:
    """The thread's slot is free: begin the next turn in the same commit.

    MA-C3.4: input that waited behind a barrier is taken with the end of its turn, without a new event. MA-C4.4: behind a turn that
    parked, which keeps its slot, or that ended its session nothing is taken.
    """
    if draft.session.state != "open" or claim(draft, thread_id, worker_id) is None:
        return Idle()
    return _go_on(draft, thread_id, worker_id)


def _overdue_stop(draft: Draft, turn: Turn, worker_id: UUID) -> Answered:
    """An interrupt that the owner did not obey in time: the turn ends over its head, and its late results find no turn."""
    controls = draft.open_controls(turn.thread_id)
    if not controls:
        return Idle()
    if (draft.now - controls[0].at).total_seconds() * 1000 < STOP_GRACE_MS:
        return Idle()
    return _interrupted(draft, turn, worker_id)


def _interrupted(draft: Draft, turn: Turn, worker_id: UUID) -> Answered:
    end_turn(draft, turn, "interrupted")
    after_interrupt(draft, turn.thread_id)
    return _claim_next(draft, turn.thread_id, worker_id)


def _take_over(draft: Draft, turn: Turn, worker_id: UUID) -> Answered:
    """Own the turn of a dead attempt: what was in flight is lost, each call by its own rule. An interrupt that waited for it wins."""
    if draft.open_controls(turn.thread_id):
        return _interrupted(draft, turn, worker_id)
    if not may_take_over(turn):
        fail_turn(
            draft,
            turn,
            "unknown_error",
            f"The turn was started {turn.charge} times and its process died each time; it is given up.",
            permanent=False,
        )
        return _claim_next(draft, turn.thread_id, worker_id)
    adopt(draft, turn, worker_id)
    lose_steps(draft, draft.turns[turn.id])
    return _go_on(draft, turn.thread_id, worker_id)


def lose_steps(draft: Draft, turn: Turn) -> None:
    """Account for the calls of an attempt that is over."""
    for step in draft.unsettled_steps(turn.id):
        match decide_lost(step):
            case "forget":
                continue
            case "ambiguous":
                lose_step(draft, turn, step)
            case "repeat":
                _repeat(draft, turn, step)


def _repeat(draft: Draft, turn: Turn, step: Step) -> None:
    """The same step, next try. A model call opens a new span; nothing of the old try is ever completed."""
    if step.kind == "model":
        repeat_model(draft, turn, step)
        return
    draft.put(msgspec.structs.replace(step, state="failed", settled_at=draft.now))
    again = ids.derived(turn.id, "step", step.ordinal, step.position, step.try_no + 1)
    draft.put(msgspec.structs.replace(step, id=again, try_no=step.try_no + 1, state="prepared", dispatched_at=None))


def _go_on(draft: Draft, thread_id: UUID, worker_id: UUID) -> Answered:
    """Take the turn as far as it goes without a call.

    MA-C7.10: what the server runs comes before parking, and is settled when the turn resumes. MA-F12: a turn makes at most 100 model
    calls. MA-B4.5: one that asks for more ends with `tool_use_limit_reached_error`.
    """
    turn = draft.turn_of(thread_id)
    if turn is None:
        return _claim_next(draft, thread_id, worker_id)
    if turn.state == "waiting":
        return retry_wait(turn)
    steps = draft.unsettled_steps(turn.id)
    if draft.open_controls(thread_id):
        if any(s.state == "dispatched" for s in steps):
            return Working(lease=_lease(turn), stop=True)
        return _interrupted(draft, turn, worker_id)
    if steps:
        return _dispatch(draft, turn, steps)
    actions = draft.turn_actions(turn.id)
    if any(a.state == "held" for a in actions):
        return _park(draft, turn)
    if actions:
        resume_actions(draft, turn, actions)
        return _go_on(draft, thread_id, worker_id)
    if turn.round >= ROUNDS_MAX:
        fail_turn(
            draft,
            turn,
            "tool_use_limit_reached_error",
            f"The turn reached {ROUNDS_MAX} model calls without an end.",
            permanent=False,
        )
        return _claim_next(draft, thread_id, worker_id)
    start_model(draft, turn, ordinal=turn.round + 1, try_no=1, failures=0)
    return _go_on(draft, thread_id, worker_id)


def _lease(turn: Turn) -> Lease:
    return Lease(turn.id, turn.attempt_no, turn.lease_token)


def _dispatch(draft: Draft, turn: Turn, steps: tuple[Step, ...]) -> Answered:
    """Mark what starts now. The first call of an attempt charges the turn."""
    starting = decide_dispatch(steps, PARALLEL_TOOLS_MAX)
    if not starting:
        return Working(lease=_lease(turn))
    marked = tuple(_mark(draft, turn, s) for s in starting)
    if not turn.charged:
        draft.change_turn(turn.id, charged=True, charge=turn.charge + 1)
    return Perform(lease=_lease(turn), steps=marked)


def _mark(draft: Draft, turn: Turn, step: Step) -> Step:
    """Dispatched, before the call is made.

    MA-B3.6: a model step's span opens in this commit; the step, once settled, is never settled again, so exactly one end follows.
    """
    seq = step.event_seq
    if step.kind == "model":
        seq = draft.emit("step.model.started", thread_id=turn.thread_id, turn_id=turn.id, step_id=step.id).seq
    marked = msgspec.structs.replace(
        step, state="dispatched", attempt_no=turn.attempt_no, dispatched_at=draft.now, event_seq=seq
    )
    draft.put(marked)
    return marked


def _park(draft: Draft, turn: Turn) -> Answered:
    """MA-C6.5: publish the calls that the client owes, with their actions and the idle, in one commit and not before."""
    for action in draft.turn_actions(turn.id):
        if action.state != "held":
            continue
        opened = draft.emit(
            "item.opened",
            thread_id=turn.thread_id,
            kind="custom" if action.kind == "custom" else "tool",
            turn_id=turn.id,
            item_id=action.id,
            ref_seq=action.event_seq,
            out_index=turn.out_index,
            snap=ItemSnap(permission="ask" if action.kind == "confirm" else None, policy="always_ask"),
        )
        turn = draft.change_turn(turn.id, out_index=turn.out_index + 1)
        draft.put(msgspec.structs.replace(action, state="open", opened_at=opened.at))
        draft.emit("action.opened", thread_id=turn.thread_id, kind=action.kind, turn_id=turn.id, item_id=action.id)
    turn = give_back(draft, turn, wait="action", wake_at=None)
    draft.emit("turn.parked", thread_id=turn.thread_id, turn_id=turn.id)
    park_phase(draft, turn, reissue=False)
    return Parked()


def _drain(draft: Draft, thread_id: UUID) -> Answered:
    """Start nothing more; with the last call accounted for, the turn is anyone's."""
    turn = draft.turn_of(thread_id)
    if turn is None or turn.state != "active":
        return Idle()
    if any(s.state == "dispatched" for s in draft.unsettled_steps(turn.id)):
        return Working(lease=_lease(turn))
    give_back(draft, turn, wait="capacity", wake_at=None)
    return Idle()


def release(draft: Draft, command: Release) -> Done | Fenced:
    """End an attempt in order; whoever looks next goes on with the turn."""
    turn = draft.turn_of(command.thread_id) if draft.session_row is not None else None
    if turn is None or not holds(turn, command.lease):
        return Fenced()
    lose_steps(draft, turn)
    give_back(draft, draft.turns[turn.id], wait="capacity", wake_at=None)
    draft.settle_wakeup(command.thread_id, consume=False)
    return Done()
