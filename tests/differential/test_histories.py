"""The oracle and PostgreSQL, given the same histories, answer the same and hold the same rows."""

import os

import pytest
from tests.differential.comparison import compare

LONG = bool(os.environ.get("PERDURE_LONG"))
CHUNKS = 60 if LONG else 10
HISTORIES = 5
STEPS = 120 if LONG else 40


@pytest.mark.parametrize("chunk", range(CHUNKS))
async def test_random_histories_agree(database_url: str, chunk: int) -> None:
    for number in range(HISTORIES):
        await compare(database_url, chunk * HISTORIES + number, STEPS)
