"""`perdure keys` and `perdure workspaces`: they work on the database, because no key may make another one."""

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any, Final, TypeVar
from uuid import UUID, uuid4

from perdure.bootstrap import open_catalog
from perdure.cli.exits import OK, REFUSED, CommandFailed
from perdure.cli.starting import check_database, check_made, explained
from perdure.cli.table import show_json, show_rows, to_text_time
from perdure.core.auth import make_key
from perdure.domain import ids
from perdure.domain.errors import Refused
from perdure.ports.catalog import Catalog, KeyRecord, WorkspaceRecord
from perdure.settings import Settings

KEY: Final = "key_"
WORKSPACE: Final = "wrkspc_"
ENTROPY_BYTES: Final = 32
NAME_CHARS_MAX: Final = 100
"""A line of a table."""

_T = TypeVar("_T")


def create_key(settings: Settings, *, workspace: str, name: str, as_json: bool) -> int:
    """Make a key and show it, this once."""
    _check_name(name)

    async def create(catalog: Catalog) -> tuple[KeyRecord, str]:
        found = await _find_workspace(catalog, workspace)
        key = make_key(secrets.token_bytes(ENTROPY_BYTES))
        return await catalog.create_key(_new_id(), found.id, name, key.digest, key.hint), key.secret

    record, secret = in_catalog(settings, create)
    if as_json:
        show_json({**_key_row(record, workspace), "api_key": secret})
    else:
        print(secret)
        print(f"Key {KEY}{ids.token(record.id)} of the workspace {workspace!r}. It is shown only now: keep it.")
    return OK


def list_keys(settings: Settings, *, workspace: str | None, as_json: bool) -> int:
    """The keys, without their secrets."""

    async def read(catalog: Catalog) -> list[dict[str, Any]]:
        names = {row.id: row.name for row in await catalog.read_workspaces()}
        wanted = None if workspace is None else (await _find_workspace(catalog, workspace)).id
        return [_key_row(key, names.get(key.workspace_id)) for key in await catalog.read_keys(wanted)]

    columns = ("id", "workspace", "name", "hint", "created_at", "last_used_at", "revoked_at")
    show_rows(columns, in_catalog(settings, read), as_json=as_json, empty="No keys: `perdure keys create` makes one.")
    return OK


def revoke_key(settings: Settings, key_id: str, *, as_json: bool) -> int:
    """Refuse a key from now on; repeatable."""
    parsed = ids.parse_wire(key_id, KEY)
    if parsed is None:
        raise CommandFailed(
            f"{key_id!r} is no key id: it starts with {KEY}; `perdure keys list` shows them.", code=REFUSED
        )
    record = in_catalog(settings, lambda catalog: catalog.revoke_key(parsed))
    if record is None:
        raise CommandFailed(f"There is no key {key_id}: `perdure keys list` shows them.")
    if as_json:
        show_json(_key_row(record, None))
    else:
        print(f"Revoked {key_id}. Running servers refuse it within two seconds.")
    return OK


def create_workspace(settings: Settings, name: str, *, as_json: bool) -> int:
    """A new tenant."""
    _check_name(name)
    made = in_catalog(settings, lambda catalog: catalog.create_workspace(_new_id(), name))
    if isinstance(made, Refused):
        raise CommandFailed(made.message)
    if as_json:
        show_json(_workspace_row(made))
    else:
        print(f"Workspace {name!r}. Its first key: perdure keys create --workspace {name}")
    return OK


def list_workspaces(settings: Settings, *, as_json: bool) -> int:
    """All of them."""

    async def read(catalog: Catalog) -> list[dict[str, Any]]:
        return [_workspace_row(row) for row in await catalog.read_workspaces()]

    rows = in_catalog(settings, read)
    show_rows(("id", "name", "created_at"), rows, as_json=as_json, empty="None yet: `perdure workspaces create NAME`.")
    return OK


def in_catalog(settings: Settings, work: Callable[[Catalog], Awaitable[_T]]) -> _T:
    """Do something with the catalog of a database that is there, and turn what keeps it away into a message."""
    check_made(settings)

    async def run() -> _T:
        await check_database(settings)
        async with open_catalog(settings) as catalog:
            return await work(catalog)

    with explained(settings, refusal="Can't be done"):
        return asyncio.run(run())


async def _find_workspace(catalog: Catalog, name: str) -> WorkspaceRecord:
    for row in await catalog.read_workspaces():
        if row.name == name:
            return row
    raise CommandFailed(
        f"There is no workspace {name!r}: `perdure workspaces list` shows them, `perdure workspaces create` makes one."
    )


def _check_name(name: str) -> None:
    if not name.strip() or len(name) > NAME_CHARS_MAX or not name.isprintable():
        raise CommandFailed(
            f"The name {name!r} can't be used: give 1 to {NAME_CHARS_MAX} printable characters.", code=REFUSED
        )


def _new_id() -> UUID:
    return ids.timed(datetime.now(UTC), uuid4())


def _key_row(key: KeyRecord, workspace: str | None) -> dict[str, Any]:
    return {
        "id": KEY + ids.token(key.id),
        "workspace_id": WORKSPACE + ids.token(key.workspace_id),
        **({} if workspace is None else {"workspace": workspace}),
        "name": key.name,
        "hint": key.hint,
        "created_at": to_text_time(key.created_at),
        "last_used_at": to_text_time(key.last_used_at),
        "revoked_at": to_text_time(key.revoked_at),
    }


def _workspace_row(workspace: WorkspaceRecord) -> dict[str, Any]:
    return {
        "id": WORKSPACE + ids.token(workspace.id),
        "name": workspace.name,
        "created_at": to_text_time(workspace.created_at),
    }
