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
    for refused in (refuse_input(state), refuse_archive(state, "idle", waiting_count=0, owed_count=0)):
        assert refused is not None
        assert refused.kind == "not_found"


@pytest.mark.rule("MA-G14")
@pytest.mark.parametrize(
    ("state", "status", "waiting_count", "code"),
    [
        ("open", "idle", 0, None),
        ("open", "running", 0, "session_running"),
        ("open", "rescheduling", 0, "session_running"),
        ("open", "running", 1, "session_running"),
        ("open", "idle", 1, "input_waiting"),
        ("terminated", "terminated", 0, None),
    ],
)
def test_what_may_be_archived(state: Any, status: Any, waiting_count: int, code: str | None) -> None:
    refused = refuse_archive(state, status, waiting_count=waiting_count, owed_count=waiting_count)
    assert (None if refused is None else refused.code) == code


def test_a_parked_session_is_not_archived_and_says_what_it_waits_for() -> None:
    refused = refuse_archive("open", "idle", waiting_count=3, owed_count=2)
    assert refused is not None
    assert "answers (2)" in refused.message and "inputs (3)" in refused.message
    assert "running" not in refused.message


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
