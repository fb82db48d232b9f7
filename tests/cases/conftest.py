"""One server for each module of cases, and for each test a clean script for its provider."""

import itertools
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, cast

import pytest
from tests.cases.driving import Site, open_site
from tests.conftest import TEMPLATE, connected, in_database

from perdure import bootstrap
from perdure.testing.stubs import StubEnvironment

_numbers = itertools.count(1)


@pytest.fixture(scope="module")
async def module_database_url(template_url: str) -> AsyncGenerator[str]:
    """A fresh database for a module's server."""
    name = f"cases_{next(_numbers)}"
    async with connected(template_url) as admin:
        await admin.execute(f"create database {name} template {TEMPLATE} strategy file_copy")
        yield in_database(template_url, name)
        await admin.execute(f"drop database {name} with (force)")


@pytest.fixture(scope="module")
async def module_site(
    module_database_url: str, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> AsyncGenerator[Site]:
    """The module's server. `STUB_TOOLS`, `CUTTING_LINE` and `SETTINGS` of the module say what it is like."""
    data: Path = tmp_path_factory.mktemp("cases")
    wishes: dict[str, Any] = vars(cast("object", request.module))  # pyright: ignore[reportUnknownMemberType]
    environment = StubEnvironment(data / "executions") if wishes.get("STUB_TOOLS") else None

    def stand_in(*_: object, **__: object) -> StubEnvironment | None:
        return environment

    with pytest.MonkeyPatch.context() as patch:
        if environment is not None:
            patch.setattr(bootstrap, "LocalEnvironment", stand_in)
        cutting, flags = bool(wishes.get("CUTTING_LINE")), wishes.get("SETTINGS", {})
        async with open_site(module_database_url, data, environment, cutting=cutting, **flags) as site:
            yield site


@pytest.fixture
async def site(module_site: Site) -> AsyncGenerator[Site]:
    """The module's server with an empty script; afterwards nothing that the test sent was refused by the provider."""
    module_site.base = len(module_site.models.requests)
    module_site.replies.clear()
    module_site.sessions.clear()
    module_site.models.respond_with(module_site.next_reply)
    yield module_site
    if module_site.environment is not None:
        module_site.environment.release()
    for session in module_site.sessions:
        await session.unfollow()
    module_site.check_provider()
