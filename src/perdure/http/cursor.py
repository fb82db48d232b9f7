"""Page cursors: opaque to clients, bound to what they were made for, so that a damaged or borrowed one is noticed.

The check is against mistakes, not against forgery: a forged cursor shows nothing that the key may not list anyway.
"""

from base64 import urlsafe_b64decode, urlsafe_b64encode
from hashlib import blake2b
from typing import Final
from uuid import UUID

CHECK_BYTES: Final = 8
CURSOR_CHARS_MAX: Final = 512
"""Ours stay far below; a longer one is not ours."""


def seal(workspace_id: UUID, scope: str, place: bytes) -> str:
    """A cursor for `place`. `scope` names the list and whatever must be equal when the cursor comes back (its order, a filter)."""
    return urlsafe_b64encode(_check(workspace_id, scope, place) + place).rstrip(b"=").decode()


def unseal(workspace_id: UUID, scope: str, cursor: str) -> bytes | None:
    """The place, or None when the cursor is damaged, another list's, or another workspace's."""
    if len(cursor) > CURSOR_CHARS_MAX or not cursor.isascii():
        return None
    try:
        raw = urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4))
    except ValueError:
        return None
    check, place = raw[:CHECK_BYTES], raw[CHECK_BYTES:]
    return place if check == _check(workspace_id, scope, place) else None


def _check(workspace_id: UUID, scope: str, place: bytes) -> bytes:
    return blake2b(workspace_id.bytes + scope.encode() + b"\0" + place, digest_size=CHECK_BYTES).digest()
