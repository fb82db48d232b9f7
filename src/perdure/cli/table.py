"""Rows for people and for programs: a table on a terminal, tab-separated lines in a pipe, or JSON."""

import json
import sys
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from perdure.cli.text import one_line


def show_rows(columns: Sequence[str], rows: Sequence[dict[str, Any]], *, as_json: bool, empty: str) -> None:
    """Print these columns of the rows; as JSON, all there is of them. `empty` says what to do when there are none."""
    if as_json:
        show_json({"data": list(rows)})
        return
    if not rows:
        print(empty, file=sys.stderr)
        return
    cells = [[_cell(row.get(column)) for column in columns] for row in rows]
    if not sys.stdout.isatty():
        for line in (columns, *cells):
            print("\t".join(line))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        # An id that is cut can't be copied.
        table.add_column(column, overflow="fold", no_wrap=column == "id")
    for line in cells:
        table.add_row(*(Text(cell) for cell in line))
    Console().print(table)


def show_fields(fields: dict[str, Any]) -> None:
    """Print one thing, a line a field."""
    width = max(map(len, fields))
    for name, value in fields.items():
        print(f"{name:<{width}}  {_cell(value)}")


def show_json(value: Any) -> None:
    """One line of JSON."""
    print(json.dumps(value, ensure_ascii=False), flush=True)


def to_text_time(at: datetime | None) -> str | None:
    """RFC 3339 in UTC, or nothing."""
    return None if at is None else at.isoformat(timespec="seconds").replace("+00:00", "Z")


def _cell(value: Any) -> str:
    """Missing is shown as missing."""
    return "-" if value is None else one_line(str(value))
