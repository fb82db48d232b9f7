"""The catalog in memory: the same answers as PostgreSQL, for tests that need no database."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import TypeVar
from uuid import UUID

import msgspec

from perdure.domain.errors import Refused, Unavailable
from perdure.ports.catalog import AgentRecord, EnvironmentRecord, KeyRecord, PageQuery, WorkspaceRecord

Row = TypeVar("Row", AgentRecord, EnvironmentRecord)


class OracleCatalog:
    """`ports.catalog.Catalog` in dictionaries. Each method is atomic because it never awaits.

    Times never repeat, so that order by time is order of making. `away` makes every call fail as a lost database does.
    """

    def __init__(self, *, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._now = now
        self._last_at = datetime.min.replace(tzinfo=UTC)
        self.away = False
        self.calls: list[str] = []
        self._versions: dict[UUID, list[AgentRecord]] = {}
        self._environments: dict[UUID, EnvironmentRecord] = {}
        self._workspaces: dict[UUID, WorkspaceRecord] = {}
        self._keys: dict[UUID, KeyRecord] = {}

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if self.away:
            raise Unavailable

    def _tick(self) -> datetime:
        self._last_at = max(self._now(), self._last_at + timedelta(microseconds=1))
        return self._last_at

    # ------------------------------------------------------------------------------------------------------------- agents

    async def create_agent(self, workspace_id: UUID, agent_id: UUID, body: bytes) -> AgentRecord:
        """Version 1 of a new agent."""
        self._call("create_agent")
        at = self._tick()
        record = AgentRecord(
            id=agent_id,
            workspace_id=workspace_id,
            version=1,
            latest_version=1,
            body=body,
            created_at=at,
            updated_at=at,
            archived_at=None,
        )
        self._versions[agent_id] = [record]
        return record

    def _own_versions(self, workspace_id: UUID, agent_id: UUID) -> list[AgentRecord]:
        versions = self._versions.get(agent_id, [])
        return versions if versions and versions[0].workspace_id == workspace_id else []

    async def read_agent(self, workspace_id: UUID, agent_id: UUID, version: int | None = None) -> AgentRecord | None:
        """A version, or the latest."""
        self._call("read_agent")
        versions = self._own_versions(workspace_id, agent_id)
        if version is None:
            return versions[-1] if versions else None
        return next((record for record in versions if record.version == version), None)

    async def read_agents(self, query: PageQuery) -> list[AgentRecord]:
        """A page of latest versions."""
        self._call("read_agents")
        return _page([versions[-1] for versions in self._versions.values()], query)

    async def read_agent_versions(
        self, workspace_id: UUID, agent_id: UUID, before_version: int | None, limit: int
    ) -> list[AgentRecord]:
        """Versions of one agent, newest first."""
        self._call("read_agent_versions")
        rows = [
            record
            for record in reversed(self._own_versions(workspace_id, agent_id))
            if before_version is None or record.version < before_version
        ]
        return rows[:limit]

    async def update_agent(
        self, workspace_id: UUID, agent_id: UUID, expected_version: int, body: bytes
    ) -> AgentRecord | Refused | None:
        """Add a version behind `expected_version`; refused when another one came first or the agent is archived."""
        self._call("update_agent")
        versions = self._own_versions(workspace_id, agent_id)
        if not versions:
            return None
        latest = versions[-1]
        if latest.archived_at is not None:
            return Refused("conflict", "agent_archived", "The agent is archived.")
        if latest.version != expected_version:
            return Refused("conflict", "version_mismatch", f"The agent is at version {latest.version}.")
        version = latest.version + 1
        added = msgspec.structs.replace(
            latest, version=version, latest_version=version, body=body, updated_at=self._tick()
        )
        self._versions[agent_id] = [
            *(msgspec.structs.replace(record, latest_version=version) for record in versions),
            added,
        ]
        return added

    async def archive_agent(self, workspace_id: UUID, agent_id: UUID) -> AgentRecord | None:
        """Archive; repeatable."""
        self._call("archive_agent")
        versions = self._own_versions(workspace_id, agent_id)
        if not versions:
            return None
        if versions[-1].archived_at is None:
            at = self._tick()
            versions = [msgspec.structs.replace(record, archived_at=at) for record in versions]
            self._versions[agent_id] = versions
        return versions[-1]

    # ------------------------------------------------------------------------------------------------------- environments

    async def create_environment(self, workspace_id: UUID, environment_id: UUID, body: bytes) -> EnvironmentRecord:
        """A new environment."""
        self._call("create_environment")
        at = self._tick()
        record = EnvironmentRecord(
            id=environment_id, workspace_id=workspace_id, body=body, created_at=at, updated_at=at, archived_at=None
        )
        self._environments[environment_id] = record
        return record

    def _own_environment(self, workspace_id: UUID, environment_id: UUID) -> EnvironmentRecord | None:
        record = self._environments.get(environment_id)
        return record if record is not None and record.workspace_id == workspace_id else None

    async def read_environment(self, workspace_id: UUID, environment_id: UUID) -> EnvironmentRecord | None:
        """One environment."""
        self._call("read_environment")
        return self._own_environment(workspace_id, environment_id)

    async def read_environments(self, query: PageQuery) -> list[EnvironmentRecord]:
        """A page."""
        self._call("read_environments")
        return _page(list(self._environments.values()), query)

    async def update_environment(
        self, workspace_id: UUID, environment_id: UUID, expected_at: datetime, body: bytes
    ) -> EnvironmentRecord | Refused | None:
        """Replace the body unless it changed since `expected_at` or is archived."""
        self._call("update_environment")
        record = self._own_environment(workspace_id, environment_id)
        if record is None:
            return None
        if record.archived_at is not None:
            return Refused("conflict", "environment_archived", "The environment is archived.")
        if record.updated_at != expected_at:
            return Refused("conflict", "environment_changed", "The environment was changed meanwhile.")
        updated = msgspec.structs.replace(record, body=body, updated_at=self._tick())
        self._environments[environment_id] = updated
        return updated

    async def archive_environment(self, workspace_id: UUID, environment_id: UUID) -> EnvironmentRecord | None:
        """Archive; repeatable."""
        self._call("archive_environment")
        record = self._own_environment(workspace_id, environment_id)
        if record is not None and record.archived_at is None:
            at = self._tick()
            record = msgspec.structs.replace(record, archived_at=at, updated_at=at)
            self._environments[environment_id] = record
        return record

    async def delete_environment(self, workspace_id: UUID, environment_id: UUID) -> bool:
        """Remove it; False when it was not there."""
        self._call("delete_environment")
        if self._own_environment(workspace_id, environment_id) is None:
            return False
        del self._environments[environment_id]
        return True

    # ------------------------------------------------------------------------------------------------- workspaces and keys

    async def create_workspace(self, workspace_id: UUID, name: str) -> WorkspaceRecord | Refused:
        """A new tenant; refused when the name is taken."""
        self._call("create_workspace")
        if any(record.name == name for record in self._workspaces.values()):
            return Refused("conflict", "workspace_name_taken", f"A workspace named {name!r} exists.", "name")
        record = WorkspaceRecord(id=workspace_id, name=name, created_at=self._tick())
        self._workspaces[workspace_id] = record
        return record

    async def read_workspaces(self) -> list[WorkspaceRecord]:
        """All of them, oldest first."""
        self._call("read_workspaces")
        return list(self._workspaces.values())

    async def create_key(self, key_id: UUID, workspace_id: UUID, name: str, digest: bytes, hint: str) -> KeyRecord:
        """A new API key."""
        self._call("create_key")
        record = KeyRecord(
            id=key_id,
            workspace_id=workspace_id,
            name=name,
            digest=digest,
            hint=hint,
            created_at=self._tick(),
            last_used_at=None,
            revoked_at=None,
        )
        self._keys[key_id] = record
        return record

    async def find_key(self, digest: bytes) -> KeyRecord | None:
        """The key with this digest, revoked or not."""
        self._call("find_key")
        return next((record for record in self._keys.values() if record.digest == digest), None)

    async def read_keys(self, workspace_id: UUID | None = None) -> list[KeyRecord]:
        """The keys of a workspace, or all, oldest first."""
        self._call("read_keys")
        return [record for record in self._keys.values() if workspace_id in (None, record.workspace_id)]

    async def revoke_key(self, key_id: UUID) -> KeyRecord | None:
        """Revoke; repeatable."""
        self._call("revoke_key")
        record = self._keys.get(key_id)
        if record is not None and record.revoked_at is None:
            record = self._keys[key_id] = msgspec.structs.replace(record, revoked_at=self._tick())
        return record

    async def touch_keys(self, used: dict[UUID, datetime]) -> None:
        """Note when keys were last used."""
        self._call("touch_keys")
        for key_id, at in used.items():
            if key_id in self._keys:
                self._keys[key_id] = msgspec.structs.replace(self._keys[key_id], last_used_at=at)


def _page(rows: list[Row], query: PageQuery) -> list[Row]:
    kept = [
        row
        for row in rows
        if row.workspace_id == query.workspace_id
        and (query.include_archived or row.archived_at is None)
        and (query.created_from is None or row.created_at >= query.created_from)
        and (query.created_until is None or row.created_at <= query.created_until)
        and (query.after is None or (row.created_at, row.id) < query.after)
    ]
    return sorted(kept, key=lambda row: (row.created_at, row.id), reverse=True)[: query.limit]
