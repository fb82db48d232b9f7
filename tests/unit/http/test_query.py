"""Reading query strings: what is taken, and the rule that a refusal names."""

from datetime import UTC, datetime
from typing import Any

import pytest

from perdure.domain.errors import Refused
from perdure.http.query import read_instant, read_limit, read_whole

AT = datetime(2026, 1, 31, 9, tzinfo=UTC)


@pytest.mark.rule("MA-A0.15")
@pytest.mark.parametrize(
    "text",
    [
        "2026-01-31T09:00:00Z",
        "2026-01-31t09:00:00z",
        "2026-01-31T09:00:00z",
        "2026-01-31t09:00:00.000000Z",
        "2026-01-31T11:00:00+02:00",
        "2026-01-31t11:00:00 02:00",
        "2026-01-31T07:30:00-01:30",
    ],
)
def test_instants_of_rfc_3339(text: str) -> None:
    assert read_instant([("k", text)], "k") == AT


@pytest.mark.rule("MA-A0.15")
@pytest.mark.parametrize("text", ["", "t", "today", "2026-01-31", "2026-01-31T09:00:00", "2026-01-31 09:00:00Z"])
def test_other_times_are_refused(text: str) -> None:
    refused = read_instant([("k", text)], "k")
    assert isinstance(refused, Refused) and refused.message.startswith("k: must be an RFC 3339 time")


@pytest.mark.rule("MA-A0.24")
@pytest.mark.parametrize("text", ["0", "101", "-1", "1.5", "x", "", str(2**63 - 1), str(2**63), str(2**64), "9" * 20])
def test_a_limit_out_of_range_is_quoted_and_named(text: str) -> None:
    refused = read_limit([("limit", text)])
    assert isinstance(refused, Refused)
    assert refused.message == f"limit: must be a whole number from 1 to 100, not {text!r}."


@pytest.mark.rule("MA-A5.6")
@pytest.mark.parametrize(("text", "value"), [("1", 1), ("999999999", 999_999_999), ("1000000000", None), ("0", None)])
def test_a_number_without_a_limit_of_its_own_has_nine_digits(text: str, value: Any) -> None:
    read = read_whole([("version", text)], "version", default=0)
    if value is None:
        assert isinstance(read, Refused) and "from 1 to 999,999,999" in read.message
    else:
        assert read == value
