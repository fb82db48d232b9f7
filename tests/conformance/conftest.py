"""One running server for the whole folder: sessions are independent, and each has its own script at the provider."""

from collections.abc import AsyncGenerator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from tests.conftest import TEMPLATE, connected, in_database

from perdure.testing.serving import Served, Told, serve
from perdure.testing.trail import broken_rules
from perdure.testing.wire_check import WireCheck

DATABASE = "conformance"


@pytest.fixture(scope="session")
async def running(template_url: str) -> AsyncGenerator[Served]:
    """The server."""
    async with connected(template_url) as admin:
        await admin.execute(f"create database {DATABASE} template {TEMPLATE} strategy file_copy")
        with TemporaryDirectory(prefix="perdure-conformance-") as data:
            async with serve(in_database(template_url, DATABASE), Path(data)) as served:
                yield served
        await admin.execute(f"drop database {DATABASE} with (force)")


@pytest.fixture(scope="session")
def wire_check() -> WireCheck:
    """The SDK's types."""
    return WireCheck()


@pytest.fixture
async def served(running: Served, wire_check: WireCheck) -> AsyncGenerator[Served]:
    """The server for one test. Afterwards every list of its sessions is checked, and the provider refused nothing."""
    requests, sessions = len(running.models.requests), len(running.made)
    yield running
    refused = [r.refused for r in running.models.requests[requests:] if r.refused is not None]
    assert refused == [], "the provider refused what it was sent"
    for told in running.made[sessions:]:
        await check_list(told, wire_check)


async def check_list(told: Told, wire_check: WireCheck) -> None:
    """What holds for every session: each event is what the SDK's types say, and the order obeys the grammar."""
    response = await told.served.call("GET", told.path)
    if response.status_code == 404:
        return
    status = response.json()["status"]
    assert wire_check.faults_of_session(response.json()) == []
    events = await told.events()
    assert wire_check.faults_of_events(events) == []
    assert broken_rules(events, ended=status in ("idle", "terminated")) == []
