"""The catalog in PostgreSQL.

Each method is one transaction, made once more on a new connection when the first was lost. That is why every one of them bears
repeating: ids are the caller's, so a row that is there already is the one that the lost attempt made.
"""

from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Any, Final, TypeVar
from uuid import UUID

import asyncpg

from perdure.domain.errors import InvariantViolation, Refused, Unavailable
from perdure.ports.catalog import AgentRecord, EnvironmentRecord, KeyRecord, PageQuery, WorkspaceRecord
from perdure.postgres.pool import ReadPool, is_lost

R = TypeVar("R")

_AGENT_COLUMNS: Final = """
       a.id, a.workspace_id, v.version, a.version as latest_version, v.body, a.created_at, v.created_at as updated_at, a.archived_at
  from agent a join agent_version v on v.agent_id = a.id"""

_READ_AGENT_SQL: Final = f"""
-- read_agent
select {_AGENT_COLUMNS} and v.version = coalesce($3, a.version)
 where a.workspace_id = $1 and a.id = $2"""

_READ_AGENTS_SQL: Final = f"""
-- read_agents
select {_AGENT_COLUMNS} and v.version = a.version"""

_READ_VERSIONS_SQL: Final = f"""
-- read_agent_versions
select {_AGENT_COLUMNS}
 where a.workspace_id = $1 and a.id = $2 and v.version < coalesce($3, 9223372036854775807)
 order by v.version desc limit $4"""

_CREATE_AGENT_SQL: Final = """
-- create_agent
with made as (
    insert into agent (id, workspace_id, version, created_at, updated_at)
    select $1, $2, 1, t.at, t.at from (select clock_timestamp() as at) as t
    on conflict (id) do nothing returning created_at)
insert into agent_version (agent_id, version, body, created_at)
select $1, 1, $3, made.created_at from made"""

_LOCK_AGENT_SQL: Final = """
-- lock_agent
select a.version, a.archived_at, a.updated_at from agent a where a.workspace_id = $1 and a.id = $2 for no key update"""

# Never twice the same time: a reader may take it for the name of a state.
_ADD_VERSION_SQL: Final = """
-- add_agent_version
with moved as (
    update agent set version = version + 1,
                     updated_at = greatest(clock_timestamp(), updated_at + interval '1 microsecond')
     where id = $1 returning version, updated_at)
insert into agent_version (agent_id, version, body, created_at) select $1, moved.version, $2, moved.updated_at from moved"""

_ARCHIVE_AGENT_SQL: Final = """
-- archive_agent
update agent
   set archived_at = greatest(t.at, updated_at + interval '1 microsecond'),
       updated_at = greatest(t.at, updated_at + interval '1 microsecond')
  from (select clock_timestamp() as at) as t
 where workspace_id = $1 and id = $2 and archived_at is null"""

_ENVIRONMENT_COLUMNS: Final = "id, workspace_id, body, created_at, updated_at, archived_at"

_CREATE_ENVIRONMENT_SQL: Final = """
-- create_environment
insert into environment (id, workspace_id, body, created_at, updated_at)
select $1, $2, $3, t.at, t.at from (select clock_timestamp() as at) as t
on conflict (id) do nothing"""

_READ_ENVIRONMENT_SQL: Final = f"""
-- read_environment
select {_ENVIRONMENT_COLUMNS} from environment where workspace_id = $1 and id = $2"""

_LOCK_ENVIRONMENT_SQL: Final = f"{_READ_ENVIRONMENT_SQL} for no key update"

_UPDATE_ENVIRONMENT_SQL: Final = f"""
-- update_environment
update environment set body = $2, updated_at = greatest(clock_timestamp(), updated_at + interval '1 microsecond')
 where id = $1 returning {_ENVIRONMENT_COLUMNS}"""

_ARCHIVE_ENVIRONMENT_SQL: Final = """
-- archive_environment
update environment
   set archived_at = greatest(t.at, updated_at + interval '1 microsecond'),
       updated_at = greatest(t.at, updated_at + interval '1 microsecond')
  from (select clock_timestamp() as at) as t
 where workspace_id = $1 and id = $2 and archived_at is null"""

_WORKSPACE_COLUMNS: Final = "id, name, created_at"
_KEY_COLUMNS: Final = "id, workspace_id, name, digest, hint, created_at, last_used_at, revoked_at"

_CREATE_KEY_SQL: Final = """
-- create_key
insert into api_key (id, workspace_id, name, digest, hint) values ($1, $2, $3, $4, $5) on conflict (id) do nothing"""

# A row in someone's hands is being revoked, or touched by another process: either way this note is not needed.
_TOUCH_KEYS_SQL: Final = """
-- touch_keys
with mine as (
    select k.id, n.at from api_key k join unnest($1::uuid[], $2::timestamptz[]) as n (id, at) on n.id = k.id
     where k.last_used_at is null or k.last_used_at < n.at
     order by k.id for no key update of k skip locked)
update api_key k set last_used_at = mine.at from mine where k.id = mine.id"""


class PostgresCatalog:
    """See `perdure.ports.catalog.Catalog`. Lock order: workspace, then agent or environment."""

    def __init__(self, pool: ReadPool) -> None:
        self._pool = pool

    async def _twice(self, attempt: Callable[[Any, bool], Awaitable[R]]) -> R:
        """Run a transaction, and again if its connection was lost; `again` tells it that its first run may have been committed."""
        try:
            async with self._pool.transaction() as connection:
                return await attempt(connection, False)
        except Unavailable as error:
            if error.__cause__ is None or not is_lost(error.__cause__):
                raise
        async with self._pool.transaction(fresh=True) as connection:
            return await attempt(connection, True)

    # ---------------------------------------------------------------------------------------------------------- agents

    async def create_agent(self, workspace_id: UUID, agent_id: UUID, body: bytes) -> AgentRecord:
        """Version 1 of a new agent."""

        async def attempt(connection: Any, _again: bool) -> AgentRecord:
            await connection.execute(_CREATE_AGENT_SQL, agent_id, workspace_id, body)
            return _agent(_there(await connection.fetchrow(_READ_AGENT_SQL, workspace_id, agent_id, None)))

        return await self._twice(attempt)

    async def read_agent(self, workspace_id: UUID, agent_id: UUID, version: int | None = None) -> AgentRecord | None:
        """A version, or the latest."""
        row = await self._pool.fetchrow(_READ_AGENT_SQL, workspace_id, agent_id, version)
        return None if row is None else _agent(row)

    async def read_agents(self, query: PageQuery) -> list[AgentRecord]:
        """A page of latest versions."""
        where, parameters = _page("a.", query)
        return [_agent(row) for row in await self._pool.fetch(f"{_READ_AGENTS_SQL} {where}", *parameters)]

    async def read_agent_versions(
        self, workspace_id: UUID, agent_id: UUID, before_version: int | None, limit: int
    ) -> list[AgentRecord]:
        """Versions of one agent, newest first."""
        rows = await self._pool.fetch(_READ_VERSIONS_SQL, workspace_id, agent_id, before_version, limit)
        return [_agent(row) for row in rows]

    async def update_agent(
        self, workspace_id: UUID, agent_id: UUID, expected_version: int, body: bytes
    ) -> AgentRecord | Refused | None:
        """Add a version behind `expected_version`; refused when another one came first or the agent is archived."""

        async def attempt(connection: Any, again: bool) -> AgentRecord | Refused | None:
            locked = await connection.fetchrow(_LOCK_AGENT_SQL, workspace_id, agent_id)
            if locked is None:
                return None
            if again:
                row = await connection.fetchrow(_READ_AGENT_SQL, workspace_id, agent_id, expected_version + 1)
                if row is not None and row["body"] == body:
                    return _agent(row)
            refused = _refuse_update(locked["version"], expected_version, archived=locked["archived_at"] is not None)
            if refused is not None:
                return refused
            await connection.execute(_ADD_VERSION_SQL, agent_id, body)
            return _agent(_there(await connection.fetchrow(_READ_AGENT_SQL, workspace_id, agent_id, None)))

        return await self._twice(attempt)

    async def archive_agent(self, workspace_id: UUID, agent_id: UUID) -> AgentRecord | None:
        """Archive; repeatable."""

        async def attempt(connection: Any, _again: bool) -> AgentRecord | None:
            await connection.execute(_ARCHIVE_AGENT_SQL, workspace_id, agent_id)
            row = await connection.fetchrow(_READ_AGENT_SQL, workspace_id, agent_id, None)
            return None if row is None else _agent(row)

        return await self._twice(attempt)

    # ---------------------------------------------------------------------------------------------------- environments

    async def create_environment(self, workspace_id: UUID, environment_id: UUID, body: bytes) -> EnvironmentRecord:
        """A new environment."""

        async def attempt(connection: Any, _again: bool) -> EnvironmentRecord:
            await connection.execute(_CREATE_ENVIRONMENT_SQL, environment_id, workspace_id, body)
            return _environment(_there(await connection.fetchrow(_READ_ENVIRONMENT_SQL, workspace_id, environment_id)))

        return await self._twice(attempt)

    async def read_environment(self, workspace_id: UUID, environment_id: UUID) -> EnvironmentRecord | None:
        """One environment."""
        row = await self._pool.fetchrow(_READ_ENVIRONMENT_SQL, workspace_id, environment_id)
        return None if row is None else _environment(row)

    async def read_environments(self, query: PageQuery) -> list[EnvironmentRecord]:
        """A page."""
        where, parameters = _page("", query)
        sql = f"-- read_environments\nselect {_ENVIRONMENT_COLUMNS} from environment {where}"
        return [_environment(row) for row in await self._pool.fetch(sql, *parameters)]

    async def update_environment(
        self, workspace_id: UUID, environment_id: UUID, expected_at: datetime, body: bytes
    ) -> EnvironmentRecord | Refused | None:
        """Replace the body unless it changed since `expected_at` (its `updated_at`) or is archived."""

        async def attempt(connection: Any, again: bool) -> EnvironmentRecord | Refused | None:
            row = await connection.fetchrow(_LOCK_ENVIRONMENT_SQL, workspace_id, environment_id)
            if row is None:
                return None
            if row["archived_at"] is not None:
                return Refused(
                    "conflict", "environment_archived", "The environment is archived: it takes no more updates."
                )
            if row["updated_at"] != expected_at:
                if again and row["body"] == body:
                    return _environment(row)
                return Refused(
                    "conflict",
                    "environment_changed",
                    "The environment was changed meanwhile: read it and update it again.",
                )
            return _environment(_there(await connection.fetchrow(_UPDATE_ENVIRONMENT_SQL, environment_id, body)))

        return await self._twice(attempt)

    async def archive_environment(self, workspace_id: UUID, environment_id: UUID) -> EnvironmentRecord | None:
        """Archive; repeatable."""

        async def attempt(connection: Any, _again: bool) -> EnvironmentRecord | None:
            await connection.execute(_ARCHIVE_ENVIRONMENT_SQL, workspace_id, environment_id)
            row = await connection.fetchrow(_READ_ENVIRONMENT_SQL, workspace_id, environment_id)
            return None if row is None else _environment(row)

        return await self._twice(attempt)

    async def delete_environment(self, workspace_id: UUID, environment_id: UUID) -> bool:
        """Remove it; False when it was not there. Sessions keep what they were made with."""
        seen = False

        async def attempt(connection: Any, _again: bool) -> bool:
            nonlocal seen
            seen = seen or await connection.fetchrow(_READ_ENVIRONMENT_SQL, workspace_id, environment_id) is not None
            sql = "delete from environment where workspace_id = $1 and id = $2 returning id"
            return await connection.fetchrow(sql, workspace_id, environment_id) is not None

        # Seen by an attempt whose answer was lost, and gone now: that attempt removed it.
        return await self._twice(attempt) or seen

    # ---------------------------------------------------------------------------------------------- workspaces and keys

    async def create_workspace(self, workspace_id: UUID, name: str) -> WorkspaceRecord | Refused:
        """A new tenant; refused when the name is taken."""

        async def attempt(connection: Any, _again: bool) -> WorkspaceRecord | Refused:
            await connection.execute(
                "insert into workspace (id, name) values ($1, $2) on conflict do nothing", workspace_id, name
            )
            sql = f"select {_WORKSPACE_COLUMNS} from workspace where id = $1 and name = $2"
            row = await connection.fetchrow(sql, workspace_id, name)
            if row is not None:
                return WorkspaceRecord(**row)
            message = f"A workspace named {name!r} exists: choose another name."
            return Refused("conflict", "workspace_name_taken", message, "name")

        return await self._twice(attempt)

    async def read_workspaces(self) -> list[WorkspaceRecord]:
        """All of them, oldest first."""
        rows = await self._pool.fetch(f"select {_WORKSPACE_COLUMNS} from workspace order by created_at, id")
        return [WorkspaceRecord(**row) for row in rows]

    async def create_key(self, key_id: UUID, workspace_id: UUID, name: str, digest: bytes, hint: str) -> KeyRecord:
        """A new API key."""

        async def attempt(connection: Any, _again: bool) -> KeyRecord:
            try:
                await connection.execute(_CREATE_KEY_SQL, key_id, workspace_id, name, digest, hint)
            except asyncpg.IntegrityConstraintViolationError as error:
                raise InvariantViolation(f"a key can't be made for workspace {workspace_id}: {error}") from error
            return KeyRecord(
                **_there(await connection.fetchrow(f"select {_KEY_COLUMNS} from api_key where id = $1", key_id))
            )

        return await self._twice(attempt)

    async def find_key(self, digest: bytes) -> KeyRecord | None:
        """The key with this digest, revoked or not."""
        row = await self._pool.fetchrow(f"select {_KEY_COLUMNS} from api_key where digest = $1", digest)
        return None if row is None else KeyRecord(**row)

    async def read_keys(self, workspace_id: UUID | None = None) -> list[KeyRecord]:
        """The keys of a workspace, or all, oldest first."""
        sql = f"select {_KEY_COLUMNS} from api_key where $1::uuid is null or workspace_id = $1 order by created_at, id"
        return [KeyRecord(**row) for row in await self._pool.fetch(sql, workspace_id)]

    async def revoke_key(self, key_id: UUID) -> KeyRecord | None:
        """Revoke; repeatable."""

        async def attempt(connection: Any, _again: bool) -> KeyRecord | None:
            sql = f"""
                update api_key set revoked_at = coalesce(revoked_at, clock_timestamp()) where id = $1
                returning {_KEY_COLUMNS}"""
            row = await connection.fetchrow(sql, key_id)
            return None if row is None else KeyRecord(**row)

        return await self._twice(attempt)

    async def touch_keys(self, used: dict[UUID, datetime]) -> None:
        """Note when keys were last used (coalesced by the caller). Never moves a note back, and never waits for anybody."""
        if not used:
            return
        async with self._pool.transaction() as connection:
            # A note that a crash loses is no loss.
            await connection.execute("set local synchronous_commit = off")
            await connection.execute(_TOUCH_KEYS_SQL, list(used), list(used.values()))


def _there(row: Any) -> Any:
    if row is None:
        raise InvariantViolation("an id was given to two rows of the catalog")
    return row


def _agent(row: Any) -> AgentRecord:
    return AgentRecord(**row)


def _environment(row: Any) -> EnvironmentRecord:
    return EnvironmentRecord(**row)


def _refuse_update(version: int, expected_version: int, *, archived: bool) -> Refused | None:
    if archived:
        return Refused("conflict", "agent_archived", "The agent is archived: it takes no more updates.")
    if version != expected_version:
        message = f"The agent is at version {version}, not {expected_version}: read it and update it again."
        return Refused("conflict", "version_mismatch", message, "version")
    return None


def _page(table: str, query: PageQuery) -> tuple[str, list[Any]]:
    """Conditions, order and limit of a page; `table` is the alias in front of a column."""
    parts = [f"{table}workspace_id = $1"]
    parameters: list[Any] = [query.workspace_id]
    if not query.include_archived:
        parts.append(f"{table}archived_at is null")
    for value, sign in ((query.created_from, ">="), (query.created_until, "<=")):
        if value is not None:
            parameters.append(value)
            parts.append(f"{table}created_at {sign} ${len(parameters)}")
    if query.after is not None:
        parameters.extend(query.after)
        parts.append(f"({table}created_at, {table}id) < (${len(parameters) - 1}, ${len(parameters)})")
    parameters.append(query.limit)
    order = f"order by {table}created_at desc, {table}id desc limit ${len(parameters)}"
    return f"where {' and '.join(parts)} {order}", parameters
