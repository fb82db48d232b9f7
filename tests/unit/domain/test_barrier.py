"""Answers and the actions that they answer."""

from typing import Any

import pytest
from tests.unit.domain.rows import an_action

from perdure.domain.barrier import refuse_answer, still_owed


@pytest.mark.rule("MA-C7.2")
@pytest.mark.parametrize(
    ("kind", "state", "answer", "code"),
    [
        ("custom", "open", "result", None),
        ("confirm", "open", "allow", None),
        ("confirm", "open", "deny", None),
        ("custom", "open", "allow", "wrong_action_kind"),
        ("custom", "open", "deny", "wrong_action_kind"),
        ("confirm", "open", "result", "wrong_action_kind"),
        ("custom", "claimed", "result", "already_resolved"),
        ("confirm", "closed", "allow", "already_resolved"),
        ("custom", "held", "result", "unknown_action"),
        ("confirm", "closed", "result", "wrong_action_kind"),
    ],
)
def test_which_answers_an_action_takes(kind: str, state: str, answer: Any, code: str | None) -> None:
    refused = refuse_answer(an_action(kind=kind, state=state), answer, "sevt_x")
    assert (None if refused is None else refused.code) == code
    assert refused is None or "sevt_x" in refused.message


@pytest.mark.rule("MA-C7.2")
def test_an_unknown_action_takes_no_answer() -> None:
    refused = refuse_answer(None, "result", "sevt_x")
    assert refused is not None
    assert (refused.kind, refused.code) == ("invalid", "unknown_action")


@pytest.mark.rule("MA-C7.4")
def test_a_second_answer_is_a_conflict() -> None:
    refused = refuse_answer(an_action(state="claimed"), "result", "sevt_x")
    assert refused is not None
    assert refused.kind == "conflict"


def test_what_is_owed_comes_in_call_order() -> None:
    rows = (
        an_action(3, round=1),
        an_action(1, round=2),
        an_action(1, round=1),
        an_action(2, round=1, state="claimed"),
        an_action(4, round=1, state="held"),
    )
    assert [(a.round, a.position) for a in still_owed(rows)] == [(1, 1), (1, 3), (2, 1)]
