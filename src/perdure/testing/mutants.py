"""Planted faults: each takes one promise out of the rules or out of the SQL, and each must be caught.

A fault is planted by replacing one function for a while. `hunt` says which suite has to see it, and `budget` how many of its seeds that
may take.
"""

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any, Final, Literal, cast
from uuid import UUID

import msgspec

from perdure.core import accept, advance, lifecycle, outcomes, settle, turns
from perdure.core.draft import Draft
from perdure.core.facts import Changes
from perdure.domain import submission, wakeup
from perdure.domain.barrier import Action
from perdure.domain.control import InterruptDecision, decide_interrupt
from perdure.domain.errors import Refused
from perdure.domain.mailbox import ClaimDecision, Input, Take
from perdure.domain.session import Thread
from perdure.domain.step import Step
from perdure.domain.submission import New, SubmissionKey, Written
from perdure.domain.turn import Lease, Turn
from perdure.ports.ledger import Advance, Answered
from perdure.postgres import write, writer
from perdure.postgres.facts import FACTS_SQL

Hunt = Literal["histories", "worlds", "postgres"]


class Mutant(msgspec.Struct, frozen=True):
    """One fault: what is replaced by what, and where it must show."""

    name: str
    sign: str
    """What the finding says: a fault that is seen by accident is not caught."""
    swaps: tuple[tuple[Any, str, Any], ...]
    hunt: Hunt = "histories"
    budget: int = 60

    @contextmanager
    def planted(self) -> Generator[None]:
        """The fault holds inside."""
        with ExitStack() as undo:
            for owner, name, replacement in self.swaps:
                undo.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, replacement)
            # Composed statements are kept: the fault must get into them, and out again.
            write.statement.cache_clear()
            undo.callback(write.statement.cache_clear)
            yield


# ------------------------------------------------------------------------------------------------------------------- fences


def _same_turn(turn: Turn, lease: Lease) -> bool:
    return turn.id == lease.turn_id


def _nobody_foreign(draft: Draft, workspace_id: UUID) -> Refused | None:
    del draft, workspace_id
    return None


# ------------------------------------------------------------------------------------------------------------------ wakeups


def _no_wakeup(self: Draft, thread_id: UUID, *, consume: bool) -> None:
    if consume and thread_id in self.wakeups:
        self.sleep(thread_id)


_due_at = wakeup.due_at


def _due_without_retries(now: Any, *, turn: Turn | None, **rest: Any) -> Any:
    return None if turn is not None and turn.wait == "retry" else _due_at(now, turn=turn, **rest)


def _due_without_stops(now: Any, *, controls: Any, **rest: Any) -> Any:
    del controls
    return _due_at(now, controls=(), **rest)


def _due_without_deaths(now: Any, *, worker_dead: bool, **rest: Any) -> Any:
    del worker_dead
    return _due_at(now, worker_dead=False, **rest)


# ---------------------------------------------------------------------------------------------------------------- calls


def _repeat_all(step: Step) -> str:
    return "forget" if step.state == "prepared" else "repeat"


def _unmarked(draft: Draft, turn: Turn, step: Step) -> Step:
    """Hands a call out without saying so in the journal."""
    if step.kind == "model":
        draft.emit("step.model.started", thread_id=turn.thread_id, turn_id=turn.id, step_id=step.id)
    return step


def _no_result(draft: Draft, turn: Turn, position: int, body: bytes) -> None:
    del draft, turn, position, body


# --------------------------------------------------------------------------------------------------------------- interrupts


def _deaf(window: str) -> Callable[..., InterruptDecision]:
    """An interrupt that falls into this window is taken for one that has nothing to end."""

    def decide(turn: Turn | None, *, in_flight: bool, waiting_count: int) -> InterruptDecision:
        here = "head" if turn is None else "in_flight" if in_flight else str(turn.wait)
        if here == window:
            return "nothing"
        return decide_interrupt(turn, in_flight=in_flight, waiting_count=waiting_count)

    return decide


# --------------------------------------------------------------------------------------------------------- ends and phases

_end_turn = settle.end_turn
_set_phase = settle.set_phase
_give_back = turns.give_back
_settle_input = settle.settle_input


def _ended_twice(draft: Draft, turn: Turn, outcome: Any, **rest: Any) -> None:
    _end_turn(draft, turn, outcome, **rest)
    last = draft.events[-1]
    draft.emit("turn.ended", thread_id=last.thread_id, turn_id=last.turn_id)


def _idle_twice(draft: Draft, thread_id: UUID, name: Any, **rest: Any) -> None:
    _set_phase(draft, thread_id, name, **rest)
    if name == "idle":
        _set_phase(draft, thread_id, name, **rest)


def _idle_between(draft: Draft, turn: Turn, outcome: Any, **rest: Any) -> None:
    _end_turn(draft, turn, outcome, **rest)
    if draft.thread(turn.thread_id).waiting_count:
        _set_phase(draft, turn.thread_id, "idle", stop_reason="end_turn")
        _set_phase(draft, turn.thread_id, "active")


def _idle_first(draft: Draft, turn: Turn, outcome: Any, **rest: Any) -> None:
    """The idle before the second sightings of what the turn consumed."""
    if outcome == "refused" or not draft.thread(turn.thread_id).waiting_count:
        _set_phase(draft, turn.thread_id, "idle", stop_reason="end_turn")
    _end_turn(draft, turn, outcome, **rest)


def _no_idle(draft: Draft, thread_id: UUID, name: Any, **rest: Any) -> None:
    if name != "idle":
        _set_phase(draft, thread_id, name, **rest)


# ------------------------------------------------------------------------------------------------------------- the mailbox

_decide_claim = turns.decide_claim


def _newest_first(waiting: tuple[Input, ...], *, turn_active: bool) -> ClaimDecision:
    return _decide_claim(tuple(reversed(waiting)), turn_active=turn_active)


def _three_at_once(waiting: tuple[Input, ...], *, turn_active: bool) -> ClaimDecision:
    decision = _decide_claim(waiting, turn_active=turn_active)
    return Take(waiting[:3]) if isinstance(decision, Take) else decision


def _claim_anyway(waiting: tuple[Input, ...], *, turn_active: bool) -> ClaimDecision:
    del turn_active
    return _decide_claim(waiting, turn_active=False)


_look = advance._look  # pyright: ignore[reportPrivateUsage]


def _look_past_park(draft: Draft, thread: Thread, turn: Turn | None, command: Advance) -> Answered:
    parked = turn is not None and turn.wait == "action" and thread.waiting_count > 0
    return _look(draft, thread, None if parked else turn, command)


def _drop_unseen(draft: Draft, thread_id: UUID, state: Any, reason: str) -> tuple[UUID, ...]:
    """Takes the waiting inputs out of the mailbox and tells nobody."""
    gone = draft.waiting(thread_id)
    for entry in gone:
        draft.change_input(entry, state=state, reason=reason, settled_at=draft.now)
    return tuple(i.id for i in gone)


def _settle_without_stamp(draft: Draft, entry: Input, state: Any, reason: str | None) -> None:
    draft.change_input(entry, state=state, reason=reason, settled_at=draft.now)


_refuse_answer = accept.refuse_answer


def _answer_again(action: Action | None, answer: Any, reference: str) -> Refused | None:
    refused = _refuse_answer(action, answer, reference)
    return None if refused is not None and refused.code == "already_resolved" else refused


def _always_new(*_: Any) -> New:
    return New()


def _any_response(key: SubmissionKey, *_: Any) -> Written | None:
    return key.known


def _uncounted_retry(*_: Any) -> None:
    pass


# ---------------------------------------------------------------------------------------------------------------- charges


def _keep_charge(draft: Draft, turn: Turn, **rest: Any) -> Turn:
    given = _give_back(draft, turn, **rest)
    return draft.change_turn(given.id, charge=turn.charge)


_change_turn = Draft.change_turn


def _uncharged(self: Draft, turn_id: UUID, **fields: Any) -> Turn:
    if fields.get("charged"):
        fields = {k: v for k, v in fields.items() if k not in ("charge", "charged")}
    return _change_turn(self, turn_id, **fields)


# -------------------------------------------------------------------------------------------------------------- PostgreSQL


def _sessions_of(given: tuple[Any, ...]) -> set[UUID]:
    """The sessions whose changes are among these arguments."""
    lists = [cast("list[Any]", some) for some in given if isinstance(some, list)]
    changes = [c for some in lists for c in some]
    return {c.session_id for c in changes if isinstance(c, Changes)}


async def _pretend(_: Any, *given: Any) -> set[UUID]:
    """Takes what was never committed, or only in part, for kept."""
    return _sessions_of(given)


async def _none_kept(*_: Any) -> set[UUID]:
    """Takes every doubtful commit for lost."""
    return set()


_REV: Final = " and s.rev = r.rev"
_CLAIMED: Final = "i.state in ('claimed', 'consumed')"


def _without(text: str, part: str, instead: str = "") -> str:
    assert part in text, f"the mutant expects {part!r} in the SQL"
    return text.replace(part, instead)


MUTANTS: Final = (
    Mutant("fence_removed", "a worker that lost its turn is fenced", ((advance, "holds", _same_turn),)),
    Mutant(
        "another_workspace_let_in",
        "another workspace's session is not found",
        ((lifecycle, "_refuse_foreign", _nobody_foreign),),
    ),
    Mutant("wakeup_lost", "must be looked at by", ((Draft, "settle_wakeup", _no_wakeup),)),
    Mutant(
        "wakeup_lost_in_the_world",
        "must be looked at by",
        ((Draft, "settle_wakeup", _no_wakeup),),
        hunt="worlds",
        budget=3,
    ),
    Mutant("retry_without_wakeup", "must be looked at by", ((wakeup, "due_at", _due_without_retries),)),
    Mutant("stop_without_wakeup", "must be looked at by", ((wakeup, "due_at", _due_without_stops),)),
    Mutant("death_without_wakeup", "must be looked at by", ((wakeup, "due_at", _due_without_deaths),)),
    Mutant("dispatched_tool_run_again", "is made twice", ((advance, "decide_lost", _repeat_all),)),
    Mutant(
        "dispatched_tool_run_again_in_the_world",
        "happened twice",
        ((advance, "decide_lost", _repeat_all),),
        hunt="worlds",
        budget=30,
    ),
    Mutant("call_handed_out_unmarked", "nothing is in flight", ((advance, "_mark", _unmarked),)),
    Mutant("lost_call_unpaired", "has results for", ((settle, "result_entry", _no_result),)),
    Mutant(
        "interrupt_ignored_before_the_claim",
        "an interrupt has a target",
        ((accept, "decide_interrupt", _deaf("head")),),
    ),
    Mutant(
        "interrupt_ignored_in_flight", "an interrupt has a target", ((accept, "decide_interrupt", _deaf("in_flight")),)
    ),
    Mutant(
        "interrupt_ignored_in_retry_wait", "an interrupt has a target", ((accept, "decide_interrupt", _deaf("retry")),)
    ),
    Mutant(
        "interrupt_ignored_before_the_resume",
        "an interrupt has a target",
        ((accept, "decide_interrupt", _deaf("capacity")),),
    ),
    Mutant("turn_ended_twice", "a turn ends once", ((outcomes, "end_turn", _ended_twice),)),
    Mutant("idle_twice", "idle while idle", ((outcomes, "set_phase", _idle_twice),)),
    Mutant("idle_between_queued_turns", "idle between queued turns", ((outcomes, "end_turn", _idle_between),)),
    Mutant(
        "second_sighting_after_the_idle",
        "idle while a turn is open",
        ((outcomes, "end_turn", _idle_first), (outcomes, "set_phase", _no_idle)),
    ),
    Mutant(
        "input_processed_without_stamp",
        "inputs are settled before their turn ends",
        ((settle, "settle_input", _settle_without_stamp),),
    ),
    Mutant(
        "input_dropped_unseen",
        "settled in the row and in the events must agree",
        ((settle, "drop_waiting", _drop_unseen),),
    ),
    Mutant("claimed_newest_first", "messages are taken in receipt order", ((turns, "decide_claim", _newest_first),)),
    Mutant("three_messages_in_one_turn", "a turn takes one message", ((turns, "decide_claim", _three_at_once),)),
    Mutant(
        "claimed_while_parked",
        "the calls were",
        ((turns, "decide_claim", _claim_anyway), (advance, "_look", _look_past_park)),
    ),
    Mutant("answer_taken_twice", "an answer needs an open action", ((accept, "refuse_answer", _answer_again),)),
    Mutant(
        "repeated_request_admitted_again", "one key is admitted once", ((accept, "decide_submission", _always_new),)
    ),
    Mutant(
        "another_requests_response_believed",
        "a retry that may have missed its answer is a repeat",
        ((submission, "_written", _any_response),),
    ),
    Mutant(
        "one_answer_for_two_retries_of_a_send",
        "an answer is given to one retry",
        ((accept, "count_retry", _uncounted_retry),),
        budget=240,
    ),
    Mutant(
        "one_session_for_two_retries_of_a_creation",
        "an answer is given to one retry",
        ((lifecycle, "count_retry", _uncounted_retry),),
        budget=240,
    ),
    Mutant(
        "charge_never_given_back",
        "waits with a worker, a charge",
        ((advance, "give_back", _keep_charge), (outcomes, "give_back", _keep_charge)),
    ),
    Mutant("never_charged", "runs with charge 0", ((Draft, "change_turn", _uncharged),)),
    Mutant(
        "acknowledged_before_commit",
        "the oracle",
        ((writer.Writer, "_write", _pretend),),
        hunt="postgres",
        budget=2,
    ),
    Mutant(
        "guard_without_rev",
        "duplicate key value",
        ((write, "GUARD_UPDATE", _without(write.GUARD_UPDATE, _REV)),),
        hunt="postgres",
        budget=6,
    ),
    Mutant(
        "commit_in_doubt_taken_for_whole",
        "the oracle",
        ((writer.Writer, "_kept", _pretend),),
        hunt="postgres",
        budget=12,
    ),
    Mutant(
        "commit_in_doubt_taken_for_lost",
        "the oracle",
        ((writer.Writer, "_kept", _none_kept),),
        hunt="postgres",
        budget=6,
    ),
    Mutant(
        "facts_without_claimed_answers",
        "the oracle",
        ((writer, "FACTS_SQL", _without(FACTS_SQL, _CLAIMED, "i.state = 'consumed'")),),
        hunt="postgres",
        budget=6,
    ),
)
