"""A fresh environment in a fresh root for each test, with a real sandbox."""

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from tests.unit.environments.driving import Driver

from perdure.environments.local import LocalEnvironment


@pytest.fixture
async def driver(tmp_path: Path) -> AsyncGenerator[Driver]:
    root = tmp_path / "workspaces"
    environment = LocalEnvironment(root)
    yield Driver(environment, root)
    await environment.close()
