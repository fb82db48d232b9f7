"""One running surface for each test that asks for it."""

from collections.abc import AsyncIterator

import pytest
from tests.unit.http.serving import Serving, serve


@pytest.fixture
async def serving() -> AsyncIterator[Serving]:
    async with serve() as running:
        yield running
