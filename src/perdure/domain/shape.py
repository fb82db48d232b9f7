"""Reading decoded JSON by its shape: each reader gives the value or raises `Misfit`, which names the path and the rule.

Paths are dotted: `events.1.content.0.text`. `Misfit` is caught by the function that owns the schema and leaves it as its `Refused`.
"""

from collections.abc import Collection
from typing import Any, Final

from perdure.domain.errors import RefusalKind, Refused


class Misfit(Exception):
    """A value that breaks a rule, as the refusal it will become."""

    def __init__(
        self, path: str, rule: str, *, kind: RefusalKind = "invalid", code: str = "invalid_request_error"
    ) -> None:
        super().__init__(rule)
        self.refused = Refused(kind, code, f"{path}: {rule}", path)


TEXT_OR_OBJECT: Final = "a string or an object"


def unsupported(path: str, what: str) -> Misfit:
    """A part of the API that this version leaves out; refused by name instead of being ignored."""
    return Misfit(path, f"{what} is not built yet; leave it out.", kind="unsupported", code="unsupported")


def join(path: str, key: str | int) -> str:
    """The path of a member."""
    return f"{path}.{key}" if path else str(key)


def name_of(value: Any) -> str:
    """What a value is, in the words of JSON."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "an array"
        case _:
            return "an object"


def read_object(
    value: Any,
    path: str,
    *,
    known: Collection[str] | None = None,
    required: Collection[str] = (),
    form: str = "an object",
) -> dict[str, Any]:
    """An object with none but the known keys, and all of the required ones. `form` names what else the caller takes in its place."""
    if not isinstance(value, dict):
        raise Misfit(path or "body", f"must be {form}, not {name_of(value)}.")
    found: dict[str, Any] = value  # pyright: ignore[reportUnknownVariableType]
    for key in found:
        if known is not None and key not in known:
            raise Misfit(join(path, key[:64]), f"is not a known field. Known here: {', '.join(sorted(known))}.")
    for key in required:
        if key not in found:
            raise Misfit(join(path, key), "is required.")
    return found


def read_array(value: Any, path: str, *, least: int = 0, most: int | None = None) -> list[Any]:
    """An array within its bounds."""
    if not isinstance(value, list):
        raise Misfit(path, f"must be an array, not {name_of(value)}.")
    rows: list[Any] = value  # pyright: ignore[reportUnknownVariableType]
    if len(rows) < least:
        raise Misfit(path, "must not be empty." if least == 1 else f"must have at least {least} entries.")
    if most is not None and len(rows) > most:
        raise Misfit(path, f"must have at most {most:,} entries, not {len(rows):,}.")
    return rows


def read_text(value: Any, path: str, *, least: int = 0, most: int | None = None) -> str:
    """A string within its bounds, counted in characters (code points)."""
    if not isinstance(value, str):
        raise Misfit(path, f"must be a string, not {name_of(value)}.")
    if len(value) < least:
        raise Misfit(path, "must not be empty." if least == 1 else f"must have at least {least} characters.")
    if most is not None and len(value) > most:
        raise Misfit(path, f"must have at most {most:,} characters, not {len(value):,}.")
    return value


def read_name(value: Any, path: str, *, most: int) -> str:
    """What people call a thing: there must be something to read."""
    text = read_text(value, path, least=1, most=most)
    if not text.strip():
        raise Misfit(path, "must not be blank.")
    return text


def read_flag(value: Any, path: str) -> bool:
    """A boolean."""
    if not isinstance(value, bool):
        raise Misfit(path, f"must be true or false, not {name_of(value)}.")
    return value


WHOLE_MAX: Final = 2**63 - 1
"""What the ledger can keep."""


def read_whole(value: Any, path: str, *, least: int) -> int:
    """A whole number; 1.0 is none."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise Misfit(path, f"must be a whole number, not {name_of(value)}.")
    if not least <= value <= WHOLE_MAX:
        raise Misfit(path, f"must be from {least} to {WHOLE_MAX:,}.")
    return value


def read_choice(value: Any, path: str, options: Collection[str]) -> str:
    """One of some strings."""
    text = read_text(value, path)
    if text not in options:
        raise Misfit(path, f"must be one of {', '.join(sorted(options))}, not {text[:64]!r}.")
    return text


METADATA_PAIRS_MAX = 16
METADATA_KEY_CHARS_MAX = 64
METADATA_VALUE_CHARS_MAX = 512
"""Labels, not a store."""


def read_metadata(value: Any, path: str) -> dict[str, str]:
    """A bag of strings."""
    pairs = read_object(value, path)
    refuse_pairs(len(pairs), path)
    return {_key(k, path): read_text(v, join(path, k), most=METADATA_VALUE_CHARS_MAX) for k, v in pairs.items()}


def read_metadata_patch(value: Any, path: str) -> dict[str, str | None]:
    """Changes of such a bag: null deletes a key. How many pairs there are is asked of the result."""
    pairs = read_object(value, path)
    return {
        _key(k, path): None if v is None else read_text(v, join(path, k), most=METADATA_VALUE_CHARS_MAX)
        for k, v in pairs.items()
    }


def refuse_pairs(count: int, path: str) -> None:
    """Raise when a bag holds too many pairs."""
    if count > METADATA_PAIRS_MAX:
        raise Misfit(path, f"must have at most {METADATA_PAIRS_MAX} pairs, not {count}.")


def _key(key: str, path: str) -> str:
    if not 1 <= len(key) <= METADATA_KEY_CHARS_MAX:
        raise Misfit(path, f"keys must have 1 to {METADATA_KEY_CHARS_MAX} characters; {key[:64]!r} has {len(key)}.")
    return key
