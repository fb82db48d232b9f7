"""Random outcomes of steps, in the form in which a performer reports them: replies, failures, results, stops."""

from random import Random
from typing import Any, Final

import msgspec

from perdure.domain.event import encode
from perdure.domain.item import call_id, item_id
from perdure.domain.step import Step
from perdure.domain.transcript import tool_result
from perdure.ports.ledger import (
    CallPlan,
    ModelErred,
    ModelReplied,
    OutBlock,
    StepOutcome,
    Stopped,
    ToolReturned,
)
from perdure.ports.model import StopReason, Usage

_ENDINGS: Final[tuple[StopReason, ...]] = ("end_turn",) * 8 + ("max_tokens", "pause_turn", "refusal")
_SHAPES: Final = (("text",), ("text",), ("thinking", "text"), (), ("thinking",), ("text", "thinking", "text"))
_CALL_SHAPES: Final = (
    ("server",),
    ("read",),
    ("text", "server", "server"),
    ("server", "read", "text", "server", "server", "server"),
    ("thinking", "custom"),
    ("custom", "custom"),
    ("ask",),
    ("ask", "text", "custom"),
    ("custom", "ask", "server"),
    ("refused",),
    ("text", "refused", "server"),
    ("ask", "custom", "ask", "custom"),
)


class Mix(msgspec.Struct, frozen=True):
    """How often a reply asks for calls, and how often a model call fails."""

    calls: float = 0.4
    retryable: float = 0.1
    permanent: float = 0.02
    silent_tools: bool = False
    """Only calls that run here: no answers are owed."""


def random_outcome(rng: Random, step: Step, mix: Mix) -> StepOutcome:
    """What a dispatched step may give."""
    if step.kind != "model":
        return random_result(rng, step)
    dice = rng.random()
    if dice < mix.permanent:
        return _erred(rng, step, retryable=False)
    if dice < mix.permanent + mix.retryable:
        return _erred(rng, step, retryable=True)
    return random_reply(rng, step, mix)


def random_reply(rng: Random, step: Step, mix: Mix) -> ModelReplied:
    """A whole reply: blocks, and calls of every owner among them."""
    calling = rng.random() < mix.calls
    shape = rng.choice(_CALL_SHAPES if calling else _SHAPES)
    if mix.silent_tools:
        shape = tuple("server" if kind in ("ask", "custom") else kind for kind in shape)
    blocks, calls, native = _parts(rng, step, shape)
    cut = bool(calls) and all(c.owner == "refused" for c in calls) and rng.random() < 0.7
    stop: StopReason = ("max_tokens" if cut else "tool_use") if calls else rng.choice(_ENDINGS)
    refused = stop == "refusal"
    speaks = any(b["type"] != "thinking" for b in native)
    return ModelReplied(
        step_id=step.id,
        blocks=blocks,
        calls=calls,
        transcript=encode(native) if speaks and not refused else None,
        stop_reason=stop,
        stop_details=encode({"category": "policy"}) if refused and rng.random() < 0.5 else None,
        usage=_usage(rng),
    )


def random_stop(rng: Random, step: Step) -> Stopped:
    """A step cancelled by an interrupt: what was completed of a reply comes with it."""
    if step.kind != "model":
        return Stopped(step_id=step.id)
    shape = rng.choice((*_SHAPES, *_CALL_SHAPES))
    blocks, calls, native = _parts(rng, step, shape)
    speaks = any(b["type"] != "thinking" for b in native)
    return Stopped(
        step_id=step.id,
        blocks=blocks,
        calls=calls,
        transcript=encode(native) if speaks else None,
        usage=_usage(rng) if rng.random() < 0.5 else None,
    )


def random_result(rng: Random, step: Step) -> ToolReturned:
    """A tool's result."""
    assert step.item_id is not None
    is_error = rng.random() < 0.2
    content: list[dict[str, Any]] = [{"type": "text", "text": f"result {rng.randrange(1000)}"}]
    return ToolReturned(
        step_id=step.id,
        body=encode({"content": content, "is_error": is_error}),
        transcript=tool_result(call_id(step.item_id), content, is_error=is_error),
        is_error=is_error,
    )


def _erred(rng: Random, step: Step, *, retryable: bool) -> ModelErred:
    return ModelErred(
        step_id=step.id,
        code="model_overloaded_error" if retryable else "authentication_error",
        message="The provider said no.",
        retryable=retryable,
        retry_after_ms=rng.choice((None, None, 50, 90_000)),
        usage=_usage(rng) if rng.random() < 0.3 else None,
    )


def _usage(rng: Random) -> Usage:
    return Usage(input_tokens=rng.randrange(50), output_tokens=rng.randrange(50), cache_read_input_tokens=1)


def _parts(
    rng: Random, step: Step, shape: tuple[str, ...]
) -> tuple[tuple[OutBlock, ...], tuple[CallPlan, ...], list[dict[str, Any]]]:
    blocks: list[OutBlock] = []
    calls: list[CallPlan] = []
    native: list[dict[str, Any]] = []
    for index, kind in enumerate(shape):
        if kind == "text":
            text = {"type": "text", "text": f"words {rng.randrange(1000)}"}
            blocks.append(OutBlock(index=index, kind="message", body=encode({"content": [text]})))
            native.append(text)
        elif kind == "thinking":
            blocks.append(OutBlock(index=index, kind="thinking", body=b"{}"))
            native.append({"type": "thinking", "thinking": "hm", "signature": "s"})
        else:
            call = _call(rng, index, kind)
            calls.append(call)
            identity = call_id(item_id(step.turn_id, step.ordinal, step.try_no, index))
            native.append({"type": "tool_use", "id": identity, "name": call.name, "input": {}})
    return tuple(blocks), tuple(calls), native


def _call(rng: Random, index: int, kind: str) -> CallPlan:
    harmless = kind == "read" or (kind == "ask" and rng.random() < 0.3)
    name = {"read": "read", "custom": "weather"}.get(kind, "bash")
    return CallPlan(
        index=index,
        name=name,
        owner="server" if kind == "read" else kind,  # pyright: ignore[reportArgumentType]
        body=encode({"name": name, "input": {}}),
        on_lost="repeat" if harmless else "ambiguous",
        error="This call can't run." if kind == "refused" else "",
        policy="always_ask" if kind == "ask" else None,
        serial=name == "bash" and rng.random() < 0.7,
    )
