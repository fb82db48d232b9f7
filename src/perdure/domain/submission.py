"""Submit once: whether a request is new, the repeat of one already admitted, or a misuse of its key."""

from datetime import datetime, timedelta
from typing import Final, TypeAlias
from uuid import UUID

import msgspec

from perdure.domain.errors import Refused

WRITTEN_GRACE_S: Final = 20
"""A retry that comes within this time of a written response may still come from a client that never saw it."""

LOST_FLAG_S: Final = 15 * 60
"""How long a record whose `written` flag a crash took is matched: longer than any SDK goes on retrying."""

KEPT_S: Final = 24 * 3600
"""How long an explicit key is remembered."""


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """The record of one admitted request."""

    digest: bytes
    """SHA-256 over API key, method, route and body; with an `Idempotency-Key`, over API key, method, route and that key."""
    session_id: UUID
    body_digest: bytes
    explicit: bool
    attempt: int
    """The SDK's retry count that this request, or its latest accepted repeat, came with."""
    first_seq: int
    last_seq: int
    """The events that it admitted."""
    request_id: UUID
    """The request that admitted it, or its latest counted repeat: only what is known of its response counts."""
    written_at: datetime | None
    """When that response had gone out in full; None while nobody has told."""
    connection_reused: bool
    """Whether its connection carried a later request: then the client has seen the response."""
    created_at: datetime


class SubmissionKey(msgspec.Struct, frozen=True, kw_only=True):
    """What a request says about itself."""

    digest: bytes
    body_digest: bytes
    explicit: bool
    attempt: int
    request_id: UUID
    """Its own, unlike any other request's."""
    known: "Written | None" = None
    """The response of the latest request of this name in this process. Another process may have answered a later one."""


class Written(msgspec.Struct, frozen=True):
    """A response that went out in full."""

    request_id: UUID
    """The request that it answered."""
    age: timedelta
    """How long ago, by the clock of the process that wrote it: hosts need not agree on the time."""
    connection_reused: bool


class WrittenNote(msgspec.Struct, frozen=True):
    """What the ledger is told, some time later, of a response that went out in full."""

    digest: bytes
    written: Written


class New(msgspec.Struct, frozen=True):
    """Admit it."""


class Repeat(msgspec.Struct, frozen=True):
    """Answer as the first time."""

    record: Submission


SubmissionDecision: TypeAlias = New | Repeat | Refused


def decide_submission(key: SubmissionKey | None, record: Submission | None, now: datetime) -> SubmissionDecision:
    """Whether a request was admitted before.

    MA-E1.4: an explicit key always decides: with the same body it is a repeat, with another one a misuse. MA-E1.1: without a key an
    SDK's own retry is a repeat: it counts its tries, no other retry of that count took the answer, and its first response was not
    written, or so lately, on a connection left alone since, that the client may have missed it. MA-E1.2: a request that is not such
    a retry is new, however equal.
    """
    if key is None or record is None:
        return New()
    age = now - record.created_at
    if key.explicit:
        if age > timedelta(seconds=KEPT_S):
            return New()
        if record.body_digest != key.body_digest:
            return Refused(
                "conflict",
                "idempotency_key_reused",
                "This Idempotency-Key was already used with a different body: use a new key for a new request.",
                "Idempotency-Key",
            )
        return Repeat(record)
    if key.attempt <= record.attempt or key.attempt < 1:
        return New()
    written = _written(key, record, now)
    if written is None:
        return Repeat(record) if age <= timedelta(seconds=LOST_FLAG_S) else New()
    missed = not written.connection_reused and written.age <= timedelta(seconds=WRITTEN_GRACE_S)
    return Repeat(record) if missed else New()


def _written(key: SubmissionKey, record: Submission, now: datetime) -> Written | None:
    """What is known of the response that the record speaks of; a response to another request says nothing of it."""
    if key.known is not None and key.known.request_id == record.request_id:
        return key.known
    if record.written_at is None:
        return None
    return Written(record.request_id, now - record.written_at, record.connection_reused)
