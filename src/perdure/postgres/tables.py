"""Which struct lives in which table. A struct's fields are the table's columns, by name and in order."""

import types
import typing
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final, TypeVar
from uuid import UUID

import msgspec

from perdure.core.facts import Row
from perdure.domain.barrier import Action
from perdure.domain.control import Control
from perdure.domain.event import Event
from perdure.domain.mailbox import Input
from perdure.domain.session import Session, SessionConfig, Thread
from perdure.domain.step import Step
from perdure.domain.submission import Submission
from perdure.domain.transcript import TranscriptEntry
from perdure.domain.turn import Turn
from perdure.domain.wakeup import Wakeup

R = TypeVar("R", bound=msgspec.Struct)

_SQL_TYPES: Final[dict[Any, str]] = {
    UUID: "uuid",
    int: "bigint",
    str: "text",
    bytes: "bytea",
    bool: "boolean",
    datetime: "timestamptz",
}


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """A table, its key and its columns with their types."""

    name: str
    kind: type[Any]
    key: tuple[str, ...]
    columns: tuple[tuple[str, str], ...]
    session_column: str
    appended: bool
    """Rows are only ever added."""

    @property
    def names(self) -> tuple[str, ...]:
        """Column names, in order."""
        return tuple(n for n, _ in self.columns)

    def tuples(self, rows: Sequence[Any]) -> list[tuple[Any, ...]]:
        """The rows as values of the table's row type."""
        width = len(self.columns)
        return [msgspec.structs.astuple(row)[:width] for row in rows]


def _sql_type(annotation: Any) -> str:
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        inner = [a for a in typing.get_args(annotation) if a is not type(None)]
        annotation = inner[0]
    if typing.get_origin(annotation) is typing.Literal:
        return "text"
    return _SQL_TYPES[annotation]


def _table(name: str, kind: type[Any], *key: str, appended: bool = False, session: str = "session_id") -> Table:
    hints = typing.get_type_hints(kind)
    columns = tuple((f, _sql_type(hints[f])) for f in kind.__struct_fields__ if f != "ref_body")
    return Table(name=name, kind=kind, key=key, columns=columns, session_column=session, appended=appended)


SESSION: Final = _table("session", Session, "id", session="id")

CHILDREN: Final[tuple[Table, ...]] = (
    _table("session_config", SessionConfig, "session_id"),
    _table("thread", Thread, "session_id", "id"),
    _table("input", Input, "session_id", "seq"),
    _table("turn", Turn, "session_id", "id"),
    _table("step", Step, "session_id", "id"),
    _table("action", Action, "session_id", "id"),
    _table("control", Control, "session_id", "seq"),
    _table("event", Event, "session_id", "seq", appended=True),
    _table("transcript", TranscriptEntry, "session_id", "thread_id", "causal_pos", "position", appended=True),
    _table("outbox", Wakeup, "session_id", "thread_id"),
    _table("submission", Submission, "digest"),
)

BY_KIND: Final[dict[type[Row], Table]] = {t.kind: t for t in (SESSION, *CHILDREN)}


def read_row(kind: type[R], record: Any) -> R:
    """A struct from a record with the same columns."""
    return kind(**record)


def read_rows(kind: type[R], records: Sequence[Any] | None) -> tuple[R, ...]:
    """Structs from an array of records; None is no rows."""
    return tuple(kind(**r) for r in records) if records else ()
