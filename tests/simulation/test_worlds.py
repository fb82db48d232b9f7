"""Whole worlds in virtual time: workers crash, freeze and lose answers, and in the end everything is accounted for."""

import os

import pytest

from perdure.testing.simulator import Odds, World, simulate
from perdure.testing.step_outcomes import Mix

LONG = bool(os.environ.get("PERDURE_LONG"))
CHUNKS = 40
SEEDS = 50 if LONG else 5
STORMS = 400 if LONG else 20


@pytest.mark.rule("MA-C3.1", "MA-C9.4", "MA-C2.3", "MA-C15.5")
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_everything_comes_to_rest_whatever_breaks(chunk: int) -> None:
    for number in range(SEEDS):
        simulate(chunk * SEEDS + number)


def test_a_storm_of_crashes_settles_every_input() -> None:
    storm = Odds(crash_before=0.08, crash_after=0.08, lost_answer=0.1, lost_hint=0.9, freezes=5, workers_count=4)
    for seed in range(STORMS):
        simulate(seed, storm)


@pytest.mark.rule("MA-C3.3")
def test_with_every_hint_lost_the_sweep_finds_all_work() -> None:
    quiet = Odds(lost_hint=1.0, crash_before=0.0, crash_after=0.0, freezes=0, drains=0)
    for seed in range(STORMS):
        simulate(seed, quiet)


def test_interrupts_from_all_sides_end_every_turn_once() -> None:
    busy = Odds(interrupts=0.8, sends_max=14, deaf=0.5, mix=Mix(calls=0.7, retryable=0.3, permanent=0.0))
    for seed in range(STORMS):
        simulate(seed, busy)


def test_one_integer_makes_one_run() -> None:
    first, second = simulate(7), simulate(7)
    assert first.oracle.snapshot() == second.oracle.snapshot()
    assert first.now_ms == second.now_ms


def test_the_worlds_are_as_rough_as_they_claim() -> None:
    """A simulation in which nothing happens would prove nothing."""
    worlds = [simulate(seed) for seed in range(20)]
    assert sum(len(w.oracle.workers) for w in worlds) > 20, "workers die and are buried"
    assert sum(sum(w.effects.values()) for w in worlds) > 50, "tools run"
    assert any(attempt > 2 for w in worlds for attempt in _attempts(w)), "turns change hands"
    assert {"completed", "interrupted", "refused"} <= {o for w in worlds for o in _outcomes(w)}


def _attempts(world: World) -> list[int]:
    return [turn["attempt_no"] for turn in world.oracle.snapshot()["Turn"]]


def _outcomes(world: World) -> list[str]:
    return [turn["outcome"] for turn in world.oracle.snapshot()["Turn"]]
