"""A model's reply, from blocks to what the ledger keeps: public items, judged calls, and the history to send back.

Nothing that a provider would refuse gets into the history: no blank text, no unsigned thinking, no call without an object for its
arguments or with a name outside the allowed characters.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, Final
from uuid import UUID

import msgspec

from perdure.domain.agent import Judged
from perdure.domain.event import encode
from perdure.domain.item import call_id, item_id
from perdure.domain.transcript import is_blank_text
from perdure.ports.ledger import CallPlan, OutBlock
from perdure.ports.model import CallBlock, ModelBlock, OpaqueBlock, StopReason, TextBlock, ThinkingBlock

CALLS_MAX: Final = 64
"""Calls of one reply; more is a model running wild, and each costs a row and a result."""

_NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,128}")
_UNNAMED: Final = "invalid_tool_name"
_CUT: Final = (
    "The arguments of this call were cut off or are not one JSON object. The call was not run; send it again, complete."
)
_TOO_MANY: Final = f"A reply may hold at most {CALLS_MAX} calls. This one was not run."

Judge = Callable[[str, dict[str, Any]], Judged]


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a reply that the ledger takes."""

    blocks: tuple[OutBlock, ...]
    calls: tuple[CallPlan, ...]
    transcript: bytes | None


class Place(msgspec.Struct, frozen=True):
    """Where a reply comes from; fixes the ids of its items."""

    turn_id: UUID
    ordinal: int
    try_no: int

    def item(self, block: int) -> UUID:
        """The id of a block's item."""
        return item_id(self.turn_id, self.ordinal, self.try_no, block)


def assemble(
    place: Place, blocks: Sequence[tuple[int, ModelBlock]], judge: Judge, *, stop_reason: StopReason | None
) -> Reply:
    """Sort the completed blocks of a reply, in order.

    A refused reply leaves no history. A reply that met its output limit in a call was cut there, however whole the call looks.
    """
    refused = stop_reason == "refusal"
    last = blocks[-1][0] if blocks and stop_reason == "max_tokens" else None
    public: list[OutBlock] = []
    calls: list[CallPlan] = []
    native: list[dict[str, Any]] = []
    for index, block in blocks:
        match block:
            case TextBlock():
                if not is_blank_text(block.text):
                    text = {"type": "text", "text": block.text}
                    public.append(OutBlock(index=index, kind="message", body=encode({"content": [text]})))
                    native.append(text)
            case ThinkingBlock():
                public.append(OutBlock(index=index, kind="thinking", body=b"{}"))
                if block.signed:
                    native.append(block.native)
            case CallBlock() if not refused:
                if index == last:
                    block = CallBlock(block.provider_call_id, block.name, None)
                calls.append(_plan(index, block, judge, full=len(calls) >= CALLS_MAX))
                native.append(_native_call(place.item(index), block))
            case OpaqueBlock():
                native.append(block.native)
            case CallBlock():
                pass
    speaks = any(b["type"] not in ("thinking", "redacted_thinking") for b in native)
    return Reply(
        blocks=tuple(public), calls=tuple(calls), transcript=encode(native) if speaks and not refused else None
    )


def _native_call(item: UUID, block: CallBlock) -> dict[str, Any]:
    return {
        "type": "tool_use",
        "id": call_id(item),
        "name": block.name if _NAME.fullmatch(block.name) else _UNNAMED,
        "input": block.arguments if block.arguments is not None else {},
    }


def _plan(index: int, block: CallBlock, judge: Judge, *, full: bool) -> CallPlan:
    name = block.name if _NAME.fullmatch(block.name) else _UNNAMED
    body = encode({"name": name, "input": block.arguments if block.arguments is not None else {}})
    if full or block.arguments is None:
        return CallPlan(index=index, name=name, owner="refused", body=body, error=_TOO_MANY if full else _CUT)
    judged = judge(name, block.arguments)
    return CallPlan(
        index=index,
        name=name,
        owner=judged.owner,
        body=body,
        on_lost=judged.on_lost,
        error=judged.error or "",
        policy=judged.policy,
        serial=judged.serial,
    )
