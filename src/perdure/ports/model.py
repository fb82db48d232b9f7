"""A model provider, as the core sees it: one request in, a stream of blocks out.

The adapter owns the provider's SDK and nothing else: no retries, no storage, no policy. Whoever iterates owns deadlines and
cancellation; closing the iterator closes the connection.
"""

from collections.abc import AsyncIterator
from typing import Any, Literal, Protocol, TypeAlias

import msgspec

StopReason: TypeAlias = Literal["end_turn", "tool_use", "max_tokens", "pause_turn", "refusal", "context_exceeded"]

FailureCode: TypeAlias = Literal[
    "overloaded",
    "rate_limited",
    "request_failed",
    "request_too_large",
    "billing",
    "authentication",
    "stalled",
    "refused",
]


class ModelRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One call. `messages` and `tools` have the Messages form, which is also our canonical one."""

    model: str
    """The provider's own name of the model, without our provider prefix."""
    system: str | None
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    max_tokens: int
    effort: str | None = None
    speed: str | None = None


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one or more calls. `input_tokens` excludes what was read from or written to a cache."""

    input_tokens: int = 0
    output_tokens: int = 0
    cache_read_input_tokens: int = 0
    cache_creation_5m_input_tokens: int = 0
    cache_creation_1h_input_tokens: int = 0

    def plus(self, other: "Usage") -> "Usage":
        """The sum, field by field."""
        return Usage(
            input_tokens=self.input_tokens + other.input_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
            cache_read_input_tokens=self.cache_read_input_tokens + other.cache_read_input_tokens,
            cache_creation_5m_input_tokens=self.cache_creation_5m_input_tokens + other.cache_creation_5m_input_tokens,
            cache_creation_1h_input_tokens=self.cache_creation_1h_input_tokens + other.cache_creation_1h_input_tokens,
        )


class TextBlock(msgspec.Struct, frozen=True, tag="text"):
    """Completed text. May be empty or blank: the core decides what of it is kept."""

    text: str


class ThinkingBlock(msgspec.Struct, frozen=True, tag="thinking"):
    """A completed thinking block as the provider sent it. Without a signature it must never be sent back."""

    native: dict[str, Any]
    signed: bool


class CallBlock(msgspec.Struct, frozen=True, tag="call"):
    """A tool call whose block ended. `arguments` is None when they are not one JSON object (cut off, or malformed)."""

    provider_call_id: str
    name: str
    arguments: dict[str, Any] | None


class OpaqueBlock(msgspec.Struct, frozen=True, tag="opaque"):
    """Any other block: replayed to the provider as it came, shown to nobody."""

    native: dict[str, Any]


ModelBlock: TypeAlias = TextBlock | ThinkingBlock | CallBlock | OpaqueBlock


class BlockOpened(msgspec.Struct, frozen=True):
    """Block `index` (0, 1, 2 ... in this reply) begins."""

    index: int
    kind: Literal["text", "thinking", "call", "opaque"]


class BlockDelta(msgspec.Struct, frozen=True):
    """More text of block `index`. Sent for text blocks; a delta of any other kind is a bare sign of progress."""

    index: int
    text: str


class BlockClosed(msgspec.Struct, frozen=True):
    """Block `index` is complete."""

    index: int
    block: ModelBlock


class Progress(msgspec.Struct, frozen=True):
    """Bytes arrived that are no content (a ping). The connection is alive."""

    usage: Usage | None = None
    """All that the call has used so far, when they told it."""


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """The reply is whole. A stream that ends without it was cut, and the adapter raises `ModelFailed`."""

    stop_reason: StopReason
    usage: Usage
    stop_details: dict[str, Any] | None = None


ModelEvent: TypeAlias = BlockOpened | BlockDelta | BlockClosed | Progress | Ended


class ModelFailed(Exception):
    """The provider refused, failed or vanished. `retryable` says whether the same request may succeed later."""

    def __init__(
        self,
        code: FailureCode,
        message: str,
        *,
        retryable: bool,
        retry_after_ms: int | None = None,
        usage: Usage | None = None,
    ) -> None:
        super().__init__(message)
        self.code: FailureCode = code
        self.message = message
        self.retryable = retryable
        self.retry_after_ms = retry_after_ms
        self.usage = usage


class ModelUnknown(Exception):
    """No provider serves this model here. The message says what to set."""


class Model(Protocol):
    """One provider."""

    def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
        """Make one call, without retries. Raises `ModelFailed`; after it, or after `Ended`, nothing follows."""
        ...

    async def warm(self) -> None:
        """Do now what the first call would wait for: load a library, start a child. Never raises for want of a provider."""
        ...

    async def close(self) -> None:
        """Release connections and child processes."""
        ...


class ModelRouter(Protocol):
    """Which provider serves a model."""

    def check(self, model: str) -> None:
        """Raise `ModelUnknown` unless this process could call `model` now (a provider is configured, its key is set)."""
        ...

    def resolve(self, model: str) -> tuple[Model, str]:
        """The provider and its own name of the model. Raises `ModelUnknown` like `check`."""
        ...

    async def close(self) -> None:
        """Close every provider that was used."""
        ...
