"""Whether a request is new, a repeat, or a misuse of its key."""

from datetime import timedelta
from typing import Any

import pytest
from tests.unit.domain.rows import FIRST_REQUEST, LATER_REQUEST, NOW, a_key, a_record, ms

from perdure.domain.submission import KEPT_S, LOST_FLAG_S, WRITTEN_GRACE_S, New, Repeat, Written, decide_submission


def later(seconds: float) -> Any:
    return NOW + ms(int(seconds * 1000))


def test_without_key_or_record_everything_is_new() -> None:
    assert decide_submission(None, None, NOW) == New()
    assert decide_submission(None, a_record(), NOW) == New()
    assert decide_submission(a_key(), None, NOW) == New()


@pytest.mark.rule("MA-E1.1", "MA-E1.2")
@pytest.mark.parametrize(
    ("attempt", "known", "repeat"),
    [(0, 0, False), (1, 0, True), (2, 1, True), (1, 1, False), (2, 2, False), (1, 2, False)],
)
def test_only_a_later_try_of_the_sdk_is_a_repeat(attempt: int, known: int, repeat: bool) -> None:
    record = a_record(attempt=known)
    expected = Repeat(record) if repeat else New()
    assert decide_submission(a_key(attempt=attempt), record, NOW) == expected


@pytest.mark.rule("MA-E1.1")
@pytest.mark.parametrize(
    ("reused", "age_s", "repeat"),
    [
        pytest.param(None, 1, True, id="never written"),
        pytest.param(None, LOST_FLAG_S, True, id="a crash took the flag"),
        pytest.param(None, LOST_FLAG_S + 1, False, id="too old for any retry"),
        pytest.param(False, 0, True, id="written, perhaps never seen"),
        pytest.param(False, WRITTEN_GRACE_S, True, id="at the end of the grace"),
        pytest.param(False, WRITTEN_GRACE_S + 1, False, id="written long ago"),
        pytest.param(True, 0, False, id="the connection went on: it was seen"),
    ],
)
def test_what_is_known_of_the_first_response_decides(reused: bool | None, age_s: int, repeat: bool) -> None:
    known = None if reused is None else Written(FIRST_REQUEST, timedelta(seconds=age_s), reused)
    remembered = decide_submission(a_key(known=known), a_record(), later(age_s))
    assert isinstance(remembered, Repeat) == repeat
    if reused is not None:
        stored = a_record(written_at=NOW, connection_reused=reused)
        assert isinstance(decide_submission(a_key(), stored, later(age_s)), Repeat) == repeat


@pytest.mark.rule("MA-E1.1", "MA-E1.7")
@pytest.mark.parametrize("reused", [False, True])
@pytest.mark.parametrize("age_s", [0, WRITTEN_GRACE_S + 1])
def test_another_requests_response_says_nothing_of_this_one(reused: bool, age_s: int) -> None:
    """Another process admitted the latest, or this one did and never answered it."""
    known = Written(LATER_REQUEST, timedelta(seconds=age_s), reused)
    unanswered = a_record()
    assert decide_submission(a_key(known=known), unanswered, NOW) == Repeat(unanswered)
    read = a_record(written_at=NOW, connection_reused=True)
    assert decide_submission(a_key(known=known), read, NOW) == New()


@pytest.mark.rule("MA-E1.1")
def test_a_host_with_a_wrong_clock_judges_alike() -> None:
    """Its own response is as old as it measured, whatever time the ledger has."""
    known = Written(FIRST_REQUEST, timedelta(seconds=1), False)
    record = a_record(created_at=later(-100))
    assert decide_submission(a_key(known=known), record, NOW) == Repeat(record)


@pytest.mark.rule("MA-E1.4")
def test_an_explicit_key_always_decides() -> None:
    record = a_record(explicit=True, written_at=NOW, connection_reused=True)
    key = a_key(explicit=True, attempt=0)
    assert decide_submission(key, record, later(KEPT_S)) == Repeat(record)
    assert decide_submission(key, record, later(KEPT_S + 1)) == New()


@pytest.mark.rule("MA-E1.4")
def test_a_key_with_another_body_is_refused() -> None:
    refused = decide_submission(a_key(explicit=True, body_digest=b"other"), a_record(explicit=True), NOW)
    assert getattr(refused, "code", None) == "idempotency_key_reused"
