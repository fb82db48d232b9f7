"""Cursors come back as they went out, to the list they came from, or not at all."""

from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from perdure.domain.errors import Refused
from perdure.http.cursor import seal, unseal
from perdure.http.query import read_instant

HERE, THERE = UUID(int=1), UUID(int=2)


@given(st.binary(max_size=64), st.text(max_size=20))
def test_a_cursor_opens_for_its_list_alone(place: bytes, scope: str) -> None:
    cursor = seal(HERE, scope, place)
    assert unseal(HERE, scope, cursor) == place
    assert unseal(THERE, scope, cursor) is None
    assert unseal(HERE, scope + "x", cursor) is None


@given(st.text(max_size=600))
def test_text_that_is_no_cursor_opens_nothing(text: str) -> None:
    assert unseal(HERE, "agents", text) is None


@given(st.text(max_size=40))
def test_a_time_is_read_or_refused_and_never_raises(text: str) -> None:
    found = read_instant([("at", text)], "at")
    assert isinstance(found, Refused) or found is None or found.tzinfo is not None
