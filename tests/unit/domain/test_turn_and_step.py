"""Fences, charges, and what becomes of calls."""

import pytest
from tests.unit.domain.rows import SESSION, TURN, a_step, a_turn

from perdure.domain.step import MODEL_TRIES_MAX, RETRY_MS_MAX, decide_dispatch, decide_lost, decide_retry
from perdure.domain.turn import CHARGE_MAX, PARALLEL_TOOLS_MAX, Lease, holds, may_take_over


@pytest.mark.rule("MA-C15.5")
@pytest.mark.parametrize(
    ("lease", "state", "holds_it"),
    [
        (Lease(TURN, 2, 7), "active", True),
        (Lease(TURN, 1, 7), "active", False),
        (Lease(TURN, 2, 6), "active", False),
        (Lease(TURN, 2, 8), "active", False),
        (Lease(SESSION, 2, 7), "active", False),
        (Lease(TURN, 2, 7), "waiting", False),
        (Lease(TURN, 2, 7), "frozen", False),
        (Lease(TURN, 2, 7), "settled", False),
    ],
)
def test_who_may_write_for_a_turn(lease: Lease, state: str, holds_it: bool) -> None:
    assert holds(a_turn(state=state), lease) == holds_it


@pytest.mark.rule("MA-C15.2")
@pytest.mark.parametrize(("charge", "may"), [(0, True), (1, True), (CHARGE_MAX - 1, True), (CHARGE_MAX, False)])
def test_how_often_a_turn_is_taken_over(charge: int, may: bool) -> None:
    assert may_take_over(a_turn(charge=charge)) == may


@pytest.mark.rule("MA-C9.4")
@pytest.mark.parametrize(
    ("state", "on_lost", "fate"),
    [
        ("prepared", "ambiguous", "forget"),
        ("prepared", "repeat", "forget"),
        ("dispatched", "ambiguous", "ambiguous"),
        ("dispatched", "reconcile", "ambiguous"),
        ("dispatched", "repeat", "repeat"),
    ],
)
def test_what_becomes_of_a_lost_call(state: str, on_lost: str, fate: str) -> None:
    assert decide_lost(a_step(1, state=state, on_lost=on_lost)) == fate


@pytest.mark.rule("MA-D1.14")
def test_at_most_four_calls_run_at_once_in_call_order() -> None:
    steps = [a_step(n) for n in (6, 2, 5, 1, 4, 3)]
    assert [s.position for s in decide_dispatch(steps, PARALLEL_TOOLS_MAX)] == [1, 2, 3, 4]


@pytest.mark.rule("MA-D1.14")
def test_calls_in_flight_count() -> None:
    steps = [a_step(1, state="dispatched"), a_step(2, state="dispatched"), *(a_step(n) for n in (3, 4, 5, 6))]
    assert [s.position for s in decide_dispatch(steps, PARALLEL_TOOLS_MAX)] == [3, 4]
    assert decide_dispatch([a_step(n, state="dispatched") for n in range(1, 5)] + [a_step(5)], 4) == ()


@pytest.mark.rule("MA-D1.14")
def test_calls_of_one_shell_run_one_after_the_other() -> None:
    steps = [a_step(1, serial=True), a_step(2, serial=True), a_step(3), a_step(4, serial=True)]
    assert [s.position for s in decide_dispatch(steps, PARALLEL_TOOLS_MAX)] == [1, 3]
    busy = [a_step(1, serial=True, state="dispatched"), a_step(2, serial=True), a_step(3)]
    assert [s.position for s in decide_dispatch(busy, PARALLEL_TOOLS_MAX)] == [3]


@pytest.mark.rule("MA-C10.2", "MA-F14")
@pytest.mark.parametrize(
    ("failures", "retry_after_ms", "delay_ms"),
    [
        (1, None, 1_000),
        (2, None, 2_000),
        (MODEL_TRIES_MAX, None, None),
        (MODEL_TRIES_MAX + 1, None, None),
        (MODEL_TRIES_MAX, 10, None),
        (1, 250, 250),
        (1, 0, 0),
        (2, 3_600_000, RETRY_MS_MAX),
    ],
)
def test_when_a_failed_call_is_tried_again(failures: int, retry_after_ms: int | None, delay_ms: int | None) -> None:
    assert decide_retry(failures, retry_after_ms) == delay_ms
