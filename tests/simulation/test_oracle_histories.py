"""Random histories on the oracle alone, judged by the small model: cheap, so there are many, and Hypothesis shrinks them."""

import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perdure.testing.histories import STEP_BITS, Failed, Shape, play_all, step_seeds
from perdure.testing.shrinking import hunt, shortest
from perdure.testing.step_outcomes import Mix

LONG = bool(os.environ.get("PERDURE_LONG"))
CHUNKS = 20
HISTORIES = 100 if LONG else 10

# No session ends early, so that histories get deep.
DEEP = Shape(
    sessions_max=2,
    mix=Mix(calls=0.6, retryable=0.15, permanent=0.0),
    weights={"create": 4, "accept": 20, "look": 14, "outcome": 60, "stale_outcome": 6, "repeat": 8, "drain": 4},
)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_histories_keep_every_rule(chunk: int) -> None:
    for number in range(HISTORIES):
        hunt(chunk * HISTORIES + number, 40)


def test_long_histories_keep_every_rule() -> None:
    for seed in range(HISTORIES):
        hunt(seed, 200, DEEP)


@settings(max_examples=200 if LONG else 40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.lists(st.integers(min_value=0, max_value=2**STEP_BITS - 1), min_size=1, max_size=60))
def test_any_list_of_integers_is_a_history_that_keeps_every_rule(seeds: list[int]) -> None:
    play_all(seeds)


def test_shrinking_finds_the_two_steps_that_matter() -> None:
    seeds = step_seeds(1, 40)
    wanted = {seeds[7], seeds[31]}
    assert shortest(seeds, lambda kept: wanted <= set(kept)) == [seeds[7], seeds[31]]


def test_a_failure_names_its_shortest_history(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perdure.testing.small_model._check_custody", lambda *_: ["planted"])
    with pytest.raises(Failed, match=r"history 3 of 40 fails; play_all\(\[\d+\]\) shows it.*planted"):
        hunt(3, 40)
