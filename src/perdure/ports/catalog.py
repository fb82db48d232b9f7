"""The catalog: agents, environments, workspaces and API keys. Small, rarely written, read by id."""

from datetime import datetime
from typing import Protocol
from uuid import UUID

import msgspec

from perdure.domain.errors import Refused


class AgentRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One version of an agent. `body` is its configuration, JSON, with every default filled in."""

    id: UUID
    workspace_id: UUID
    version: int
    latest_version: int
    body: bytes
    created_at: datetime
    """Of the agent."""
    updated_at: datetime
    """Of this version."""
    archived_at: datetime | None


class EnvironmentRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An environment. `body` is its configuration, JSON, with every default filled in."""

    id: UUID
    workspace_id: UUID
    body: bytes
    created_at: datetime
    updated_at: datetime
    archived_at: datetime | None


class PageQuery(msgspec.Struct, frozen=True, kw_only=True):
    """A page of a workspace's rows, newest first, after the row with this (created_at, id)."""

    workspace_id: UUID
    include_archived: bool = False
    created_from: datetime | None = None
    created_until: datetime | None = None
    after: tuple[datetime, UUID] | None = None
    limit: int


class WorkspaceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant."""

    id: UUID
    name: str
    created_at: datetime


class KeyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An API key as stored: its secret is gone, only the SHA-256 of it is kept."""

    id: UUID
    workspace_id: UUID
    name: str
    digest: bytes
    hint: str
    """The first characters of the key, to tell keys apart."""
    created_at: datetime
    last_used_at: datetime | None
    revoked_at: datetime | None


class Catalog(Protocol):
    """Each method is one transaction. Ids are made by the caller. What is missing or another workspace's is None."""

    async def create_agent(self, workspace_id: UUID, agent_id: UUID, body: bytes) -> AgentRecord:
        """Version 1 of a new agent."""
        ...

    async def read_agent(self, workspace_id: UUID, agent_id: UUID, version: int | None = None) -> AgentRecord | None:
        """A version, or the latest."""
        ...

    async def read_agents(self, query: PageQuery) -> list[AgentRecord]:
        """A page of latest versions."""
        ...

    async def read_agent_versions(
        self, workspace_id: UUID, agent_id: UUID, before_version: int | None, limit: int
    ) -> list[AgentRecord]:
        """Versions of one agent, newest first."""
        ...

    async def update_agent(
        self, workspace_id: UUID, agent_id: UUID, expected_version: int, body: bytes
    ) -> AgentRecord | Refused | None:
        """Add a version behind `expected_version`; refused when another one came first or the agent is archived."""
        ...

    async def archive_agent(self, workspace_id: UUID, agent_id: UUID) -> AgentRecord | None:
        """Archive; repeatable."""
        ...

    async def create_environment(self, workspace_id: UUID, environment_id: UUID, body: bytes) -> EnvironmentRecord:
        """A new environment."""
        ...

    async def read_environment(self, workspace_id: UUID, environment_id: UUID) -> EnvironmentRecord | None:
        """One environment."""
        ...

    async def read_environments(self, query: PageQuery) -> list[EnvironmentRecord]:
        """A page."""
        ...

    async def update_environment(
        self, workspace_id: UUID, environment_id: UUID, expected_at: datetime, body: bytes
    ) -> EnvironmentRecord | Refused | None:
        """Replace the body unless it changed since `expected_at` (its `updated_at`) or is archived."""
        ...

    async def archive_environment(self, workspace_id: UUID, environment_id: UUID) -> EnvironmentRecord | None:
        """Archive; repeatable."""
        ...

    async def delete_environment(self, workspace_id: UUID, environment_id: UUID) -> bool:
        """Remove it; False when it was not there. Sessions keep what they were made with."""
        ...

    async def create_workspace(self, workspace_id: UUID, name: str) -> WorkspaceRecord | Refused:
        """A new tenant; refused when the name is taken."""
        ...

    async def read_workspaces(self) -> list[WorkspaceRecord]:
        """All of them, oldest first."""
        ...

    async def create_key(self, key_id: UUID, workspace_id: UUID, name: str, digest: bytes, hint: str) -> KeyRecord:
        """A new API key."""
        ...

    async def find_key(self, digest: bytes) -> KeyRecord | None:
        """The key with this digest, revoked or not."""
        ...

    async def read_keys(self, workspace_id: UUID | None = None) -> list[KeyRecord]:
        """The keys of a workspace, or all, oldest first."""
        ...

    async def revoke_key(self, key_id: UUID) -> KeyRecord | None:
        """Revoke; repeatable."""
        ...

    async def touch_keys(self, used: dict[UUID, datetime]) -> None:
        """Note when keys were last used (coalesced by the caller)."""
        ...
