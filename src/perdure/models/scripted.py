"""A model that does what the prompt says, for demonstrations and for trying out an installation without any key.

Directives stand in the last user text, inline or one a line; whatever is around them is ignored. Without any, the model
answers `You said: ...`.

    [[say: text]]                      a text block
    [[slow: text @ 20ms]]              a text block, word by word with that pause (50ms without `@`)
    [[think: text]]                    a thinking block
    [[call: bash {"command": "ls"}]]   a tool call; several make one reply with several calls; broken JSON stays broken
    [[then]]                           what follows is said after the results of the calls before it came back
    [[wait: 500ms]]                    silence; also 2s, 1m
    [[stop: max_tokens]]               end the reply for this reason
    [[refuse]]                         end the reply as a refusal
    [[fail: overloaded]]               fail here, with any failure code of a provider
    [[fail: rate_limited 2s]]          the same, asking the caller to wait before the next try

When the results of the calls are back and nothing is left to do, it ends with a short text about each result.

It keeps no state: the same request always gets the same reply, so a failure fails each time. How far a script got is
read from the messages: each user message of tool results after the last user text is one finished round.
"""

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Iterator
from typing import Any, Final, TypeAlias, cast, get_args

import msgspec

from perdure.domain.transcript import SYSTEM_OPEN
from perdure.models.strictness import clean_text, parse_arguments
from perdure.ports.model import (
    BlockClosed,
    BlockDelta,
    BlockOpened,
    CallBlock,
    Ended,
    FailureCode,
    ModelEvent,
    ModelFailed,
    ModelRequest,
    Progress,
    StopReason,
    TextBlock,
    ThinkingBlock,
    Usage,
)

Json: TypeAlias = dict[str, Any]

SLOW_PAUSE_MS: Final = 50

# Below the deadline of a turn without progress; a longer silence is asked for by mistake.
WAIT_MS_MAX: Final = 10 * 60 * 1000

# Enough of a tool's result to recognise it.
RESULT_CHARS_MAX: Final = 200

_RETRYABLE: Final = frozenset({"overloaded", "rate_limited", "request_failed", "stalled"})
_OPENING = re.compile(r"\[\[(say|slow|think|call|then|wait|stop|refuse|fail)\b\s*(:?)\s*")
_CALL_NAME = re.compile(r"([A-Za-z0-9_-]{1,128})\s*")
_SLOW = re.compile(r"(.*)@\s*(\d+\s*(?:ms|s|m)?)\s*", re.DOTALL)
_DURATION = re.compile(r"(\d{1,9})\s*(ms|s|m)?")
_WORD = re.compile(r"\s*\S+|\s+")
_UNIT_MS: Final = {"ms": 1, "s": 1000, "m": 60_000, None: 1}


class _Say(msgspec.Struct, frozen=True, tag="say"):
    text: str
    pause_ms: int = 0


class _Think(msgspec.Struct, frozen=True, tag="think"):
    text: str


class _Call(msgspec.Struct, frozen=True, tag="call"):
    name: str
    arguments: Json | None


class _Wait(msgspec.Struct, frozen=True, tag="wait"):
    wait_ms: int


class _Stop(msgspec.Struct, frozen=True, tag="stop"):
    reason: StopReason


class _Fail(msgspec.Struct, frozen=True, tag="fail"):
    code: FailureCode
    retry_after_ms: int | None


class _Then(msgspec.Struct, frozen=True, tag="then"):
    pass


_Directive: TypeAlias = _Say | _Think | _Call | _Wait | _Stop | _Fail | _Then


class ScriptedModel:
    """The provider `scripted`. Any model name will do."""

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        """Play the script. See the port."""
        script = _directives_for(request)
        input_tokens = _words(request.system or "") + sum(_words(_text_of(m)) for m in request.messages)
        spoken = 0
        stop: StopReason = "end_turn"
        calls = _call_count(request.messages)
        index = 0
        yield Progress()
        for directive in script:
            match directive:
                case _Say(text, pause_ms):
                    yield BlockOpened(index, "text")
                    for word in _WORD.findall(text):
                        await asyncio.sleep(pause_ms / 1000)
                        yield BlockDelta(index, word)
                    yield BlockClosed(index, TextBlock(text))
                    spoken += _words(text)
                case _Think(text):
                    yield BlockOpened(index, "thinking")
                    # Unsigned: no provider may ever be shown it as its own.
                    yield BlockClosed(index, ThinkingBlock({"type": "thinking", "thinking": text}, signed=False))
                    spoken += _words(text)
                case _Call(name, arguments):
                    yield BlockOpened(index, "call")
                    yield BlockClosed(index, CallBlock(f"toolu_scripted_{calls:06d}", name, arguments))
                    calls += 1
                    spoken += _words(json.dumps(arguments))
                    stop = "tool_use"
                case _Wait(wait_ms):
                    await asyncio.sleep(wait_ms / 1000)
                    yield Progress()
                    continue
                case _Stop(reason):
                    stop = reason
                    break
                case _Fail():
                    usage = Usage(input_tokens=input_tokens, output_tokens=spoken)
                    raise _failure(directive, usage)
                case _Then():
                    continue
            index += 1
        yield Ended(stop_reason=stop, usage=Usage(input_tokens=input_tokens, output_tokens=spoken))

    async def warm(self) -> None:
        """Nothing to prepare."""

    async def close(self) -> None:
        """Nothing to release."""


def _failure(directive: _Fail, usage: Usage) -> ModelFailed:
    return ModelFailed(
        directive.code,
        f"the script asked for the failure {directive.code!r}",
        retryable=directive.code in _RETRYABLE,
        retry_after_ms=directive.retry_after_ms,
        usage=usage,
    )


def _directives_for(request: ModelRequest) -> list[_Directive]:
    """What this request asks for now: the round that its messages have not been through."""
    at, text = _last_user_text(request.messages)
    rounds_done = sum(_has_results(message) for message in request.messages[at + 1 :])
    script = list(_parse(text))
    if not script:
        if rounds_done:
            return [_summary(request.messages)]
        return [_Say(f"You said: {text.strip() or '(no text)'}")]
    rounds: list[list[_Directive]] = [[]]
    for directive in script:
        if isinstance(directive, _Then):
            rounds.append([])
        else:
            rounds[-1].append(directive)
    if rounds_done < len(rounds):
        return rounds[rounds_done]
    return [_summary(request.messages)]


def _last_user_text(messages: list[Json]) -> tuple[int, str]:
    """The position of the last user message that has text, and the last text in it; (-1, "") without one.

    What was said before an interrupt or an error stands in the same message, and is not asked for again.
    """
    for at in range(len(messages) - 1, -1, -1):
        if messages[at].get("role") != "user":
            continue
        texts = [str(b.get("text", "")) for b in _blocks(messages[at]) if b.get("type") == "text"]
        said = [t for t in texts if t.strip() and not t.startswith(SYSTEM_OPEN)]
        if said:
            return at, said[-1]
    return -1, ""


def _blocks(message: Json) -> list[Json]:
    content: object = message.get("content")
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return cast("list[Json]", content) if isinstance(content, list) else []


def _text_of(message: Json) -> str:
    return "\n".join(str(block.get("text", "")) for block in _blocks(message) if block.get("type") == "text")


def _has_results(message: Json) -> bool:
    return message.get("role") == "user" and any(block.get("type") == "tool_result" for block in _blocks(message))


def _call_count(messages: list[Json]) -> int:
    return sum(block.get("type") == "tool_use" for message in messages for block in _blocks(message))


def _words(text: str) -> int:
    return len(text.split())


def _summary(messages: list[Json]) -> _Say:
    """A line for each result of the last round."""
    names = {b.get("id"): b.get("name") for m in messages for b in _blocks(m) if b.get("type") == "tool_use"}
    last = next(message for message in reversed(messages) if _has_results(message))
    lines: list[str] = []
    for block in _blocks(last):
        if block.get("type") != "tool_result":
            continue
        text = " ".join(_text_of(block).split())
        short = text if len(text) <= RESULT_CHARS_MAX else text[:RESULT_CHARS_MAX] + " ..."
        verb = "failed" if block.get("is_error") else "answered"
        lines.append(f"{names.get(block.get('tool_use_id'), 'A tool')} {verb}: {short or '(nothing)'}")
    return _Say(clean_text("\n".join(lines)))


def _parse(text: str) -> Iterator[_Directive]:
    """The directives of a text, in order. One that can't be read becomes a text that says why."""
    position = 0
    while (opening := _OPENING.search(text, position)) is not None:
        word, start = opening[1], opening.end()
        if word == "call" and (called := _parse_call(text, start)) is not None:
            directive, position = called
            yield directive
            continue
        end = text.find("]]", start)
        if end < 0:
            yield _Say(f"I can't read [[{word}: it is not closed by ]].")
            return
        position = end + 2
        yield _parse_simple(word, text[start:end].strip())


def _parse_call(text: str, start: int) -> tuple[_Call, int] | None:
    """A whole call, whose JSON may contain `]]`; None when the JSON is broken."""
    name = _CALL_NAME.match(text, start)
    if name is None:
        return None
    try:
        _, end = json.JSONDecoder().raw_decode(text, name.end())
    except (ValueError, RecursionError):
        return None
    closing = re.compile(r"\s*\]\]").match(text, end)
    if closing is None:
        return None
    return _Call(name[1], parse_arguments(text[name.end() : end])), closing.end()


def _parse_simple(word: str, rest: str) -> _Directive:
    match word:
        case "say":
            return _Say(rest)
        case "slow":
            found = _SLOW.fullmatch(rest)
            if found is None:
                return _Say(rest, SLOW_PAUSE_MS)
            return _Say(found[1].strip(), _duration_ms(found[2].strip()) or 0)
        case "think":
            return _Think(rest)
        case "then":
            return _Then()
        case "refuse":
            return _Stop("refusal")
        case "wait":
            wait_ms = _duration_ms(rest)
            return _unreadable(word, "say how long, like 500ms or 2s") if wait_ms is None else _Wait(wait_ms)
        case "stop":
            reasons = get_args(StopReason)
            return _Stop(cast("StopReason", rest)) if rest in reasons else _unreadable(word, f"use one of {reasons}")
        case "call":
            name = _CALL_NAME.match(rest)
            if name is None:
                return _unreadable(word, 'write a tool and its arguments, like bash {"command": "ls"}')
            return _Call(name[1], parse_arguments(rest[name.end() :]))
        case _:
            return _parse_fail(rest)


def _parse_fail(rest: str) -> _Directive:
    code, _, wait = rest.partition(" ")
    if code not in get_args(FailureCode):
        return _unreadable("fail", f"use one of {get_args(FailureCode)}")
    return _Fail(cast("FailureCode", code), _duration_ms(wait.strip()))


def _unreadable(word: str, hint: str) -> _Say:
    return _Say(f"I can't read the directive [[{word}]]: {hint}.")


def _duration_ms(text: str) -> int | None:
    found = _DURATION.fullmatch(text)
    if found is None:
        return None
    return min(int(found[1]) * _UNIT_MS[found[2]], WAIT_MS_MAX)
