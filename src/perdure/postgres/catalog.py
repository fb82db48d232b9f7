"""The catalog in PostgreSQL: each method one statement, so that each is one transaction."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final
from uuid import UUID

import asyncpg

from perdure.domain.errors import Refused
from perdure.ports.catalog import AgentRecord, EnvironmentRecord, KeyRecord, PageQuery, WorkspaceRecord
from perdure.postgres.pool import ReadPool
from perdure.postgres.tables import read_row

_AGENT_SQL: Final = """
select a.id, a.workspace_id, v.version, a.version as latest_version, v.body, a.created_at, v.created_at as updated_at, a.archived_at
  from agent a join agent_version v on v.agent_id = a.id"""

_ARCHIVED_AGENT: Final = Refused("conflict", "agent_archived", "The agent is archived: it can be read but not changed.")
_ARCHIVED_ENVIRONMENT: Final = Refused(
    "conflict", "environment_archived", "The environment is archived: it can be read but not changed."
)


def _pages(table: str, query: PageQuery) -> tuple[str, list[Any]]:
    """The conditions of a page, newest first."""
    parts = [f"{table}.workspace_id = $1"]
    parameters: list[Any] = [query.workspace_id]
    if not query.include_archived:
        parts.append(f"{table}.archived_at is null")
    for value, sign in ((query.created_from, ">="), (query.created_until, "<=")):
        if value is not None:
            parameters.append(value)
            parts.append(f"{table}.created_at {sign} ${len(parameters)}")
    if query.after is not None:
        parameters += [*query.after]
        parts.append(f"({table}.created_at, {table}.id) < (${len(parameters) - 1}, ${len(parameters)})")
    order = f" order by {table}.created_at desc, {table}.id desc limit {int(query.limit)}"
    return " where " + " and ".join(parts) + order, parameters


class PostgresCatalog:
    """See `perdure.ports.catalog.Catalog`."""

    def __init__(self, pool: ReadPool) -> None:
        self._pool = pool

    # ---------------------------------------------------------------------------------------------------------- agents

    async def create_agent(self, workspace_id: UUID, agent_id: UUID, body: bytes) -> AgentRecord:
        """See `Catalog.create_agent`."""
        await self._pool.execute(
            """
            with made as (
                insert into agent (id, workspace_id, version, created_at, updated_at)
                select $1, $2, 1, n, n from (select clock_timestamp() as n) as t
                on conflict (id) do nothing returning id, created_at)
            insert into agent_version (agent_id, version, body, created_at) select id, 1, $3, created_at from made""",
            agent_id,
            workspace_id,
            body,
        )
        record = await self.read_agent(workspace_id, agent_id)
        assert record is not None
        return record

    async def read_agent(self, workspace_id: UUID, agent_id: UUID, version: int | None = None) -> AgentRecord | None:
        """See `Catalog.read_agent`."""
        sql = f"{_AGENT_SQL} where a.workspace_id = $1 and a.id = $2 and v.version = coalesce($3, a.version)"
        row = await self._pool.fetchrow(sql, workspace_id, agent_id, version)
        return None if row is None else read_row(AgentRecord, row)

    async def read_agents(self, query: PageQuery) -> list[AgentRecord]:
        """See `Catalog.read_agents`."""
        where, parameters = _pages("a", query)
        rows = await self._pool.fetch(f"{_AGENT_SQL} and v.version = a.version{where}", *parameters)
        return [read_row(AgentRecord, r) for r in rows]

    async def read_agent_versions(
        self, workspace_id: UUID, agent_id: UUID, before_version: int | None, limit: int
    ) -> list[AgentRecord]:
        """See `Catalog.read_agent_versions`."""
        sql = f"""{_AGENT_SQL} where a.workspace_id = $1 and a.id = $2 and ($3::bigint is null or v.version < $3)
                  order by v.version desc limit {int(limit)}"""
        rows = await self._pool.fetch(sql, workspace_id, agent_id, before_version)
        return [read_row(AgentRecord, r) for r in rows]

    async def update_agent(
        self, workspace_id: UUID, agent_id: UUID, expected_version: int, body: bytes
    ) -> AgentRecord | Refused | None:
        """See `Catalog.update_agent`. The row's own condition decides a race: one update moves the version, the others find it moved."""
        row = await self._pool.fetchrow(
            """
            with moved as (
                update agent set version = version + 1, updated_at = clock_timestamp()
                 where id = $2 and workspace_id = $1 and version = $3 and archived_at is null
                returning id, version, updated_at)
            insert into agent_version (agent_id, version, body, created_at)
            select id, version, $4, updated_at from moved
            on conflict do nothing returning version""",
            workspace_id,
            agent_id,
            expected_version,
            body,
        )
        record = await self.read_agent(workspace_id, agent_id, None if row is None else int(row["version"]))
        if row is not None or record is None:
            return record
        if record.archived_at is not None:
            return _ARCHIVED_AGENT
        return Refused(
            "conflict",
            "version_conflict",
            f"The agent is at version {record.latest_version}, not {expected_version}: read it again and repeat the update.",
            "version",
        )

    async def archive_agent(self, workspace_id: UUID, agent_id: UUID) -> AgentRecord | None:
        """See `Catalog.archive_agent`."""
        await self._archive("agent", workspace_id, agent_id)
        return await self.read_agent(workspace_id, agent_id)

    async def _archive(self, table: str, workspace_id: UUID, row_id: UUID) -> None:
        await self._pool.execute(
            f"update {table} set archived_at = clock_timestamp() where workspace_id = $1 and id = $2 and archived_at is null",
            workspace_id,
            row_id,
        )

    # ---------------------------------------------------------------------------------------------------- environments

    async def create_environment(self, workspace_id: UUID, environment_id: UUID, body: bytes) -> EnvironmentRecord:
        """See `Catalog.create_environment`."""
        await self._pool.execute(
            """
            insert into environment (id, workspace_id, body, created_at, updated_at)
            select $1, $2, $3, n, n from (select clock_timestamp() as n) as t on conflict (id) do nothing""",
            environment_id,
            workspace_id,
            body,
        )
        record = await self.read_environment(workspace_id, environment_id)
        assert record is not None
        return record

    async def read_environment(self, workspace_id: UUID, environment_id: UUID) -> EnvironmentRecord | None:
        """See `Catalog.read_environment`."""
        sql = "select * from environment where workspace_id = $1 and id = $2"
        row = await self._pool.fetchrow(sql, workspace_id, environment_id)
        return None if row is None else read_row(EnvironmentRecord, row)

    async def read_environments(self, query: PageQuery) -> list[EnvironmentRecord]:
        """See `Catalog.read_environments`."""
        where, parameters = _pages("e", query)
        rows = await self._pool.fetch(f"select e.* from environment e{where}", *parameters)
        return [read_row(EnvironmentRecord, r) for r in rows]

    async def update_environment(
        self, workspace_id: UUID, environment_id: UUID, expected_at: datetime, body: bytes
    ) -> EnvironmentRecord | Refused | None:
        """See `Catalog.update_environment`."""
        row = await self._pool.fetchrow(
            """
            update environment set body = $4, updated_at = greatest(clock_timestamp(), updated_at + interval '1 microsecond')
             where workspace_id = $1 and id = $2 and updated_at = $3 and archived_at is null returning *""",
            workspace_id,
            environment_id,
            expected_at,
            body,
        )
        if row is not None:
            return read_row(EnvironmentRecord, row)
        record = await self.read_environment(workspace_id, environment_id)
        if record is None:
            return None
        if record.archived_at is not None:
            return _ARCHIVED_ENVIRONMENT
        return Refused(
            "conflict", "environment_changed", "The environment changed meanwhile: read it again and repeat the update."
        )

    async def archive_environment(self, workspace_id: UUID, environment_id: UUID) -> EnvironmentRecord | None:
        """See `Catalog.archive_environment`."""
        await self._archive("environment", workspace_id, environment_id)
        return await self.read_environment(workspace_id, environment_id)

    async def delete_environment(self, workspace_id: UUID, environment_id: UUID) -> bool:
        """See `Catalog.delete_environment`."""
        row = await self._pool.fetchrow(
            "delete from environment where workspace_id = $1 and id = $2 returning id", workspace_id, environment_id
        )
        return row is not None

    # ------------------------------------------------------------------------------------------------ workspaces, keys

    async def create_workspace(self, workspace_id: UUID, name: str) -> WorkspaceRecord | Refused:
        """See `Catalog.create_workspace`."""
        try:
            row = await self._pool.fetchrow(
                "insert into workspace (id, name) values ($1, $2) returning *", workspace_id, name
            )
        except asyncpg.UniqueViolationError:
            return Refused("conflict", "workspace_exists", f"A workspace named {name!r} already exists.", "name")
        return read_row(WorkspaceRecord, row)

    async def read_workspaces(self) -> list[WorkspaceRecord]:
        """See `Catalog.read_workspaces`."""
        return _all(WorkspaceRecord, await self._pool.fetch("select * from workspace order by created_at, id"))

    async def create_key(self, key_id: UUID, workspace_id: UUID, name: str, digest: bytes, hint: str) -> KeyRecord:
        """See `Catalog.create_key`."""
        row = await self._pool.fetchrow(
            "insert into api_key (id, workspace_id, name, digest, hint) values ($1, $2, $3, $4, $5) returning *",
            key_id,
            workspace_id,
            name,
            digest,
            hint,
        )
        return read_row(KeyRecord, row)

    async def find_key(self, digest: bytes) -> KeyRecord | None:
        """See `Catalog.find_key`."""
        row = await self._pool.fetchrow("select * from api_key where digest = $1", digest)
        return None if row is None else read_row(KeyRecord, row)

    async def read_keys(self, workspace_id: UUID | None = None) -> list[KeyRecord]:
        """See `Catalog.read_keys`."""
        sql = "select * from api_key where $1::uuid is null or workspace_id = $1 order by created_at, id"
        return _all(KeyRecord, await self._pool.fetch(sql, workspace_id))

    async def revoke_key(self, key_id: UUID) -> KeyRecord | None:
        """See `Catalog.revoke_key`."""
        row = await self._pool.fetchrow(
            "update api_key set revoked_at = coalesce(revoked_at, clock_timestamp()) where id = $1 returning *", key_id
        )
        return None if row is None else read_row(KeyRecord, row)

    async def touch_keys(self, used: dict[UUID, datetime]) -> None:
        """See `Catalog.touch_keys`."""
        await self._pool.execute(
            """
            update api_key k set last_used_at = n.at from unnest($1::uuid[], $2::timestamptz[]) as n (id, at)
             where k.id = n.id and (k.last_used_at is null or k.last_used_at < n.at)""",
            list(used),
            list(used.values()),
        )


def _all(kind: type[Any], rows: Sequence[Any]) -> list[Any]:
    return [read_row(kind, r) for r in rows]
