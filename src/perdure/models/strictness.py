"""The border for what a model wrote: text that every store can hold, arguments that are one plain JSON object."""

import json
import math
import re
from typing import Any, Final, NoReturn, TypeAlias, cast

Json: TypeAlias = dict[str, Any]

# Deeper arguments are an attack or a runaway; the limit keeps every later reader far from its recursion limit.
ARGUMENT_LEVELS_MAX: Final = 64

_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")


def clean_text(text: str) -> str:
    """`text` with U+0000 and lone surrogates replaced by U+FFFD; two halves of a pair become their character."""
    if _UNSTORABLE.search(text) is None:
        return text
    paired = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return paired.replace("\x00", "\ufffd")


def clean_value(value: Any) -> Any:
    """`clean_text` on every string inside `value`, keys included. `value` is at most as deep as arguments may be."""
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, list):
        return [clean_value(item) for item in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {clean_text(key): clean_value(item) for key, item in cast("Json", value).items()}
    return value


def within_levels(value: object, levels_max: int = ARGUMENT_LEVELS_MAX) -> bool:
    """Whether arrays and objects are nested at most `levels_max` deep. Iterative: the depth is not trusted."""
    stack = [(value, 1)]
    while stack:
        node, level = stack.pop()
        if not isinstance(node, (dict, list)):
            continue
        if level > levels_max:
            return False
        items = cast("Json", node).values() if isinstance(node, dict) else cast("list[object]", node)
        stack.extend((item, level + 1) for item in items)
    return True


def parse_arguments(text: str) -> Json | None:
    """The arguments of a call; None unless they are one whole JSON object of bounded depth. No text at all is `{}`."""
    if not text.strip():
        return {}
    try:
        value: object = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not within_levels(cast("Json", value)):
        return None
    return cast("Json", clean_value(value))


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number} is out of range")
    return value


class TextFlow:
    """Cleans a text that arrives in pieces, so that the pieces add up to the clean whole.

    The first half of a surrogate pair is held back until the piece with the second one comes.
    """

    def __init__(self) -> None:
        self._held = ""
        self._parts: list[str] = []

    def feed(self, piece: str) -> str:
        """What can be shown now; may be empty."""
        text = self._held + piece
        self._held = text[-1] if text and "\ud800" <= text[-1] <= "\udbff" else ""
        return self._keep(text[: len(text) - len(self._held)])

    def finish(self) -> str:
        """What is left at the end: U+FFFD for a half that never found its pair, else nothing."""
        held, self._held = self._held, ""
        return self._keep(held)

    def whole(self) -> str:
        """Everything so far."""
        return "".join(self._parts)

    def _keep(self, text: str) -> str:
        cleaned = clean_text(text)
        self._parts.append(cleaned)
        return cleaned
