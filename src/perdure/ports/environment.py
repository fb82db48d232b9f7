"""Where tools act: one workspace folder a session, and the calls made in it."""

from typing import Any, Literal, Protocol, TypeAlias

import msgspec

Networking: TypeAlias = Literal["unrestricted", "none"]


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call of a built-in tool. `arguments` is what the model sent; the tool validates it."""

    session: str
    """Names the workspace folder; lower-case letters, digits and `_` only."""
    name: str
    arguments: dict[str, Any]
    networking: Networking
    timeout_ms: int
    """The most this call may take, its own parameter included."""


class ToolResult(msgspec.Struct, frozen=True, kw_only=True):
    """What the model reads. `content` holds canonical blocks: text, image, document."""

    content: list[dict[str, Any]]
    is_error: bool = False


class EnvironmentUnavailable(Exception):
    """The tool can't run on this host. The message gives the reason and what to do."""


class Environment(Protocol):
    """Runs built-in tools."""

    async def run(self, call: ToolCall) -> ToolResult:
        """Run one call. A failing command is a result with `is_error`, never an exception.

        Cancelling the awaiting task kills the process tree before it returns. Raises `EnvironmentUnavailable` when the sandbox
        can't hold on this host.
        """
        ...

    async def destroy(self, session: str) -> None:
        """Kill what runs in the workspace and remove it. Repeatable."""
        ...

    async def problems(self) -> list[str]:
        """The self-test: why tools would be refused on this host; empty when they would run."""
        ...

    async def close(self) -> None:
        """Kill every shell of this process; the folders stay."""
        ...
