"""Text for a terminal: nothing that a model or a tool said may steer it, and long things are cut."""

import json
import re
from typing import Any, Final

DETAIL_CHARS_MAX: Final = 160
"""Two lines of a usual terminal."""

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_SPACE = re.compile(r"\s+")


def harmless(text: str) -> str:
    """The text without control characters, escape sequences and reversed writing; line breaks and tabs stay."""
    return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text.replace("\r\n", "\n"))


def one_line(text: str, chars_max: int = DETAIL_CHARS_MAX) -> str:
    """The text in one harmless line, cut where it gets long."""
    flat = harmless(_SPACE.sub(" ", text).strip())
    return flat if len(flat) <= chars_max else flat[: chars_max - 1] + "\N{HORIZONTAL ELLIPSIS}"


def compact(value: Any) -> str:
    """JSON without blanks, for arguments."""
    return json.dumps(value, ensure_ascii=False, separators=(", ", ": "))


def text_of(content: Any) -> str:
    """The text of content blocks; what is no text is named by its type."""
    if not isinstance(content, list):
        return ""
    parts: list[str] = []
    for block in content:  # pyright: ignore[reportUnknownVariableType]
        if isinstance(block, dict):
            kind: Any = block.get("type")  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
            parts.append(str(block.get("text", "")) if kind == "text" else f"[{kind}]")  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
    return "\n".join(parts)
