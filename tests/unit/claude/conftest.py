from collections.abc import AsyncIterator

import pytest
from tests.unit.claude.face import Face


@pytest.fixture
async def face() -> AsyncIterator[Face]:
    made = Face()
    yield made
    await made.close()
