"""What a mailbox takes, and what the next turn takes from it."""

from typing import Any

import pytest
from tests.unit.domain.rows import an_input

from perdure.domain.mailbox import (
    WAITING_BYTES_MAX,
    WAITING_COUNT_MAX,
    Blocked,
    Empty,
    Room,
    Take,
    decide_claim,
    decide_room,
    refuse_system,
)


@pytest.mark.rule("MA-C4.2")
def test_the_head_is_claimed_alone_in_receipt_order() -> None:
    first, second = an_input(5), an_input(8)
    assert decide_claim((first, second), turn_active=False) == Take((first,))


@pytest.mark.rule("MA-B1.10")
def test_a_system_message_goes_with_its_message() -> None:
    head, system = an_input(5), an_input(6, kind="system", companion_of=5)
    assert decide_claim((head, system, an_input(7)), turn_active=False) == Take((head, system))


@pytest.mark.rule("MA-C4.1")
def test_an_open_turn_blocks_the_claim() -> None:
    assert decide_claim((an_input(5),), turn_active=True) == Blocked("turn_active")


def test_nothing_waits() -> None:
    assert decide_claim((), turn_active=False) == Empty()


@pytest.mark.parametrize("state", ["preparing", "held"])
def test_an_older_input_that_is_not_ready_blocks_those_behind(state: str) -> None:
    assert decide_claim((an_input(5, state=state), an_input(6)), turn_active=False) == Blocked(state)


@pytest.mark.rule("MA-F10", "MA-C2.4")
@pytest.mark.parametrize(
    ("held", "size_bytes", "count", "more_bytes", "fits"),
    [
        (0, 0, 0, 0, True),
        (WAITING_COUNT_MAX - 1, 0, 1, 0, True),
        (WAITING_COUNT_MAX, 0, 0, 0, True),
        (WAITING_COUNT_MAX, 0, 1, 0, False),
        (WAITING_COUNT_MAX - 1, 0, 2, 0, False),
        (1, WAITING_BYTES_MAX - 5, 1, 5, True),
        (1, WAITING_BYTES_MAX - 5, 1, 6, False),
    ],
)
def test_room(held: int, size_bytes: int, count: int, more_bytes: int, fits: bool) -> None:
    refused = decide_room(Room(held, size_bytes), count=count, size_bytes=more_bytes)
    assert (refused is None) == fits
    if refused is not None:
        assert (refused.kind, refused.code) == ("rate_limited", "mailbox_full")
        assert "interrupt" in refused.message, "it says what to do"


@pytest.mark.rule("MA-C7.9")
@pytest.mark.parametrize(
    ("previous", "last", "parked", "accepted"),
    [
        ("message", True, False, True),
        ("custom_result", True, False, True),
        ("custom_result", True, True, True),
        ("message", True, True, False),
        ("message", False, False, False),
        ("interrupt", True, False, False),
        ("confirmation", True, False, False),
        ("confirmation", True, True, False),
        ("system", True, False, False),
        (None, True, False, False),
    ],
)
def test_where_a_system_message_may_stand(previous: Any, last: bool, parked: bool, accepted: bool) -> None:
    refused = refuse_system(previous, last=last, parked=parked)
    assert (refused is None) == accepted
    assert refused is None or refused.kind == "invalid"
