"""One scripted provider for the tests of a process, in a thread of its own."""

from collections.abc import AsyncGenerator, Generator
from pathlib import Path

import pytest
from tests.process.world import World, a_world

from perdure.testing.model_server import ModelServerThread


@pytest.fixture(scope="session")
def provider() -> Generator[ModelServerThread]:
    """The provider of every process."""
    with ModelServerThread() as server:
        yield server


@pytest.fixture
async def world(database_url: str, tmp_path: Path, provider: ModelServerThread) -> AsyncGenerator[World]:
    """Processes on a fresh database without fsync: a killed process loses nothing of what the kernel has."""
    async with a_world(database_url, tmp_path, provider) as world:
        yield world
