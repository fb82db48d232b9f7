"""What a session in each state refuses."""

from typing import Any

import pytest

from perdure.domain.session import refuse_archive, refuse_delete, refuse_input


@pytest.mark.rule("MA-G14")
@pytest.mark.parametrize(
    ("state", "code"),
    [
        ("open", None),
        ("archived", "session_archived"),
        ("terminated", "session_terminated"),
        ("deleting", "session_not_found"),
        ("deleted", "session_not_found"),
    ],
)
def test_which_states_take_input(state: Any, code: str | None) -> None:
    refused = refuse_input(state)
    assert (None if refused is None else refused.code) == code


@pytest.mark.rule("MA-C2.6")
@pytest.mark.parametrize("state", ["deleting", "deleted"])
def test_a_session_that_goes_is_not_found(state: Any) -> None:
    for refused in (refuse_input(state), refuse_archive(state, "idle", 0)):
        assert refused is not None
        assert refused.kind == "not_found"


@pytest.mark.rule("MA-G14")
@pytest.mark.parametrize(
    ("state", "status", "waiting_count", "refused"),
    [
        ("open", "idle", 0, False),
        ("open", "running", 0, True),
        ("open", "rescheduling", 0, True),
        ("open", "idle", 1, True),
        ("terminated", "terminated", 0, False),
    ],
)
def test_what_may_be_archived(state: Any, status: Any, waiting_count: int, refused: bool) -> None:
    assert (refuse_archive(state, status, waiting_count) is not None) == refused


@pytest.mark.rule("MA-C11.1", "MA-C11.6")
@pytest.mark.parametrize(
    ("state", "status", "kind"),
    [
        ("open", "idle", None),
        ("open", "running", "conflict"),
        ("open", "rescheduling", "conflict"),
        ("archived", "terminated", None),
        ("deleting", "idle", None),
        ("deleted", "idle", "not_found"),
    ],
)
def test_what_may_be_deleted(state: Any, status: Any, kind: str | None) -> None:
    refused = refuse_delete(state, status)
    assert (None if refused is None else refused.kind) == kind
