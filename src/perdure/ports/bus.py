"""The live plane: hints that something changed, and previews of text. Losing all of it costs latency only."""

from collections.abc import Callable
from typing import Literal, Protocol, TypeAlias
from uuid import UUID

import msgspec


class PreviewStarted(msgspec.Struct, frozen=True, kw_only=True):
    """An item began to appear."""

    session_id: UUID
    thread_id: UUID
    item_id: UUID
    kind: Literal["message", "thinking"]


class PreviewDelta(msgspec.Struct, frozen=True, kw_only=True):
    """More text of an item: code points `offset` to `offset + len(text)` of it."""

    session_id: UUID
    thread_id: UUID
    item_id: UUID
    offset: int
    text: str


Preview: TypeAlias = PreviewStarted | PreviewDelta


class Hint(msgspec.Struct, frozen=True, kw_only=True):
    """A session changed in another process: read again."""

    session_id: UUID
    thread_id: UUID | None = None
    """A thread with a wakeup, if that is what changed."""
    stop: bool = False


class Bus(Protocol):
    """Carries hints between processes and previews within one."""

    def publish(self, hint: Hint) -> None:
        """Tell the other processes, soon; never waits."""
        ...

    def preview(self, preview: Preview) -> None:
        """Show a piece of text to whoever watches in this process; never waits."""
        ...

    def on_hint(self, receive: Callable[[Hint], None]) -> None:
        """Call `receive` for every hint that comes in."""
        ...

    def on_preview(self, receive: Callable[[Preview], None]) -> None:
        """Call `receive` for every preview."""
        ...
