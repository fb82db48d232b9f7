"""What an interrupt ends."""

from typing import Any

import pytest
from tests.unit.domain.rows import a_turn

from perdure.domain.control import decide_interrupt

ACTIVE = a_turn()
PARKED = a_turn(state="waiting", wait="action")
RETRYING = a_turn(state="waiting", wait="retry")
ANSWERED = a_turn(state="waiting", wait="capacity")


@pytest.mark.rule("MA-C8.1")
@pytest.mark.parametrize(
    ("turn", "in_flight", "waiting_count", "decision"),
    [
        (None, False, 0, "nothing"),
        (None, False, 1, "end_head"),
        (None, False, 40, "end_head"),
        (ACTIVE, True, 0, "capture"),
        (ACTIVE, True, 5, "capture"),
        (ACTIVE, False, 0, "end_turn"),
        (PARKED, False, 0, "nothing"),
        (PARKED, False, 5, "nothing"),
        (RETRYING, False, 0, "end_turn"),
        (ANSWERED, False, 3, "end_turn"),
    ],
)
def test_what_an_interrupt_ends(turn: Any, in_flight: bool, waiting_count: int, decision: str) -> None:
    assert decide_interrupt(turn, in_flight=in_flight, waiting_count=waiting_count) == decision
