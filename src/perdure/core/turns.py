"""The beginnings and hand-overs of a turn: claim, adopt, give back, resume."""

from datetime import datetime
from typing import Literal
from uuid import UUID

import msgspec

from perdure.core.draft import Draft
from perdure.core.settle import set_phase
from perdure.domain import ids
from perdure.domain.barrier import Action
from perdure.domain.event import InputSnap, ItemSnap, TurnSnap, encode
from perdure.domain.item import call_id
from perdure.domain.mailbox import Input, Take, decide_claim
from perdure.domain.step import Step
from perdure.domain.transcript import TranscriptEntry
from perdure.domain.turn import Turn


def claim(draft: Draft, thread_id: UUID, worker_id: UUID) -> Turn | None:
    """Begin the next turn with the head of the mailbox, or None when there is nothing to take.

    MA-B3.5: a session that runs already is not said to run again.
    """
    thread = draft.thread(thread_id)
    decision = decide_claim(draft.waiting(thread_id), turn_active=thread.turn_id is not None)
    if not isinstance(decision, Take):
        return None
    if draft.session.status != "running":
        set_phase(draft, thread_id, "active")
    gen = thread.turn_gen + 1
    turn = Turn(
        session_id=draft.session.id,
        id=ids.timed(draft.now, thread_id, "turn", gen),
        thread_id=thread_id,
        gen=gen,
        state="active",
        wait=None,
        wake_at=None,
        attempt_no=1,
        charge=0,
        charged=False,
        worker_id=worker_id,
        lease_token=1,
        outcome=None,
        error_code=None,
        round=0,
        cut_rounds=0,
        causal_pos=thread.causal_pos,
        out_index=0,
        input_tokens=0,
        output_tokens=0,
        cache_read_tokens=0,
        cache_creation_5m_tokens=0,
        cache_creation_1h_tokens=0,
        progress_at=draft.now,
        created_at=draft.now,
        ended_at=None,
    )
    draft.put(turn)
    draft.change_thread(thread_id, turn_gen=gen, turn_id=turn.id)
    draft.emit("turn.created", thread_id=thread_id, turn_id=turn.id, snap=TurnSnap(gen=gen))
    draft.emit("turn.started", thread_id=thread_id, turn_id=turn.id, snap=TurnSnap(gen=gen))
    for entry in decision.inputs:
        consume(draft, turn, entry)
    return turn


def consume(draft: Draft, turn: Turn, entry: Input) -> None:
    """An input becomes part of what the model sees: its place in causal order is fixed here, once.

    MA-C5.2: it stands behind all that earlier turns put in, so no turn sees what came while it ran. MA-C5.4: an input that ended before
    a turn took it never gets here, and is in no history.
    """
    thread = draft.thread(turn.thread_id)
    position = thread.causal_pos + 1
    draft.change_thread(thread.id, causal_pos=position)
    draft.change_input(entry, state="consumed", turn_id=turn.id, causal_pos=position)
    draft.change_turn(turn.id, causal_pos=position)
    draft.remember(
        TranscriptEntry(
            session_id=turn.session_id,
            thread_id=turn.thread_id,
            causal_pos=position,
            position=0,
            kind="system" if entry.kind == "system" else "input",
            turn_id=turn.id,
            ref_seq=entry.seq,
            body=None,
        )
    )
    draft.emit(
        "input.applied",
        thread_id=turn.thread_id,
        kind=entry.kind,
        turn_id=turn.id,
        ref_seq=entry.seq,
        snap=InputSnap(custody="consumed", causal_pos=position),
    )


def adopt(draft: Draft, turn: Turn, worker_id: UUID) -> Turn:
    """A new attempt of a turn: the fence moves, so whatever the old one still writes finds nothing."""
    resumed = turn.state == "waiting"
    turn = draft.change_turn(
        turn.id,
        state="active",
        wait=None,
        wake_at=None,
        attempt_no=turn.attempt_no + 1,
        charged=False,
        worker_id=worker_id,
        lease_token=turn.lease_token + 1,
    )
    if resumed:
        draft.emit("turn.resumed", thread_id=turn.thread_id, turn_id=turn.id, snap=TurnSnap(gen=turn.gen))
    return turn


def give_back(
    draft: Draft, turn: Turn, *, wait: Literal["action", "retry", "capacity"], wake_at: datetime | None
) -> Turn:
    """MA-C15.3: end an attempt in order: the lease and the charge go back, the slot stays, and anyone may go on."""
    return draft.change_turn(
        turn.id,
        state="waiting",
        wait=wait,
        wake_at=wake_at,
        worker_id=None,
        charged=False,
        charge=turn.charge - 1 if turn.charged else turn.charge,
    )


def resume_actions(draft: Draft, turn: Turn, actions: tuple[Action, ...]) -> None:
    """Read the answers of a parked round: each call gets its result, or is run now that it is allowed.

    MA-C7.7: in the order of the calls, whatever order the answers came in. MA-B1.4: a confirmation is taken here; it is processed when
    the turn ends.
    """
    answers = {i.action_id: i for i in draft.taken(turn.id) if i.action_id is not None}
    for action in actions:
        entry = answers.get(action.id)
        if entry is not None and entry.state == "claimed":
            draft.change_input(entry, state="consumed", causal_pos=turn.causal_pos)
            draft.emit(
                "input.applied",
                thread_id=turn.thread_id,
                kind=entry.kind,
                turn_id=turn.id,
                ref_seq=entry.seq,
                snap=InputSnap(custody="consumed", causal_pos=turn.causal_pos, action_id=action.id),
            )
        _apply_answer(draft, turn, action)
        draft.put(msgspec.structs.replace(action, state="closed"))
        draft.emit("action.closed", thread_id=turn.thread_id, kind=action.kind, turn_id=turn.id, item_id=action.id)
    for entry in draft.taken(turn.id):
        if entry.kind == "system" and entry.state == "claimed":
            consume(draft, draft.turns[turn.id], entry)
    # Calls that were allowed only now run still belong to their round: their results stand beside the other ones.
    draft.change_turn(turn.id, causal_pos=turn.causal_pos)


def _apply_answer(draft: Draft, turn: Turn, action: Action) -> None:
    """MA-D2.3: an allowed call gets its one step. MA-D2.4: a denied one runs nothing; its result is the denial."""
    if action.answer == "allow":
        draft.put(
            Step(
                session_id=turn.session_id,
                id=ids.derived(turn.id, "step", turn.round, action.position, 1),
                turn_id=turn.id,
                thread_id=turn.thread_id,
                kind="tool",
                ordinal=turn.round,
                try_no=1,
                failures=0,
                round=turn.round,
                position=action.position,
                name=action.name,
                state="prepared",
                on_lost="repeat" if action.on_lost == "repeat" else "ambiguous",
                serial=action.serial,
                item_id=action.id,
                event_seq=action.event_seq,
                attempt_no=turn.attempt_no,
                dispatched_at=None,
                settled_at=None,
            )
        )
        return
    if action.answer == "deny":
        draft.emit(
            "item.closed",
            thread_id=turn.thread_id,
            kind="tool",
            turn_id=turn.id,
            item_id=action.id,
            ref_seq=action.answer_seq,
            snap=ItemSnap(state="failed", permission="deny"),
        )
    else:
        draft.emit(
            "item.closed",
            thread_id=turn.thread_id,
            kind="custom",
            turn_id=turn.id,
            item_id=action.id,
            ref_seq=action.answer_seq,
            snap=ItemSnap(state="completed"),
        )
    draft.remember(
        TranscriptEntry(
            session_id=turn.session_id,
            thread_id=turn.thread_id,
            causal_pos=turn.causal_pos,
            position=action.position,
            kind="denial" if action.answer == "deny" else "answer",
            turn_id=turn.id,
            ref_seq=action.answer_seq,
            body=encode(call_id(action.id)),
        )
    )
