"""What the scripted provider says: replies, failures, and the stream events they become."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final, TypeAlias

from perdure.ports.model import Usage
from perdure.testing.signals import Gate

Json: TypeAlias = dict[str, Any]

# Long enough that a sentence is a handful of deltas, short enough that most texts have more than one.
CHUNK_CHARS: Final = 16

_call_numbers = count(1)


@dataclass(frozen=True, slots=True)
class Text:
    """A text block. The empty text is a block that never gets content."""

    text: str


@dataclass(frozen=True, slots=True)
class Thinking:
    """A thinking block. Without a `signature` one is made from the text; the empty one sends none."""

    thinking: str
    signature: str | None = None

    def signed(self) -> str:
        """The signature that is sent."""
        if self.signature is not None:
            return self.signature
        return hashlib.sha256(self.thinking.encode("utf-8", "surrogatepass")).hexdigest()


@dataclass(frozen=True, slots=True)
class Redacted:
    """A redacted thinking block."""

    data: str


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call. A string as `input` is sent as it is, so that it can be cut or broken JSON."""

    name: str
    input: Json | str = field(default_factory=dict[str, Any])
    id: str = field(default_factory=lambda: f"toolu_{next(_call_numbers):024d}")

    def input_json(self) -> str:
        """The text that the input deltas add up to."""
        return self.input if isinstance(self.input, str) else json.dumps(self.input)


@dataclass(frozen=True, slots=True)
class Opaque:
    """Any other block, sent whole when it starts."""

    native: Json


Block: TypeAlias = Text | Thinking | Redacted | Call | Opaque


@dataclass(frozen=True, slots=True)
class Failure:
    """An error answer: as the HTTP response, or in the stream when a `Reply` carries it."""

    status: int
    type: str
    message: str
    retry_after: str | int | None = None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])

    def body(self) -> Json:
        """The provider's error object."""
        return {"type": "error", "error": {"type": self.type, "message": self.message}, "request_id": "req_scripted"}


class Reply:
    """One answer of the model.

    `gate` holds the reply before its first byte; `gate_after_blocks` maps a number of finished blocks to the gate that
    waits there. `cut_after` closes the socket, and `stall_after` goes silent, after so many deltas. `error` ends the
    stream, after its blocks, with an `error` event. `delay_ms` passes before each delta.
    """

    def __init__(
        self,
        *blocks: Block,
        stop_reason: str | None = None,
        stop_details: Json | None = None,
        usage: Usage | None = None,
        delay_ms: int = 0,
        chunk_chars: int = CHUNK_CHARS,
        gate: Gate | None = None,
        gate_after_blocks: Mapping[int, Gate] | None = None,
        cut_after: int | None = None,
        stall_after: int | None = None,
        error: Failure | None = None,
    ) -> None:
        assert chunk_chars >= 1
        self.blocks = blocks
        called = any(isinstance(block, Call) for block in blocks)
        self.stop_reason = stop_reason or ("tool_use" if called else "end_turn")
        self.stop_details = stop_details
        self.usage = usage
        self.delay_ms = delay_ms
        self.chunk_chars = chunk_chars
        self.gate = gate
        self.gate_after_blocks: Mapping[int, Gate] = gate_after_blocks or {}
        self.cut_after = cut_after
        self.stall_after = stall_after
        self.error = error


def message_of(reply: Reply, *, identity: str, model: str, input_tokens: int) -> Json:
    """The whole reply as one message, for a request that does not stream."""
    return {
        **_opening(identity, model),
        "content": [_whole(block) for block in reply.blocks],
        "stop_reason": reply.stop_reason,
        "stop_details": reply.stop_details,
        "usage": _usage(reply, input_tokens),
    }


def events_of(reply: Reply, *, identity: str, model: str, input_tokens: int) -> Iterator[Json]:
    """The reply as stream events, in order."""
    usage = _usage(reply, input_tokens)
    yield {"type": "message_start", "message": {**_opening(identity, model), "usage": {**usage, "output_tokens": 1}}}
    yield {"type": "ping"}
    for index, block in enumerate(reply.blocks):
        yield {"type": "content_block_start", "index": index, "content_block": _start(block)}
        for delta in _deltas(block, reply.chunk_chars):
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    if reply.error is not None:
        yield reply.error.body()
        return
    delta = {"stop_reason": reply.stop_reason, "stop_sequence": None, "stop_details": reply.stop_details}
    yield {"type": "message_delta", "delta": delta, "usage": usage}
    yield {"type": "message_stop"}


def _opening(identity: str, model: str) -> Json:
    return {
        "id": identity,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def _usage(reply: Reply, input_tokens: int) -> Json:
    spoken = sum(len(json.dumps(_whole(block))) for block in reply.blocks)
    usage = reply.usage or Usage(input_tokens=input_tokens, output_tokens=max(1, spoken // 4))
    return {
        "input_tokens": usage.input_tokens,
        "output_tokens": usage.output_tokens,
        "cache_read_input_tokens": usage.cache_read_input_tokens,
        "cache_creation_input_tokens": usage.cache_creation_5m_input_tokens + usage.cache_creation_1h_input_tokens,
        "cache_creation": {
            "ephemeral_5m_input_tokens": usage.cache_creation_5m_input_tokens,
            "ephemeral_1h_input_tokens": usage.cache_creation_1h_input_tokens,
        },
    }


def _whole(block: Block) -> Json:
    match block:
        case Text(text):
            return {"type": "text", "text": text}
        case Thinking(thinking):
            return {"type": "thinking", "thinking": thinking, "signature": block.signed()}
        case Redacted(data):
            return {"type": "redacted_thinking", "data": data}
        case Call(name, arguments, identity):
            whole = arguments if isinstance(arguments, dict) else {}
            return {"type": "tool_use", "id": identity, "name": name, "input": whole}
        case Opaque(native):
            return native


def _start(block: Block) -> Json:
    """The block as it opens, before any delta."""
    match block:
        case Text():
            return {"type": "text", "text": ""}
        case Thinking():
            return {"type": "thinking", "thinking": "", "signature": ""}
        case Call():
            return {**_whole(block), "input": {}}
        case Redacted() | Opaque():
            return _whole(block)


def _deltas(block: Block, chunk_chars: int) -> Iterator[Json]:
    match block:
        case Text(text):
            for chunk in _chunks(text, chunk_chars):
                yield {"type": "text_delta", "text": chunk}
        case Thinking(thinking):
            for chunk in _chunks(thinking, chunk_chars):
                yield {"type": "thinking_delta", "thinking": chunk}
            if block.signed():
                yield {"type": "signature_delta", "signature": block.signed()}
        case Call():
            yield {"type": "input_json_delta", "partial_json": ""}
            for chunk in _chunks(block.input_json(), chunk_chars):
                yield {"type": "input_json_delta", "partial_json": chunk}
        case Redacted() | Opaque():
            pass


def _chunks(text: str, chunk_chars: int) -> Iterator[str]:
    return (text[start : start + chunk_chars] for start in range(0, len(text), chunk_chars))
