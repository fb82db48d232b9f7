"""Ids: 128 bits, derived wherever the ledger can derive them, so that the same commit always makes the same ids."""

from datetime import datetime
from hashlib import blake2b
from typing import Final
from uuid import UUID

ALPHABET: Final = "0123456789abcdefghjkmnpqrstvwxyz"
TOKEN_CHARS: Final = 26
"""26 characters of 5 bits carry 128 bits with two to spare."""

_PAIRS: Final = tuple(a + b for a in ALPHABET for b in ALPHABET)
_PAIR_VALUES: Final = {pair: i for i, pair in enumerate(_PAIRS)}
"""Two characters at a time: ids are read and written several times a request."""

_PAIR_BITS: Final = 10
_UUID_BITS: Final = 128
_TIME_BYTES: Final = 6


def token(identity: UUID) -> str:
    """The wire form of an id, without its prefix: 26 characters, in the order of the id."""
    n = identity.int
    return "".join([_PAIRS[n >> shift & 1023] for shift in range(120, -1, -_PAIR_BITS)])


def parse_token(text: str) -> UUID | None:
    """The id behind a token, or None when the text is no token."""
    if len(text) != TOKEN_CHARS:
        return None
    n = 0
    for at in range(0, TOKEN_CHARS, 2):
        value = _PAIR_VALUES.get(text[at : at + 2])
        if value is None:
            return None
        n = n << _PAIR_BITS | value
    return UUID(int=n) if n >> _UUID_BITS == 0 else None


def parse_wire(text: str, *prefixes: str) -> UUID | None:
    """The id behind `prefix + token`, for any of the prefixes, or None."""
    for prefix in prefixes:
        if text.startswith(prefix):
            return parse_token(text[len(prefix) :])
    return None


def timed(at: datetime, owner: UUID, *parts: int | str) -> UUID:
    """An id that sorts by time (milliseconds) and is fixed by its owner and parts."""
    return _join(int(at.timestamp() * 1000).to_bytes(_TIME_BYTES, "big"), owner, parts)


def derived(owner: UUID, *parts: int | str) -> UUID:
    """An id fixed by its owner and parts, sorting with its owner."""
    return _join(owner.bytes[:_TIME_BYTES], owner, parts)


def _join(head: bytes, owner: UUID, parts: tuple[int | str, ...]) -> UUID:
    digest = blake2b(owner.bytes, digest_size=16 - _TIME_BYTES)
    digest.update(repr(parts).encode())
    return UUID(bytes=head + digest.digest())


def primary_thread(session: UUID) -> UUID:
    """The thread every session is born with."""
    return derived(session, "thread", 0)
