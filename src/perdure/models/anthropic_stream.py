"""From the stream of a Messages reply to the port's events."""

import json
from collections.abc import Iterator
from typing import Any, Final, Literal, TypeAlias, cast

from perdure.models.anthropic_errors import BrokenStream
from perdure.models.strictness import TextFlow, clean_value, parse_arguments, within_levels
from perdure.ports.model import (
    BlockClosed,
    BlockDelta,
    BlockOpened,
    CallBlock,
    Ended,
    ModelBlock,
    ModelEvent,
    OpaqueBlock,
    Progress,
    StopReason,
    TextBlock,
    ThinkingBlock,
    Usage,
)

Json: TypeAlias = dict[str, Any]
Kind: TypeAlias = Literal["text", "thinking", "call", "opaque"]

_STOP_REASONS: Final[dict[str, StopReason]] = {
    "end_turn": "end_turn",
    "stop_sequence": "end_turn",
    "tool_use": "tool_use",
    "max_tokens": "max_tokens",
    "pause_turn": "pause_turn",
    "refusal": "refusal",
    "model_context_window_exceeded": "context_exceeded",
}

_KINDS: Final[dict[str, Kind]] = {
    "text": "text",
    "thinking": "thinking",
    "redacted_thinking": "thinking",
    "tool_use": "call",
}


class _OpenBlock:
    """A block whose end has not come yet."""

    def __init__(self, index: int, native: Json) -> None:
        self.index = index
        self.native = native
        self.kind: Kind = _KINDS.get(str(native.get("type")), "opaque")
        self.text = TextFlow()
        self._input_json: list[str] = []

    def take(self, delta: Json) -> str:
        """Add a delta; returns what of it is text to show."""
        match delta.get("type"):
            case "text_delta" if self.kind == "text":
                return self.text.feed(_string(delta, "text"))
            case "input_json_delta":
                self._input_json.append(_string(delta, "partial_json"))
            case "thinking_delta":
                self.native["thinking"] = str(self.native.get("thinking") or "") + _string(delta, "thinking")
            case "signature_delta":
                self.native["signature"] = str(self.native.get("signature") or "") + _string(delta, "signature")
            case _ if self.kind == "opaque":
                self._merge(delta)
            case _:
                pass  # citations of a text, or what a later version of the API adds to a block we know
        return ""

    def close(self) -> ModelBlock:
        """The complete block."""
        match self.kind:
            case "text":
                return TextBlock(self.text.whole())
            case "thinking":
                return self._thinking()
            case "call":
                identity, name = self.native.get("id"), self.native.get("name")
                if not isinstance(identity, str) or not isinstance(name, str):
                    raise BrokenStream("the reply has a tool call without id or name")
                return CallBlock(clean_value(identity), clean_value(name), self._arguments())
            case "opaque":
                if self._input_json:
                    self.native["input"] = self._arguments() or {}
                return OpaqueBlock(_bounded(self.native))

    def _arguments(self) -> Json | None:
        text = "".join(self._input_json)
        given: object = self.native.get("input")
        if text.strip() or not given:
            return parse_arguments(text)
        # Sent whole with the block's start; the same rules hold.
        return parse_arguments(json.dumps(given)) if within_levels(given) else None

    def _thinking(self) -> ThinkingBlock:
        cleaned = _bounded(self.native)
        proof = self.native.get("data" if self.native["type"] == "redacted_thinking" else "signature")
        # The signature covers the exact text: after a replacement it is worth nothing.
        return ThinkingBlock(native=cleaned, signed=bool(proof) and cleaned == self.native)

    def _merge(self, delta: Json) -> None:
        for key, value in delta.items():
            before: object = self.native.get(key)
            if key == "type":
                continue
            if isinstance(before, str) and isinstance(value, str):
                self.native[key] = before + value
            else:
                self.native[key] = value


class ReplyReader:
    """Folds the events of one reply. `usage` is what is known so far, also after a broken stream."""

    def __init__(self) -> None:
        self.usage = Usage()
        self._open: dict[int, _OpenBlock] = {}
        self._block_count = 0
        self._ended: Ended | None = None

    def read(self, data: Json) -> Iterator[ModelEvent]:
        """The port's events for one event of the provider. Raises `BrokenStream`."""
        match data.get("type"):
            case "content_block_start":
                yield from self._start(data)
            case "content_block_delta":
                yield self._delta(data)
            case "content_block_stop":
                yield from self._stop(data)
            case "message_start":
                self._note_usage(_mapping(data, "message").get("usage"))
                yield Progress(self.usage)
            case "message_delta":
                self._note_usage(data.get("usage"))
                self._note_stop(_mapping(data, "delta"))
                yield Progress(self.usage)
            case "message_stop":
                yield self._end()
            case _:
                yield Progress()

    def _start(self, data: Json) -> Iterator[ModelEvent]:
        key = _index(data)
        if key in self._open:
            raise BrokenStream(f"the reply begins block {key} twice")
        block = _OpenBlock(self._block_count, dict(_mapping(data, "content_block")))
        self._open[key] = block
        self._block_count += 1
        yield BlockOpened(block.index, block.kind)
        if block.kind == "text" and block.native.get("text"):
            shown = block.text.feed(_string(block.native, "text"))
            yield BlockDelta(block.index, shown)

    def _delta(self, data: Json) -> ModelEvent:
        block = self._opened(data)
        return BlockDelta(block.index, block.take(_mapping(data, "delta")))

    def _stop(self, data: Json) -> Iterator[ModelEvent]:
        block = self._opened(data)
        del self._open[_index(data)]
        if rest := block.text.finish():
            yield BlockDelta(block.index, rest)
        yield BlockClosed(block.index, block.close())

    def _opened(self, data: Json) -> _OpenBlock:
        key = _index(data)
        block = self._open.get(key)
        if block is None:
            raise BrokenStream(f"the reply continues block {key}, which is not open")
        return block

    def _note_usage(self, raw: object) -> None:
        """Take over the counts that are given: they are cumulative."""
        if not isinstance(raw, dict):
            return
        usage = cast("Json", raw)
        five_minutes = self.usage.cache_creation_5m_input_tokens
        one_hour = self.usage.cache_creation_1h_input_tokens
        split: object = usage.get("cache_creation")
        if isinstance(split, dict):
            five_minutes = _count(cast("Json", split), "ephemeral_5m_input_tokens", five_minutes)
            one_hour = _count(cast("Json", split), "ephemeral_1h_input_tokens", one_hour)
        # What the split does not account for was written with the default lifetime, five minutes.
        total = _count(usage, "cache_creation_input_tokens", five_minutes + one_hour)
        self.usage = Usage(
            input_tokens=_count(usage, "input_tokens", self.usage.input_tokens),
            output_tokens=_count(usage, "output_tokens", self.usage.output_tokens),
            cache_read_input_tokens=_count(usage, "cache_read_input_tokens", self.usage.cache_read_input_tokens),
            cache_creation_5m_input_tokens=max(five_minutes, total - one_hour),
            cache_creation_1h_input_tokens=one_hour,
        )

    def _note_stop(self, delta: Json) -> None:
        reason = delta.get("stop_reason")
        if reason is None:
            return
        if reason not in _STOP_REASONS:
            raise BrokenStream(f"the reply stopped for a reason that is not known here: {reason!r}", retryable=False)
        details: object = delta.get("stop_details")
        self._ended = Ended(
            stop_reason=_STOP_REASONS[reason],
            usage=self.usage,
            stop_details=_bounded(cast("Json", details)) if isinstance(details, dict) else None,
        )

    def _end(self) -> Ended:
        if self._ended is None:
            raise BrokenStream("the reply ended without a stop reason")
        if self._open:
            raise BrokenStream("the reply ended in the middle of a block")
        return self._ended


def _mapping(data: Json, key: str) -> Json:
    value: object = data.get(key)
    if not isinstance(value, dict):
        raise BrokenStream(f"the reply has a {data.get('type')} event without {key}")
    return cast("Json", value)


def _index(data: Json) -> int:
    value: object = data.get("index")
    if not isinstance(value, int):
        raise BrokenStream(f"the reply has a {data.get('type')} event without index")
    return value


def _string(data: Json, key: str) -> str:
    value: object = data.get(key)
    if not isinstance(value, str):
        raise BrokenStream(f"the reply has a {data.get('type')} without {key}")
    return value


def _count(data: Json, key: str, otherwise: int) -> int:
    value: object = data.get(key)
    return value if isinstance(value, int) and value >= 0 else otherwise


def _bounded(native: Json) -> Json:
    """A native block fit for the store."""
    if not within_levels(native):
        raise BrokenStream(f"the reply has a {native.get('type')} block that is nested too deep")
    return cast("Json", clean_value(native))
