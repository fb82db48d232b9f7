"""How the tests of this folder drive an environment: short calls, text out, and waits on facts."""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from perdure.environments.local import LocalEnvironment
from perdure.ports.environment import Networking, ToolCall, ToolResult

DEADLINE_S = 10.0


@dataclass
class Driver:
    """One session of one environment."""

    environment: LocalEnvironment
    root: Path
    session: str = "s1"

    @property
    def folder(self) -> Path:
        return self.root / self.session

    async def call(
        self, name: str, *, networking: Networking = "none", call_timeout_ms: int = 20_000, **arguments: Any
    ) -> ToolResult:
        return await self.environment.run(
            ToolCall(
                session=self.session,
                name=name,
                arguments=arguments,
                networking=networking,
                timeout_ms=call_timeout_ms,
            )
        )

    async def bash(self, command: str, **more: Any) -> str:
        """Output of a command that succeeds."""
        return await self.ok("bash", command=command, **more)

    async def ok(self, name: str, **more: Any) -> str:
        result = await self.call(name, **more)
        assert not result.is_error, text_of(result)
        return text_of(result)

    async def error(self, name: str, **more: Any) -> str:
        result = await self.call(name, **more)
        assert result.is_error, text_of(result)
        return text_of(result)


def text_of(result: ToolResult) -> str:
    [block] = result.content
    assert block["type"] == "text"
    return block["text"]


async def until(observed: Callable[[], bool], what: str) -> None:
    """Poll a fact outside our process, which nothing in it could signal, until it holds."""
    deadline = time.monotonic() + DEADLINE_S
    while not observed():
        assert time.monotonic() < deadline, f"not within {DEADLINE_S} s: {what}"
        await asyncio.sleep(0)


def running_with(token: str) -> list[int]:
    """Pids of processes on this host whose command line holds `token`."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if token.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
    return found


def children_with(token: str) -> list[int]:
    """Pids below this test process whose command line holds `token`; another test run's are not ours to count."""
    found: list[int] = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if token in " ".join(child.cmdline()):
                found.append(child.pid)
    return found


def in_sessions_of(leaders: list[int]) -> list[int]:
    """Pids of live processes whose kernel session was begun by one of `leaders`."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.getsid(int(entry.name)) in leaders and b") Z " not in (entry / "stat").read_bytes():
                    found.append(int(entry.name))
            except (FileNotFoundError, ProcessLookupError):
                continue
    return found
