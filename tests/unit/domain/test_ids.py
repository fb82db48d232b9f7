"""Ids and their wire form."""

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.domain.rows import NOW, SESSION, TURN, ms

from perdure.domain import ids
from perdure.domain.item import call_id, item_id


@given(st.uuids())
def test_a_token_is_the_id(identity: UUID) -> None:
    token = ids.token(identity)
    assert len(token) == ids.TOKEN_CHARS
    assert ids.parse_token(token) == identity
    assert ids.parse_wire("sesn_" + token, "sesn_") == identity


@given(st.uuids(), st.uuids())
def test_tokens_sort_like_ids(one: UUID, other: UUID) -> None:
    assert (ids.token(one) < ids.token(other)) == (one < other)


@given(st.text(max_size=40))
def test_no_text_breaks_the_parser(text: str) -> None:
    identity = ids.parse_token(text)
    assert identity is None or ids.token(identity) == text


@pytest.mark.parametrize(
    "text", ["", "0" * 25, "0" * 27, "z" * 26, "0" * 25 + "u", "0" * 25 + "O", "0" * 25 + "\u0661"]
)
def test_what_is_no_token(text: str) -> None:
    known = ids.parse_token(text)
    assert known is None or ids.token(known) == text
    if len(text) != ids.TOKEN_CHARS or text == "z" * 26 or not text.isascii():
        assert known is None


def test_a_wrong_prefix_is_no_id() -> None:
    assert ids.parse_wire("agent_" + ids.token(SESSION), "sesn_", "session_") is None


def test_derived_ids_are_fixed_by_what_they_are_made_of() -> None:
    assert ids.derived(TURN, "item", 1, 1, 0) == item_id(TURN, 1, 1, 0)
    others = {item_id(TURN, 1, 1, 1), item_id(TURN, 1, 2, 0), item_id(TURN, 2, 1, 0), item_id(SESSION, 1, 1, 0)}
    assert item_id(TURN, 1, 1, 0) not in others
    assert len(others) == 4
    assert call_id(item_id(TURN, 1, 1, 0)).startswith("toolu_")


def test_timed_ids_sort_by_time() -> None:
    assert ids.timed(NOW, SESSION, "event", 9) < ids.timed(NOW + ms(1), SESSION, "event", 1)
