"""The rules of turns at work: each scenario is a few commands on one session, with every commit checked."""

from typing import Any
from uuid import UUID

import pytest
from tests.unit.domain.rows import a_key
from tests.unit.domain.stage import (
    INTERRUPT,
    OTHER,
    SESSION,
    WORKER,
    WORKSPACE,
    Stage,
    answer,
    erred,
    message,
    replied,
    returned,
    stopped,
    system,
)

from perdure.domain.errors import Fenced
from perdure.domain.event import Event
from perdure.domain.mailbox import WAITING_COUNT_MAX
from perdure.domain.submission import Submission
from perdure.domain.transcript import AMBIGUOUS_TEXT
from perdure.domain.turn import CHARGE_MAX, CUT_ROUNDS_MAX, PARALLEL_TOOLS_MAX, ROUNDS_MAX
from perdure.ports.ledger import (
    Accepted,
    ArchiveSession,
    DeleteSession,
    Done,
    Idle,
    Parked,
    Perform,
    Retry,
    WithdrawInput,
    Working,
)


def parked(*owners: str) -> Stage:
    """A session whose turn waits for the client."""
    stage = Stage(message())
    (model,) = stage.look().steps
    assert stage.report(replied(model, *owners)) == Parked()
    return stage


# ------------------------------------------------------------------------------------------------------------ plain turns


@pytest.mark.rule("MA-C6.1", "MA-C6.2", "MA-B3.5")
def test_queued_messages_are_turns_without_idle_between() -> None:
    stage = Stage(message("one"), message("two"))
    (first,) = stage.look().steps
    (second,) = stage.report(replied(first)).steps
    assert stage.report(replied(second)) == Idle()
    assert stage.phases() == ["active", "idle"]
    assert [t.outcome for t in stage.turns] == ["completed", "completed"]


@pytest.mark.rule("MA-B6.2", "MA-B6.3")
def test_a_message_makes_an_idle_session_run() -> None:
    stage = Stage()
    assert stage.session.status == "idle"
    stage.send(message())
    assert stage.session.status == "running"
    (model,) = stage.look().steps
    stage.report(replied(model))
    assert stage.session.status == "idle"


@pytest.mark.rule("MA-C3.2")
def test_wakeups_that_come_twice_or_late_start_nothing_twice() -> None:
    """Two workers were woken for one message, and both once more after its turn had ended."""
    stage = Stage(message())
    (model,) = stage.look().steps
    assert not isinstance(stage.look(OTHER), Perform)
    assert stage.report(replied(model)) == Idle()
    events = len(stage.oracle.all(Event))
    for worker in (WORKER, OTHER):
        assert stage.look(worker) == Idle()
    assert len(stage.turns) == 1
    assert len(stage.oracle.all(Event)) == events


@pytest.mark.rule("MA-C10.7", "MA-B5.4")
def test_a_refusal_is_an_idle_and_no_error() -> None:
    stage = Stage(message())
    (model,) = stage.look().steps
    assert stage.report(replied(model, text=None, stop="refusal")) == Idle()
    assert not stage.events("session.error")
    assert b"refusal" in stage.events("session.phase")[-1].snap


@pytest.mark.rule("MA-C6.3", "MA-F13")
def test_a_reply_that_is_cut_off_goes_on_a_few_times() -> None:
    stage = Stage(message())
    (model,) = stage.look().steps
    for _ in range(CUT_ROUNDS_MAX):
        (model,) = stage.report(replied(model, stop="max_tokens")).steps
    assert stage.report(replied(model, stop="max_tokens")) == Idle()
    assert stage.turns[0].outcome == "completed"


@pytest.mark.rule("MA-F12", "MA-B4.5")
def test_a_turn_without_end_is_ended() -> None:
    stage = Stage(message())
    (model,) = stage.look().steps
    for _ in range(ROUNDS_MAX - 1):
        (tool,) = stage.report(replied(model, "server", text=None)).steps
        (model,) = stage.report(returned(tool)).steps
    (tool,) = stage.report(replied(model, "server")).steps
    assert stage.report(returned(tool)) == Idle()
    assert stage.turns[0].error_code == "tool_use_limit_reached_error"
    assert b"retries_exhausted" in stage.events("session.phase")[-1].snap


def test_what_waits_is_dropped_however_much_it_is() -> None:
    """More waits than a claim looks at, and a reply, not an error, ends the turn."""
    stage = Stage(message())
    stage.send(*(message(f"{n}") for n in range(100)))
    (model,) = stage.look().steps
    for _ in range(CUT_ROUNDS_MAX - 1):
        (model,) = stage.report(replied(model, "refused", stop="max_tokens")).steps
    assert stage.report(replied(model, "refused", stop="max_tokens")) == Idle()
    assert stage.session.status == "idle"
    assert stage.inputs()[1:] == [("message", "dropped", "retries_exhausted")] * 100


# ---------------------------------------------------------------------------------------------------------------- actions


@pytest.mark.rule("MA-C6.5", "MA-C7.10")
def test_client_calls_are_shown_after_the_servers_ended() -> None:
    stage = Stage(message())
    (model,) = stage.look().steps
    (tool,) = stage.report(replied(model, "custom", "server")).steps
    assert stage.session.status == "running"
    assert not stage.events("action.opened")
    assert stage.report(returned(tool)) == Parked()
    assert stage.phases() == ["active", "wait_action"]
    stage.send(answer(stage.actions[0]))
    (model,) = stage.look().steps
    assert model.kind == "model", "the tool is not run again"


@pytest.mark.rule("MA-C7.5", "MA-C7.7", "MA-B6.4")
def test_some_answers_start_nothing_and_the_last_one_does() -> None:
    stage = parked("custom", "ask")
    custom, ask = stage.actions
    stage.send(answer(ask))
    assert stage.look() == Parked()
    assert stage.phases() == ["active", "wait_action", "wait_action"]
    stage.send(answer(custom))
    assert stage.session.status == "running"
    (tool,) = stage.look().steps
    assert tool.position == 2


@pytest.mark.rule("MA-C7.6", "MA-C5.5")
def test_all_results_go_to_the_model_together_in_call_order() -> None:
    stage = parked("ask", "custom", "ask")
    first, custom, third = stage.actions
    stage.send(answer(custom), system())
    stage.send(answer(third, "deny"), answer(first))
    (tool,) = stage.look().steps
    (model,) = stage.report(returned(tool)).steps
    assert model.kind == "model"
    results = stage.history()[-1]["content"]
    assert [b["type"] for b in results] == ["tool_result", "tool_result", "tool_result", "text"]
    assert "is_error" in results[2]


@pytest.mark.rule("MA-D2.3", "MA-D2.4")
@pytest.mark.parametrize(("how", "runs"), [("allow", True), ("deny", False)])
def test_a_confirmation_decides_whether_the_call_runs(how: str, runs: bool) -> None:
    stage = parked("ask")
    stage.send(answer(stage.actions[0], how))
    (step,) = stage.look().steps
    assert (step.kind == "tool") == runs


@pytest.mark.rule("MA-C7.8")
def test_two_answers_to_one_action_in_one_request_claim_nothing() -> None:
    stage = parked("custom")
    before = len(stage.events())
    refused = stage.send(answer(stage.actions[0]), answer(stage.actions[0]))
    assert refused.code == "already_resolved"
    assert len(stage.events()) == before
    assert stage.actions[0].state == "open"


@pytest.mark.rule("MA-C7.13", "MA-C4.3", "MA-C3.4")
def test_a_message_while_parked_waits_behind_the_resume() -> None:
    stage = parked("custom")
    stage.send(message("later"))
    assert stage.session.status == "idle"
    assert stage.look() == Parked()
    stage.send(answer(stage.actions[0]))
    (resumed,) = stage.look().steps
    assert resumed.turn_id == stage.turns[0].id
    (later,) = stage.report(replied(resumed)).steps
    assert later.turn_id == stage.turns[1].id
    assert stage.phases() == ["active", "wait_action", "active"]


@pytest.mark.rule("MA-C2.3")
@pytest.mark.parametrize("command", [ArchiveSession, DeleteSession])
def test_ending_a_parked_session_accounts_for_its_answers(command: type[ArchiveSession] | type[DeleteSession]) -> None:
    stage = parked("custom", "custom")
    stage.send(answer(stage.actions[0]))
    assert stage.commit(command(session_id=SESSION, workspace_id=WORKSPACE)) == Done()
    assert stage.inputs() == [("message", "consumed", "cancelled"), ("custom_result", "cancelled", "cancelled")]


def told_of_calls(stage: Stage) -> list[str]:
    """What the model reads of the last round's calls."""
    return [str(b["content"][0]["text"]) for b in stage.history()[-1]["content"] if b["type"] == "tool_result"]


@pytest.mark.rule("MA-E1.1")
def test_each_repeat_of_a_deletion_is_counted() -> None:
    """So what is known of the latest answer decides about the next retry."""
    stage = Stage()
    for attempt in (0, 1, 2):
        key = a_key(attempt=attempt, request_id=UUID(int=100 + attempt))
        stage.commit(DeleteSession(session_id=SESSION, workspace_id=WORKSPACE, submission=key))
        (record,) = stage.oracle.all(Submission)
        assert (record.attempt, record.request_id) == (attempt, UUID(int=100 + attempt))


@pytest.mark.rule("MA-C5.1")
@pytest.mark.parametrize(("command", "end"), [(ArchiveSession, "archived"), (DeleteSession, "deleted")])
def test_calls_of_a_parked_turn_are_closed_by_what_ended_it(command: Any, end: str) -> None:
    stage = parked("custom", "ask")
    stage.send(answer(stage.actions[0]))
    stage.commit(command(session_id=SESSION, workspace_id=WORKSPACE))
    assert told_of_calls(stage) == [
        f"The session was {end} before the answer to this call was read.",
        f"The session was {end} before this call was answered.",
    ]


@pytest.mark.rule("MA-C5.1", "MA-C15.2")
def test_calls_of_a_turn_that_is_given_up_blame_no_user() -> None:
    stage = Stage(message())
    (model,) = stage.look().steps
    stage.report(replied(model, "custom", *["server"] * (CHARGE_MAX * PARALLEL_TOOLS_MAX + 1)))
    stage.oracle.bury(WORKER)
    for number in range(1, CHARGE_MAX):
        assert isinstance(stage.look(UUID(int=50 + number)), Perform)
        stage.oracle.bury(UUID(int=50 + number))
    assert stage.look(OTHER) == Idle()
    assert stage.turns[0].outcome == "failed"
    texts = told_of_calls(stage)
    assert texts[0] == "The turn ended with an error before this call was answered."
    assert texts[-1] == "The turn ended with an error before this call was started."
    assert set(texts[1:-1]) == {AMBIGUOUS_TEXT}
    assert not any("user" in text for text in texts)


# -------------------------------------------------------------------------------------------------------------- interrupts


@pytest.mark.rule("MA-C8.10", "MA-C8.11")
def test_an_interrupt_before_the_claim_ends_the_head() -> None:
    stage = Stage()
    stage.send(message(), INTERRUPT)
    assert stage.inputs() == [("message", "interrupted", "interrupt")]
    assert stage.phases() == ["active", "idle"]
    assert stage.look() == Idle()


@pytest.mark.rule("MA-C8.10")
def test_as_many_interrupts_as_messages_wait_end_each_of_them() -> None:
    stage = Stage()
    stage.send(*[message(str(n)) for n in range(40)], *[INTERRUPT] * 40)
    assert stage.inputs() == [("message", "interrupted", "interrupt")] * 40
    assert stage.session.status == "idle"


@pytest.mark.rule("MA-C8.2", "MA-C8.3", "MA-C8.7")
def test_an_interrupt_in_flight_cancels_and_what_waits_runs() -> None:
    stage = Stage(message())
    (model,) = stage.look().steps
    stage.send(INTERRUPT, message("next"))
    assert stage.advance(lease=stage.lease) == Working(lease=stage.lease, stop=True)
    answered = stage.report(stopped(model))
    assert isinstance(answered, Perform)
    assert stage.phases() == ["active", "idle", "active"]
    assert not stage.events("session.error")
    assert [t.outcome for t in stage.turns] == ["interrupted", None]


@pytest.mark.rule("MA-C8.2")
def test_a_whole_reply_after_the_interrupt_does_not_undo_it() -> None:
    stage = Stage(message())
    (model,) = stage.look().steps
    stage.send(INTERRUPT)
    assert stage.report(replied(model, "server", "custom")) == Idle()
    assert stage.turns[0].outcome == "interrupted"
    assert [e.kind for e in stage.events("item.opened")] == ["message"], "its text is kept, its calls are not shown"


@pytest.mark.rule("MA-C8.5")
def test_a_tool_cut_off_is_told_apart_from_one_not_started() -> None:
    stage = Stage(message())
    (model,) = stage.look().steps
    stage.report(replied(model, *["server"] * 5))
    stage.send(INTERRUPT)
    for step in stage.steps("dispatched"):
        stage.report(stopped(step))
    texts = [str(b["content"][0]["text"]) for b in stage.history()[-1]["content"]]
    assert ["while it ran" in t for t in texts] == [True] * 4 + [False]
    assert "before it started" in texts[4]


@pytest.mark.rule("MA-C8.6")
def test_calls_of_the_client_stay_unseen_when_the_turn_had_not_parked() -> None:
    stage = Stage(message())
    (model,) = stage.look().steps
    (tool,) = stage.report(replied(model, "custom", "server")).steps
    stage.send(INTERRUPT)
    stage.report(stopped(tool))
    assert not stage.events("action.opened")
    assert [e.kind for e in stage.events("item.opened")] == ["message", "tool"]


@pytest.mark.rule("MA-C8.9", "MA-B6.5")
def test_an_interrupt_ends_the_wait_for_a_retry() -> None:
    stage = Stage(message())
    (model,) = stage.look().steps
    assert isinstance(stage.report(erred(model)), Retry)
    assert stage.session.status == "rescheduling"
    stage.send(INTERRUPT)
    assert stage.phases() == ["active", "retrying", "idle"]
    assert stage.look() == Idle()


@pytest.mark.rule("MA-C8.12")
def test_a_second_interrupt_is_processed_at_the_same_idle() -> None:
    stage = Stage(message())
    (model,) = stage.look().steps
    stage.send(INTERRUPT)
    stage.send(INTERRUPT)
    stage.report(stopped(model))
    assert stage.phases() == ["active", "idle"]
    assert all(e.processed_at is not None for e in stage.events("input.received"))


@pytest.mark.rule("MA-C8.13", "MA-C8.1")
def test_an_interrupt_before_the_answer_changes_nothing() -> None:
    stage = parked("custom")
    stage.send(INTERRUPT, answer(stage.actions[0]))
    assert stage.session.status == "running"
    assert isinstance(stage.look(), Perform)


@pytest.mark.rule("MA-C8.2")
def test_an_interrupt_behind_the_last_answer_ends_the_resume() -> None:
    stage = parked("custom")
    stage.send(answer(stage.actions[0]), INTERRUPT)
    assert stage.phases() == ["active", "wait_action", "active", "idle"]
    assert stage.inputs()[1] == ("custom_result", "interrupted", "interrupted")
    assert told_of_calls(stage) == ["The user interrupted the turn before the answer to this call was read."]
    assert stage.look() == Idle()


@pytest.mark.rule("MA-C8.3")
def test_a_call_that_ignores_the_stop_is_left_behind_after_the_grace() -> None:
    stage = Stage(message())
    (model,) = stage.look().steps
    stage.send(INTERRUPT)
    stage.pass_ms(4_999)
    assert stage.look(OTHER) == Idle()
    assert stage.turns[0].state == "active"
    stage.pass_ms(1)
    assert stage.look(OTHER) == Idle()
    assert stage.turns[0].outcome == "interrupted"
    assert stage.report(replied(model)) == Fenced()


@pytest.mark.rule("MA-C8.3")
def test_an_interrupt_wins_over_giving_the_turn_up() -> None:
    stage = Stage(message())
    stage.look()
    for number in range(CHARGE_MAX):
        worker = WORKER if number == 0 else UUID(int=50 + number)
        if number:
            stage.look(worker)
        stage.oracle.bury(worker)
    stage.send(INTERRUPT, message("next"))
    assert isinstance(stage.look(OTHER), Perform)
    assert [t.outcome for t in stage.turns] == ["interrupted", None]
    assert not stage.events("session.error")


# ---------------------------------------------------------------------------------------------------- failures and deaths


@pytest.mark.rule("MA-C10.1", "MA-C2.5", "MA-B4.2")
def test_a_failed_call_is_tried_again() -> None:
    stage = Stage(message())
    (model,) = stage.look().steps
    assert stage.report(erred(model, retry_after_ms=700)) == Retry(stage.oracle.clock.now.replace(microsecond=700_000))
    stage.send(message("meanwhile"))
    assert stage.session.status == "rescheduling"
    stage.pass_ms(700)
    (again,) = stage.look().steps
    assert (again.try_no, again.failures) == (2, 1)
    assert stage.phases() == ["active", "retrying", "active"]


@pytest.mark.rule("MA-C10.3", "MA-C10.4", "MA-B4.4", "MA-F14")
def test_exhausted_retries_drop_what_waits_and_leave_the_session_usable() -> None:
    stage = Stage(message(), message("waits"))
    (model,) = stage.look().steps
    for _ in range(2):
        assert isinstance(stage.report(erred(model)), Retry)
        stage.pass_ms(60_000)
        (model,) = stage.look().steps
    assert stage.report(erred(model)) == Idle()
    assert stage.inputs() == [("message", "consumed", "failed"), ("message", "dropped", "retries_exhausted")]
    assert b'"flushed":["' in stage.events("session.error")[-1].snap
    stage.send(message("again"))
    assert isinstance(stage.look(), Perform)


@pytest.mark.rule("MA-C10.5", "MA-B6.6")
def test_a_permanent_failure_terminates() -> None:
    stage = Stage(message(), message("waits"))
    (model,) = stage.look().steps
    assert stage.report(erred(model, retryable=False)) == Idle()
    assert stage.session.status == "terminated"
    assert stage.inputs()[1] == ("message", "dropped", "session_terminated")
    assert stage.send(message()).code == "session_terminated"
    ended_at = stage.session.updated_at
    stage.pass_ms(5_000)
    stage.commit(ArchiveSession(session_id=SESSION, workspace_id=WORKSPACE))
    assert (stage.session.state, stage.session.updated_at) == ("archived", ended_at), "it lasts no longer for that"


@pytest.mark.rule("MA-C9.2", "MA-C9.3", "MA-C9.4", "MA-C9.5")
def test_each_lost_call_by_its_own_rule() -> None:
    stage = Stage(message())
    (model,) = stage.look().steps
    stage.report(replied(model, "server", "read", "server", "server", "server"))
    stage.oracle.bury(WORKER)
    taken = stage.look(OTHER)
    assert [(s.position, s.try_no) for s in taken.steps] == [(2, 2), (5, 1)], "the harmless one again, the new one now"
    assert [s.position for s in stage.steps("ambiguous")] == [1, 3, 4]


@pytest.mark.rule("MA-C9.5", "MA-B3.6")
def test_a_lost_model_call_is_made_again() -> None:
    stage = Stage(message())
    (model,) = stage.look().steps
    stage.oracle.bury(WORKER)
    (again,) = stage.look(OTHER).steps
    assert (again.ordinal, again.try_no, again.failures) == (model.ordinal, 2, 0)
    stage.report(replied(again), worker=OTHER)
    assert len(stage.events("item.opened")) == 1
    starts, ends = stage.events("step.model.started"), stage.events("step.model.ended")
    assert [e.ref_seq for e in ends] == [e.seq for e in starts]


@pytest.mark.rule("MA-C15.2")
def test_a_turn_that_kills_its_workers_is_given_up() -> None:
    stage = Stage(message())
    for number in range(CHARGE_MAX):
        worker = UUID(int=50 + number)
        assert isinstance(stage.look(worker), Perform)
        stage.oracle.bury(worker)
    assert stage.look(OTHER) == Idle()
    assert stage.turns[0].outcome == "failed"


@pytest.mark.rule("MA-C15.3")
def test_turns_given_back_in_order_are_not_charged() -> None:
    stage = Stage(message())
    for _ in range(3 * CHARGE_MAX):
        assert isinstance(stage.look(), Perform)
        assert stage.release() == Done()
    assert stage.turns[0].charge == 0
    (model,) = stage.look(OTHER).steps
    assert stage.report(replied(model), worker=OTHER) == Idle()


@pytest.mark.rule("MA-C15.3")
def test_a_drain_waits_for_its_tool_and_starts_nothing() -> None:
    stage = Stage(message())
    (model,) = stage.look().steps
    (tool,) = stage.report(replied(model, "server")).steps
    assert isinstance(stage.advance(lease=stage.lease, draining=True), Working)
    assert stage.report(returned(tool), draining=True) == Idle()
    assert (stage.turns[0].state, stage.turns[0].charge) == ("waiting", 0)


@pytest.mark.rule("MA-C6.4")
def test_a_late_result_of_a_lost_attempt_is_dropped() -> None:
    stage = Stage(message())
    (model,) = stage.look().steps
    old = stage.lease
    stage.oracle.bury(WORKER)
    stage.look(OTHER)
    before = len(stage.events())
    assert stage.advance(replied(model), lease=old) == Fenced()
    assert len(stage.events()) == before


def test_a_withdrawn_message_leaves_the_session_idle() -> None:
    stage = Stage()
    (received,) = stage.send(message()).events
    withdraw = WithdrawInput(session_id=SESSION, workspace_id=WORKSPACE, input_id=received.id)
    assert stage.commit(withdraw) == Done()
    assert stage.inputs() == [("message", "cancelled", "withdrawn")]
    assert stage.phases() == ["active", "idle"]
    assert stage.commit(withdraw).code == "input_not_waiting"


def test_a_full_mailbox_takes_an_answer_with_its_system_message() -> None:
    """Neither waits: both go to the parked turn."""
    stage = Stage(message())
    stage.report(replied(stage.look().steps[0], "custom"))
    stage.send(*[message() for _ in range(WAITING_COUNT_MAX)])
    assert isinstance(stage.send(answer(stage.actions[0]), system()), Accepted)
