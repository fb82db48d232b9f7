"""A real small model on this machine, without key or network: SmolLM2-135M. It chats; it can't call tools.

The model runs in one child process, started on first use and again after it died. Nothing outlives us: the child ends
when the pipe to it closes.
"""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

from perdure.models.local_child import CONTEXT_TOKENS, SLOTS
from perdure.models.local_prompt import Chat, chat_of, fit
from perdure.models.strictness import TextFlow
from perdure.ports.model import (
    BlockClosed,
    BlockDelta,
    BlockOpened,
    Ended,
    ModelEvent,
    ModelFailed,
    ModelRequest,
    Progress,
    StopReason,
    TextBlock,
    Usage,
)

if TYPE_CHECKING:
    import httpx2

Json: TypeAlias = dict[str, Any]

LOCAL_MODEL: Final = "smollm2"

# A model of this size only repeats itself in longer replies.
REPLY_TOKENS_MAX: Final = 768

# Near the most likely word: the model is too small to be right by chance.
TEMPERATURE: Final = 0.1

# Loading takes about a second; a cold disk on a busy machine takes longer.
START_DEADLINE_S: Final = 60.0

CONNECT_TIMEOUT_S: Final = 5.0

# Whoever waits for a slot hears from us more often than any deadline on silence.
QUEUE_PROGRESS_S: Final = 5.0

_STOP_REASONS: Final[dict[str, StopReason]] = {"stop": "end_turn", "length": "max_tokens"}


class _Child:
    """One running child process and the client that talks to it."""

    def __init__(self, process: asyncio.subprocess.Process, client: "httpx2.AsyncClient") -> None:
        self.process = process
        self.client = client

    @property
    def alive(self) -> bool:
        return self.process.returncode is None

    async def end(self) -> None:
        await self.client.aclose()
        await _kill(self.process)


class LocalModel:
    """The provider `local`. At most one child process, and as many calls at once as that has slots; others wait."""

    def __init__(self, *, silence_s: float = 120.0) -> None:
        """`silence_s`: reading a full context takes well below two minutes on two slow cores; a child silent for longer hangs."""
        self._silence_s = silence_s
        self._child: _Child | None = None
        self._starting = asyncio.Lock()
        self._slots = asyncio.Semaphore(SLOTS)

    @property
    def child_pid(self) -> int | None:
        """The process that runs the model now, if one does."""
        return self._child.process.pid if self._child is not None and self._child.alive else None

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        """Make one call. See the port. Tools are ignored."""
        async with aclosing(self._wait_for_slot()) as waiting:
            async for event in waiting:
                yield event
        try:
            async with aclosing(self._reply(request)) as events:
                async for event in events:
                    yield event
        finally:
            self._slots.release()

    async def warm(self) -> None:
        """Start the child and load the weights."""
        with contextlib.suppress(ModelFailed, OSError):
            await self._running()

    async def close(self) -> None:
        """Kill the child. Repeatable; a later call starts another."""
        async with self._starting:
            child, self._child = self._child, None
            if child is not None:
                await child.end()

    async def _wait_for_slot(self) -> AsyncGenerator[ModelEvent, None]:
        while True:
            try:
                async with asyncio.timeout(QUEUE_PROGRESS_S):
                    await self._slots.acquire()
                return
            except TimeoutError:
                yield Progress()

    async def _reply(self, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        import httpx2

        child = await self._running()
        yield Progress()
        try:
            body = await _body(child.client, request)
            yield Progress()
            async with child.client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    raise _refused(response.status_code, (await response.aread()).decode("utf-8", "replace"))
                async with aclosing(_read(response)) as events:
                    async for event in events:
                        yield event
        except (httpx2.HTTPError, httpx2.StreamError) as error:
            if not isinstance(error, httpx2.TimeoutException):
                await self._give_up(child)
            reason = str(error) or type(error).__name__
            raise ModelFailed("request_failed", f"the local model broke off: {reason}", retryable=True) from error

    async def _running(self) -> _Child:
        """The living child; starts one when there is none. The lock keeps it at one."""
        async with self._starting:
            if self._child is not None and not self._child.alive:
                dead, self._child = self._child, None
                await dead.end()
            if self._child is None:
                self._child = await _start(self._silence_s)
            return self._child

    async def _give_up(self, child: _Child) -> None:
        """End a child whose connection broke: on loopback that means it died, though its exit may not be known yet."""
        async with self._starting:
            if self._child is child:
                self._child = None
                await child.end()


async def _start(silence_s: float) -> _Child:
    """Start a child and wait until it serves. A failed or cancelled start leaves no process."""
    import httpx2

    process = await asyncio.create_subprocess_exec(
        sys.executable,
        # Without the current folder among its modules: whatever lies there is not ours.
        "-P",
        "-m",
        "perdure.models.local_child",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        # Ctrl-C in a terminal is for us: what is being said may still be finished.
        start_new_session=True,
    )
    try:
        hello = await _hello(process)
    except BaseException:
        await _kill(process)
        raise
    client = httpx2.AsyncClient(
        base_url=hello["address"],
        headers={"authorization": f"Bearer {hello['key']}"},
        timeout=httpx2.Timeout(silence_s, connect=CONNECT_TIMEOUT_S),
        trust_env=False,  # a proxy has no business between us and our own child
    )
    return _Child(process, client)


async def _hello(process: asyncio.subprocess.Process) -> Json:
    """The child's line: where it serves, or why it doesn't."""
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_DEADLINE_S):
            line = await process.stdout.readline()
    except TimeoutError as error:
        message = f"the local model did not start within {START_DEADLINE_S:.0f} s"
        raise ModelFailed("request_failed", message, retryable=True) from error
    if not line:
        raise ModelFailed("request_failed", "the process of the local model died while it started", retryable=True)
    hello = cast("Json", json.loads(line))
    if "error" in hello:
        raise ModelFailed("request_failed", f"the local model can't start: {hello['error']}", retryable=False)
    return hello


async def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        try:
            process.kill()
        except ProcessLookupError:
            pass  # it ended in this moment
    if process.stdin is not None:
        process.stdin.close()
    await process.wait()


async def _body(client: "httpx2.AsyncClient", request: ModelRequest) -> Json:
    """The request as the child takes it, within its context."""
    reply_tokens_max = min(request.max_tokens, REPLY_TOKENS_MAX)

    async def count_tokens(chat: Chat) -> int:
        prompt = await _post(client, "/apply-template", {"messages": chat})
        tokens = await _post(client, "/tokenize", {"content": prompt["prompt"], "parse_special": True})
        return len(tokens["tokens"]) + 1

    chat = chat_of(request.system, request.messages)
    fitting, _ = await fit(chat, CONTEXT_TOKENS - reply_tokens_max, count_tokens)
    return {
        "messages": fitting,
        "max_tokens": reply_tokens_max,
        "temperature": TEMPERATURE,
        "cache_prompt": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def _post(client: "httpx2.AsyncClient", path: str, body: Json) -> Json:
    response = await client.post(path, json=body)
    if response.status_code != 200:
        raise _refused(response.status_code, response.text)
    return cast("Json", response.json())


def _refused(status: int, text: str) -> ModelFailed:
    message = f"the local model answered {status}: {text[:500]}"
    return ModelFailed("request_failed", message, retryable=status >= 500)


async def _read(response: "httpx2.Response") -> AsyncGenerator[ModelEvent, None]:
    """The chunks of a reply as the port's events: one block of text."""
    flow = TextFlow()
    stop: StopReason | None = None
    usage = Usage()
    yield BlockOpened(0, "text")
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            break
        chunk = _chunk(data)
        usage = _usage(chunk.get("usage")) or usage
        for choice in cast("list[Json]", chunk.get("choices") or []):
            reason = str(choice.get("finish_reason"))
            if reason in _STOP_REASONS:
                stop = _STOP_REASONS[reason]
            text = cast("Json", choice.get("delta") or {}).get("content")
            yield BlockDelta(0, flow.feed(text)) if isinstance(text, str) and text else Progress()
    if stop is None:
        raise ModelFailed("request_failed", "the local model's reply ended too early", retryable=True, usage=usage)
    if rest := flow.finish():
        yield BlockDelta(0, rest)
    yield BlockClosed(0, TextBlock(flow.whole()))
    yield Ended(stop_reason=stop, usage=usage)


def _chunk(data: str) -> Json:
    """One chunk. An error in the middle of a stream comes as a chunk too."""
    try:
        chunk: object = json.loads(data)
    except ValueError as error:
        raise ModelFailed("request_failed", "the local model sent a broken chunk", retryable=True) from error
    if not isinstance(chunk, dict) or "error" in chunk:
        raise ModelFailed("request_failed", f"the local model failed: {data[:500]}", retryable=True)
    return cast("Json", chunk)


def _usage(raw: object) -> Usage | None:
    if not isinstance(raw, dict):
        return None
    counts = cast("Json", raw)
    details = cast("Json", counts.get("prompt_tokens_details") or {})
    cached = int(details.get("cached_tokens") or 0)
    return Usage(
        input_tokens=max(0, int(counts.get("prompt_tokens") or 0) - cached),
        output_tokens=int(counts.get("completion_tokens") or 0),
        cache_read_input_tokens=cached,
    )
