"""The scripted provider, one for each test, and an adapter that talks to it."""

from collections.abc import AsyncIterator

import pytest

from perdure.models.anthropic import AnthropicModel
from perdure.testing.model_server import ModelServer


@pytest.fixture
async def server() -> AsyncIterator[ModelServer]:
    started = await ModelServer.start()
    yield started
    await started.close()


@pytest.fixture
async def model(server: ModelServer) -> AsyncIterator[AnthropicModel]:
    adapter = AnthropicModel("sk-test", server.base_url)
    yield adapter
    await adapter.close()
