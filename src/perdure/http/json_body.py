"""Reading a JSON body once, strictly: what two readers could understand differently, or what the ledger can't keep, is refused by path."""

import json
import math
import re
from typing import Any, Final

from perdure.domain.errors import Refused
from perdure.domain.shape import join

DEPTH_MAX: Final = 64
"""Levels of arrays and objects. Schemas of tools need a dozen; parsers of other languages give up at some hundreds."""

VALUES_MAX: Final = 100_000
"""Objects, arrays and commas of one body, which bound what reading it takes: a tenth of a second in which nobody else is served. A
request of a thousand messages has some ten thousand."""

_STRUCTURE: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"|([{\[,])', re.DOTALL)
"""A string, or a character outside of strings that brings a value."""

INTEGER_MIN: Final = -(2**63)
INTEGER_MAX: Final = 2**64 - 1
"""What every reader of the stored body can hold exactly."""


class _Doubled(dict[str, Any]):
    """An object in which a key came twice; found again by the walk, which knows its path."""

    key: str = ""


class _Unsafe(Exception):
    """The body breaks a rule at this path. Never leaves this module."""

    def __init__(self, path: str, rule: str) -> None:
        super().__init__(rule)
        self.path = path
        self.rule = rule


def decode_body(body: bytes) -> dict[str, Any] | Refused:
    """The object that a request's body holds, or why it holds none.

    Refused: anything but UTF-8 JSON with an object at the top, a key given twice, NaN and infinities, numbers beyond 64 bits, nesting
    over `DEPTH_MAX`, more than `VALUES_MAX` values, U+0000 and lone surrogates.
    """
    if _has_too_many(body):
        return _refused("", f"must have at most {VALUES_MAX:,} objects, arrays and values.")
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        return _refused("", f"must be UTF-8; byte {error.start} is not.")
    if not text.strip():
        return _refused("", "must be a JSON object; it is empty.")
    try:
        seen = _SEEN
        seen.odd = False
        value: Any = seen.decoder.decode(text)
        # Without any of these the walk could find nothing, and it takes longer than reading the body does.
        if seen.odd or "\\u" in text or text.count("{") + text.count("[") > DEPTH_MAX:
            _walk(value, "", 1)
    except _Unsafe as error:
        return _refused(error.path, error.rule)
    except json.JSONDecodeError as error:
        return _refused("", f"must be JSON: {error.msg} at line {error.lineno}, column {error.colno}.")
    except RecursionError:
        return _refused("", f"must not nest deeper than {DEPTH_MAX} levels.")
    if not isinstance(value, dict):
        return _refused("", "must be a JSON object.")
    return value  # pyright: ignore[reportUnknownVariableType]


def _has_too_many(body: bytes) -> bool:
    if body.count(b"{") + body.count(b"[") + body.count(b",") <= VALUES_MAX:
        return False
    # Most of them may be the text of strings.
    count = 0
    for found in _STRUCTURE.finditer(body):
        count += found.lastindex is not None
        if count > VALUES_MAX:
            return True
    return False


class _Seen:
    """Decodes bodies one after the other, and notes whether anything in the last one calls for the walk."""

    __slots__ = ("decoder", "odd")

    def __init__(self) -> None:
        self.odd = False
        self.decoder = json.JSONDecoder(
            object_pairs_hook=self._pairs, parse_constant=_constant, parse_int=self._integer, parse_float=self._float
        )

    def _pairs(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) == len(pairs):
            return found
        self.odd = True
        doubled = _Doubled(found)
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                doubled.key = key
            seen.add(key)
        return doubled

    def _integer(self, digits: str) -> int | float:
        """Longer ones are reported by the walk, which knows where they stand; converting them would cost square time."""
        value = int(digits) if len(digits) <= len(str(INTEGER_MIN)) else math.inf
        self.odd = self.odd or not INTEGER_MIN <= value <= INTEGER_MAX
        return value

    def _float(self, digits: str) -> float:
        value = float(digits)
        self.odd = self.odd or not INTEGER_MIN <= value <= INTEGER_MAX
        return value


def _constant(name: str) -> Any:
    raise _Unsafe("", f"must be JSON; {name} is not a JSON number.")


_SEEN: Final = _Seen()
"""Making a decoder takes longer than reading a short body with it. Nothing awaits between its two uses."""


def _walk(value: Any, path: str, depth: int) -> None:
    if isinstance(value, str):
        _check_text(value, path)
    elif isinstance(value, (dict, list)):
        if depth > DEPTH_MAX:
            raise _Unsafe("", f"must not nest deeper than {DEPTH_MAX} levels.")
        if isinstance(value, dict):
            _walk_object(value, path, depth)  # pyright: ignore[reportUnknownArgumentType]
        else:
            for index, row in enumerate(value):  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
                _walk(row, join(path, index), depth + 1)
    elif isinstance(value, (int, float)) and not INTEGER_MIN <= value <= INTEGER_MAX:
        raise _Unsafe(path, "must be a number that fits into 64 bits.")


def _walk_object(value: dict[str, Any], path: str, depth: int) -> None:
    if isinstance(value, _Doubled):
        raise _Unsafe(join(path, shown(value.key)), "is given twice; a key may be given once.")
    for key, child in value.items():
        _check_text(key, path)
        _walk(child, join(path, shown(key)), depth + 1)


def _check_text(text: str, path: str) -> None:
    if "\0" in text:
        raise _Unsafe(path, "must not contain the character U+0000.")
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise _Unsafe(path, "must not contain a lone surrogate (half of a character, as in \\ud800).") from None


KEY_SHOWN_CHARS: Final = 64


def shown(key: str) -> str:
    """A key as messages repeat it: printable, and no longer than a message should be."""
    printable = key.encode("ascii", "backslashreplace").decode() if not key.isprintable() else key
    return printable if len(printable) <= KEY_SHOWN_CHARS else printable[:KEY_SHOWN_CHARS] + "..."


def _refused(path: str, rule: str) -> Refused:
    return Refused("invalid", "invalid_request_error", f"{path or 'body'}: {rule}", path or None)
