"""Claude models, through Anthropic's SDK and the streaming Messages API.

The SDK makes the call and types the refusals. The stream is read one level below its typed events: from the raw
server-sent events, since those keep pings (the connection is alive) and keep blocks we don't know exactly as they came.
"""

import asyncio
import importlib
import json
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final, cast

from perdure.models.anthropic_errors import BrokenStream, failure_of_status, failure_of_stream_error
from perdure.models.anthropic_stream import ReplyReader
from perdure.ports.model import Ended, ModelEvent, ModelFailed, ModelRequest

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic, AsyncStream
    from anthropic.types import RawMessageStreamEvent

OFFICIAL_BASE_URL: Final = "https://api.anthropic.com"

# A provider that can't be reached in this time is down or blocked; waiting longer only delays the recorded retry.
CONNECT_TIMEOUT_S: Final = 5.0

FAST_MODE_BETA: Final = "fast-mode-2026-02-01"

# What `output_config.effort` takes.
EFFORTS: Final = frozenset({"low", "medium", "high", "xhigh", "max"})


class AnthropicModel:
    """The provider `anthropic`. One client, made on first use, shared by all calls of this process."""

    def __init__(self, api_key: str, base_url: str | None = None, *, silence_s: float = 120.0) -> None:
        """`silence_s`: pings come every few seconds, so a connection that gives nothing for so long is dead."""
        self._silence_s = silence_s
        self._api_key = api_key
        # Always explicit: the SDK would otherwise take ANTHROPIC_BASE_URL, which points clients at this very server.
        self.base_url = base_url or OFFICIAL_BASE_URL
        self._client: AsyncAnthropic | None = None
        self._is_warm = False

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        """Make one call. See the port."""
        await self.warm()
        stream = await self._open(request)
        try:
            async with aclosing(self._read(stream)) as events:
                async for event in events:
                    yield event
        finally:
            await stream.close()

    async def warm(self) -> None:
        """Import the SDK, which takes seconds on a small machine: not in the loop, where leases are renewed."""
        if not self._is_warm:
            await asyncio.to_thread(importlib.import_module, "anthropic")
            self._is_warm = True

    async def close(self) -> None:
        """Close idle connections. Repeatable."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    def _connected(self) -> "AsyncAnthropic":
        if self._client is None:
            import anthropic
            import httpx2

            self._client = anthropic.AsyncAnthropic(
                api_key=self._api_key,
                base_url=self.base_url,
                max_retries=0,  # retries are steps of ours, on record
                timeout=httpx2.Timeout(self._silence_s, connect=CONNECT_TIMEOUT_S),
            )
        return self._client

    async def _open(self, request: ModelRequest) -> "AsyncStream[RawMessageStreamEvent]":
        """Send the request and wait for the answer's head."""
        import anthropic
        import httpx2

        client = self._connected()
        try:
            created = await cast("Any", client.messages.create)(**_parameters(request))
            return cast("AsyncStream[RawMessageStreamEvent]", created)
        except anthropic.APIStatusError as error:
            raise failure_of_status(error, now_s=time.time()) from error
        except anthropic.APIConnectionError as error:
            raise ModelFailed(
                "request_failed", f"anthropic can't be reached: {_cause(error)}", retryable=True
            ) from error
        except (
            anthropic.AnthropicError,
            httpx2.HTTPError,
            httpx2.InvalidURL,
            UnicodeError,
            ValueError,
            TypeError,
        ) as error:
            # Nothing was sent: the SDK couldn't build or write this request.
            raise ModelFailed(
                "request_failed", f"the request can't be sent: {_cause(error)}", retryable=False
            ) from error

    async def _read(self, stream: "AsyncStream[RawMessageStreamEvent]") -> AsyncGenerator[ModelEvent, None]:
        """The port's events until the reply is whole."""
        import anthropic
        import httpx2

        reader = ReplyReader()
        try:
            async for sent in anthropic.AsyncStream.raw_events(stream.response):
                data = _object(sent.data)
                if sent.event == "error" or data.get("type") == "error":
                    raise failure_of_stream_error(data, reader.usage)
                for event in reader.read(data):
                    yield event
                    if isinstance(event, Ended):
                        return
        except BrokenStream as error:
            raise ModelFailed("request_failed", str(error), retryable=error.retryable, usage=reader.usage) from error
        except (httpx2.HTTPError, httpx2.StreamError, UnicodeDecodeError) as error:
            message = f"the reply broke off: {_cause(error)}"
            raise ModelFailed("request_failed", message, retryable=True, usage=reader.usage) from error
        raise ModelFailed("request_failed", "the reply ended too early", retryable=True, usage=reader.usage)


def _parameters(request: ModelRequest) -> dict[str, Any]:
    """The SDK's arguments. Absent things are left out, not sent as null."""
    parameters: dict[str, Any] = {
        "model": request.model,
        "max_tokens": request.max_tokens,
        "messages": request.messages,
        "stream": True,
    }
    if request.system is not None and request.system.strip():
        parameters["system"] = request.system
    if request.tools:
        parameters["tools"] = request.tools
    if request.effort in EFFORTS:
        parameters["output_config"] = {"effort": request.effort}
    if request.speed == "fast":
        parameters["speed"] = "fast"
        parameters["extra_headers"] = {"anthropic-beta": FAST_MODE_BETA}
    return parameters


def _object(data: str) -> dict[str, Any]:
    """One event's data; an event without data is an empty object."""
    if not data:
        return {}
    try:
        value: object = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BrokenStream(f"the reply has an event that is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise BrokenStream("the reply has an event that is not a JSON object")
    return cast("dict[str, Any]", value)


def _cause(error: BaseException) -> str:
    """The innermost reason in words: the SDK's own message often says no more than that the connection failed."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error) or type(error).__name__
