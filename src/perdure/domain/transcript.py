"""The transcript: what the model provider needs back, and how it becomes the messages of the next call.

It is kept in causal order: each consumed input, then the output of its turn, before any later input.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal, TypeAlias
from uuid import UUID

import msgspec

from perdure.domain.turn import TurnOutcome

EntryKind: TypeAlias = Literal["input", "system", "model", "result", "answer", "denial", "note"]

Ending: TypeAlias = TurnOutcome | Literal["archived", "deleted"]
"""What ended a turn, in more words than its outcome has."""

_ENDINGS: Final[Mapping[Ending, str]] = {
    "interrupted": "The user interrupted the turn",
    "archived": "The session was archived",
    "deleted": "The session was deleted",
    "failed": "The turn ended with an error",
    "cancelled": "The turn was cancelled",
    "completed": "The turn ended",
    "refused": "The turn ended",
}

INTERRUPTED_TEXT: Final = "The user interrupted this call before it started."
AMBIGUOUS_TEXT: Final = (
    "The outcome of this call is unknown: it was started and its result was lost. It may have happened. "
    "It was not run again; check its effects before you repeat it."
)
STOPPED_TEXT: Final = "The user interrupted this call while it ran. Its outcome is unknown; it may have had effects."
FAILED_TEXT: Final = "This call failed. What it gave back follows."
CONTINUE_TEXT: Final = "Your reply was cut off by its output limit. Go on exactly where it stopped."
SYSTEM_OPEN: Final = "<system-message>\n"
SYSTEM_CLOSE: Final = "\n</system-message>"
OMITTED_TEXT: Final = "(no text)"
"""Stands for an input of which nothing remains that a provider would take."""


class TranscriptEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of the model's history, ordered by (`causal_pos`, `position`).

    An `input` or `system` entry refers to the event that carries the content (`ref_seq`); so do `answer` and `denial`, whose own body is
    the call's id. The others carry it themselves: `model` a list of native blocks, `result` one tool_result block, `note` one text.
    """

    session_id: UUID
    thread_id: UUID
    causal_pos: int
    position: int
    kind: EntryKind
    turn_id: UUID
    ref_seq: int | None
    body: bytes | None
    ref_body: bytes | None = None
    """The content of the event behind `ref_seq`; filled in by readers, never stored."""


def build_messages(entries: Iterable[TranscriptEntry]) -> list[dict[str, Any]]:
    """The messages of the next model call.

    Holds for any history the ledger can hold: roles alternate, the first message is the user's, no text is blank, each call is paired
    with exactly one result that opens the next user message, and thinking is as the provider signed it.

    MA-C5.5: the results of a round stand together at the head of one message, in the order of the calls.
    """
    messages: list[dict[str, Any]] = []
    for entry in entries:
        role, blocks = _blocks(entry)
        if not blocks:
            continue
        if messages and messages[-1]["role"] == role:
            messages[-1]["content"].extend(blocks)
        elif role == "assistant" and not messages:
            continue
        else:
            messages.append({"role": role, "content": blocks})
    return [_results_first(m) for m in messages]


def _blocks(entry: TranscriptEntry) -> tuple[str, list[dict[str, Any]]]:
    raw = entry.body if entry.kind in ("model", "result", "note") else entry.ref_body
    body: Any = msgspec.json.decode(raw) if raw is not None else {}
    if entry.kind in ("answer", "denial"):
        return "user", [_answer(msgspec.json.decode(entry.body or b'""', type=str), body)]
    if entry.kind == "model":
        return "assistant", list(body)
    if entry.kind == "result":
        return "user", [body]
    if entry.kind == "note":
        return "user", [{"type": "text", "text": body}]
    if entry.kind == "system":
        texts = [str(b["text"]) for b in body.get("content", ())]
        return "user", [{"type": "text", "text": SYSTEM_OPEN + "\n".join(texts) + SYSTEM_CLOSE}]
    blocks = [b for b in body.get("content", ()) if not is_blank(b)]
    return "user", blocks or [{"type": "text", "text": OMITTED_TEXT}]


def _answer(call_id: str, body: dict[str, Any]) -> dict[str, Any]:
    if body.get("result") == "deny":
        return msgspec.json.decode(text_result(call_id, denial_text(body.get("deny_message")), is_error=True))
    return msgspec.json.decode(tool_result(call_id, body.get("content") or [], is_error=bool(body.get("is_error"))))


def denial_text(message: str | None) -> str:
    """What the model reads when a client denied a call."""
    return f"The user denied this call: {message}" if message else "The user denied this call."


def unstarted_text(ending: Ending) -> str:
    """What becomes of a call that its turn's end left unstarted."""
    return INTERRUPTED_TEXT if ending == "interrupted" else f"{_ENDINGS[ending]} before this call was started."


def running_text(ending: Ending) -> str:
    """What becomes of a call that its turn's end cut off."""
    return STOPPED_TEXT if ending == "interrupted" else AMBIGUOUS_TEXT


def unanswered_text(ending: Ending, *, answered: bool) -> str:
    """What becomes of a call that a client owed an answer to, or gave one that nobody will read."""
    return f"{_ENDINGS[ending]} before {'the answer to this call was read' if answered else 'this call was answered'}."


def _results_first(message: dict[str, Any]) -> dict[str, Any]:
    """Providers want the results of a round before anything else the user says."""
    if message["role"] != "user":
        return message
    blocks = message["content"]
    results = [b for b in blocks if b["type"] == "tool_result"]
    return {"role": "user", "content": results + [b for b in blocks if b["type"] != "tool_result"]}


def is_blank(block: dict[str, Any]) -> bool:
    """Whether a block is text that says nothing (a provider refuses it)."""
    return block.get("type") == "text" and is_blank_text(str(block.get("text", "")))


_INVISIBLE: Final = dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff"))


def is_blank_text(text: str) -> bool:
    """Whether a text has nothing to read: white space and zero-width characters only."""
    return not text.translate(_INVISIBLE).strip()


def tool_result(call_id: str, content: list[dict[str, Any]], *, is_error: bool) -> bytes:
    """The body of a `result` entry."""
    block: dict[str, Any] = {"type": "tool_result", "tool_use_id": call_id}
    kept = [b for b in content if not is_blank(b)]
    if is_error and any(b.get("type") != "text" for b in kept):
        # A provider takes nothing but text beside `is_error`: a client's picture of a failure must not end its session.
        kept.insert(0, {"type": "text", "text": FAILED_TEXT})
    elif is_error:
        block["is_error"] = True
    if kept:
        block["content"] = kept
    return msgspec.json.encode(block)


def text_result(call_id: str, text: str, *, is_error: bool) -> bytes:
    """The body of a `result` entry that says one sentence."""
    return tool_result(call_id, [{"type": "text", "text": text}], is_error=is_error)
