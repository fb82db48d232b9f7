"""The oracle and PostgreSQL, given the same histories, answer the same and hold the same rows."""

import os
from collections import Counter

import pytest
from tests.differential.comparison import ROUGH, compare

LONG = bool(os.environ.get("PERDURE_LONG"))
CHUNKS = 60 if LONG else 10
HISTORIES = 5
ROUGH_HISTORIES = 8
STEPS = 120 if LONG else 40


@pytest.mark.parametrize("chunk", range(CHUNKS))
async def test_random_histories_agree(database_url: str, chunk: int) -> None:
    for number in range(HISTORIES):
        await compare(database_url, chunk * HISTORIES + number, STEPS)


@pytest.mark.parametrize("chunk", range(25 if LONG else 1))
async def test_in_rough_weather_they_agree_too_and_the_weather_is_rough(database_url: str, chunk: int) -> None:
    met: Counter[str] = Counter()
    for seed in range(chunk * ROUGH_HISTORIES, (chunk + 1) * ROUGH_HISTORIES):
        comparison = await compare(database_url, seed, STEPS, ROUGH)
        met += comparison.side.trouble.met
    wanted = {"between", "miss", "slow path", "batch of several", "lost_before_commit", "lost_after_commit"}
    assert wanted <= met.keys(), met
