"""Log lines: what happens when they can't be written."""

import io
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from perdure import telemetry
from perdure.cli.serving import say


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    yield monkeypatch
    structlog.reset_defaults()


@pytest.mark.parametrize("json", [True, False])
@pytest.mark.parametrize("state", ["full", "closed"])
def test_line_that_can_not_be_written_fails_nobody(configured: pytest.MonkeyPatch, json: bool, state: str) -> None:
    """A supervised loop says what went wrong, and must outlive the saying."""
    with io.TextIOWrapper(Path("/dev/full").open("wb", buffering=0), write_through=True) as file:
        configured.setattr(sys, "stderr", file)
        telemetry.configure(json=json)
        if state == "closed":
            file.close()
        telemetry.logger("test").error("loop_failed", error="the disk is full")
        say("Starting ...")
