"""The small forms of this face: ids with their prefixes, and times."""

from datetime import UTC, datetime
from typing import Final
from uuid import UUID

from perdure.domain.ids import derived, parse_wire, token

AGENT: Final = "agent_"
ENVIRONMENT: Final = "env_"
SESSION: Final = "sesn_"
THREAD: Final = "sthr_"
EVENT: Final = "sevt_"


def to_wire_id(prefix: str, identity: UUID) -> str:
    """An id as clients write it."""
    return prefix + token(identity)


def from_wire_id(prefix: str, text: str) -> UUID | None:
    """The id behind a client's text; None for text of any other form, which answers like an id that is not there."""
    return parse_wire(text, prefix)


def expansion_id(event_id: UUID, place: int) -> str:
    """The id of the wire event at `place` of what one row becomes."""
    return to_wire_id(EVENT, event_id if place == 0 else derived(event_id, "claude", place))


def to_wire_time(at: datetime) -> str:
    """RFC 3339 in UTC, always with microseconds."""
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def to_wire_seconds(ms: int) -> float:
    """A duration as this face counts it."""
    return ms / 1000
