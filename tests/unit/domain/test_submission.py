"""Whether a request is new, a repeat, or a misuse of its key."""

from typing import Any

import pytest
from tests.unit.domain.rows import NOW, a_key, a_record, ms

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
    ("written", "age_s", "repeat"),
    [
        pytest.param(None, 1, True, id="never written"),
        pytest.param(None, LOST_FLAG_S, True, id="a crash took the flag"),
        pytest.param(None, LOST_FLAG_S + 1, False, id="too old for any retry"),
        pytest.param(Written(NOW, False), 0, True, id="written, perhaps never seen"),
        pytest.param(Written(NOW, False), WRITTEN_GRACE_S, True, id="at the end of the grace"),
        pytest.param(Written(NOW, False), WRITTEN_GRACE_S + 1, False, id="written long ago"),
        pytest.param(Written(NOW, True), 0, False, id="the connection went on: it was seen"),
    ],
)
def test_what_is_known_of_the_first_response_decides(written: Written | None, age_s: int, repeat: bool) -> None:
    record = a_record()
    remembered = decide_submission(a_key(first_response=written), record, later(age_s))
    assert isinstance(remembered, Repeat) == repeat
    if written is not None:
        stored = a_record(written_at=written.at, connection_reused=written.connection_reused)
        assert isinstance(decide_submission(a_key(), stored, later(age_s)), Repeat) == repeat


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
