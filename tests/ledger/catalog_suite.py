"""What every catalog does. Each behaviour is given a catalog that nobody else uses."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

from perdure.domain.errors import Refused
from perdure.ports.catalog import AgentRecord, Catalog, EnvironmentRecord, PageQuery, WorkspaceRecord

Behaviour = Callable[[Catalog], Awaitable[None]]


async def a_workspace(catalog: Catalog, name: str = "first") -> UUID:
    made = await catalog.create_workspace(uuid4(), name)
    assert isinstance(made, WorkspaceRecord)
    return made.id


async def agent_is_made_at_version_one(catalog: Catalog) -> None:
    workspace, agent = await a_workspace(catalog), uuid4()
    made = await catalog.create_agent(workspace, agent, b'{"name":"\\u0000"}')
    assert (made.id, made.workspace_id, made.version, made.latest_version) == (agent, workspace, 1, 1)
    assert made.created_at == made.updated_at and made.archived_at is None
    assert await catalog.read_agent(workspace, agent) == made
    assert await catalog.read_agent(workspace, agent, 1) == made


async def agent_of_another_workspace_is_missing(catalog: Catalog) -> None:
    workspace, other, agent = await a_workspace(catalog), await a_workspace(catalog, "other"), uuid4()
    await catalog.create_agent(workspace, agent, b"1")
    assert await catalog.read_agent(other, agent) is None
    assert await catalog.read_agent_versions(other, agent, None, 10) == []
    assert await catalog.update_agent(other, agent, 1, b"2") is None
    assert await catalog.archive_agent(other, agent) is None
    assert (await catalog.read_agents(PageQuery(workspace_id=other, limit=10))) == []
    assert await catalog.read_agent(workspace, uuid4()) is None


async def agent_update_adds_a_version_and_keeps_the_old(catalog: Catalog) -> None:
    workspace, agent = await a_workspace(catalog), uuid4()
    first = await catalog.create_agent(workspace, agent, b"1")
    second = await catalog.update_agent(workspace, agent, 1, b"2")
    assert isinstance(second, AgentRecord)
    assert (second.version, second.latest_version, second.body) == (2, 2, b"2")
    assert second.created_at == first.created_at and second.updated_at > first.updated_at
    old = await catalog.read_agent(workspace, agent, 1)
    assert old is not None
    assert (old.version, old.latest_version, old.body, old.updated_at) == (1, 2, b"1", first.updated_at)
    assert await catalog.read_agent(workspace, agent) == second
    assert await catalog.read_agent(workspace, agent, 3) is None


async def agent_update_behind_another_version_is_refused(catalog: Catalog) -> None:
    workspace, agent = await a_workspace(catalog), uuid4()
    await catalog.create_agent(workspace, agent, b"1")
    await catalog.update_agent(workspace, agent, 1, b"2")
    refused = await catalog.update_agent(workspace, agent, 1, b"3")
    assert isinstance(refused, Refused) and (refused.kind, refused.code) == ("conflict", "version_mismatch")
    # The same content makes it no repeat: the caller read version 1.
    assert isinstance(await catalog.update_agent(workspace, agent, 1, b"2"), Refused)
    latest = await catalog.read_agent(workspace, agent)
    assert latest is not None and (latest.version, latest.body) == (2, b"2")


async def of_concurrent_agent_updates_one_commits(catalog: Catalog) -> None:
    workspace, agent = await a_workspace(catalog), uuid4()
    await catalog.create_agent(workspace, agent, b"0")
    results = await asyncio.gather(
        *(catalog.update_agent(workspace, agent, 1, f"{n}".encode()) for n in range(1, 9)),
    )
    won = [r for r in results if isinstance(r, AgentRecord)]
    assert len(won) == 1 and all(isinstance(r, Refused) for r in results if r is not won[0])
    assert await catalog.read_agent(workspace, agent) == won[0]
    assert len(await catalog.read_agent_versions(workspace, agent, None, 10)) == 2


async def archived_agent_stays_archived(catalog: Catalog) -> None:
    workspace, agent = await a_workspace(catalog), uuid4()
    made = await catalog.create_agent(workspace, agent, b"1")
    archived = await catalog.archive_agent(workspace, agent)
    assert archived is not None and archived.archived_at is not None
    assert archived.updated_at == made.updated_at
    assert await catalog.archive_agent(workspace, agent) == archived
    refused = await catalog.update_agent(workspace, agent, 1, b"2")
    assert isinstance(refused, Refused) and (refused.kind, refused.code) == ("conflict", "agent_archived")
    assert await catalog.read_agent(workspace, agent) == archived


async def archive_and_updates_at_once_leave_it_archived(catalog: Catalog) -> None:
    workspace, agent = await a_workspace(catalog), uuid4()
    await catalog.create_agent(workspace, agent, b"1")
    await asyncio.gather(
        *(catalog.update_agent(workspace, agent, 1, b"2") for _ in range(3)),
        catalog.archive_agent(workspace, agent),
        *(catalog.update_agent(workspace, agent, 2, b"3") for _ in range(3)),
    )
    latest = await catalog.read_agent(workspace, agent)
    assert latest is not None and latest.archived_at is not None
    versions = await catalog.read_agent_versions(workspace, agent, None, 10)
    assert [v.version for v in versions] == list(range(latest.version, 0, -1))
    assert isinstance(await catalog.update_agent(workspace, agent, latest.version, b"4"), Refused)


async def agent_versions_come_newest_first_in_pages(catalog: Catalog) -> None:
    workspace, agent = await a_workspace(catalog), uuid4()
    await catalog.create_agent(workspace, agent, b"1")
    for version in range(1, 5):
        await catalog.update_agent(workspace, agent, version, str(version + 1).encode())
    first = await catalog.read_agent_versions(workspace, agent, None, 2)
    rest = await catalog.read_agent_versions(workspace, agent, first[-1].version, 10)
    assert [v.version for v in (*first, *rest)] == [5, 4, 3, 2, 1]
    assert [v.body for v in (*first, *rest)] == [b"5", b"4", b"3", b"2", b"1"]
    assert {v.latest_version for v in (*first, *rest)} == {5}
    assert await catalog.read_agent_versions(workspace, agent, 1, 10) == []


async def agents_come_newest_first_in_pages(catalog: Catalog) -> None:
    workspace = await a_workspace(catalog)
    made = [await catalog.create_agent(workspace, uuid4(), b"{}") for _ in range(5)]
    newest_first = [a.id for a in sorted(made, key=lambda a: (a.created_at, a.id), reverse=True)]
    seen: list[UUID] = []
    after = None
    while page := await catalog.read_agents(PageQuery(workspace_id=workspace, after=after, limit=2)):
        assert len(page) <= 2
        seen += [a.id for a in page]
        after = (page[-1].created_at, page[-1].id)
    assert seen == newest_first


async def agents_are_filtered_by_archive_and_time(catalog: Catalog) -> None:
    workspace = await a_workspace(catalog)
    one, two, three = [await catalog.create_agent(workspace, uuid4(), b"{}") for _ in range(3)]
    archived = await catalog.archive_agent(workspace, two.id)
    assert [a.id for a in await catalog.read_agents(PageQuery(workspace_id=workspace, limit=9))] == [three.id, one.id]
    everything = await catalog.read_agents(PageQuery(workspace_id=workspace, include_archived=True, limit=9))
    assert [a.id for a in everything] == [three.id, two.id, one.id] and everything[1] == archived
    # Both bounds belong to the range.
    bounded = PageQuery(
        workspace_id=workspace,
        include_archived=True,
        created_from=two.created_at,
        created_until=two.created_at,
        limit=9,
    )
    assert [a.id for a in await catalog.read_agents(bounded)] == [two.id]


async def environment_is_made_read_and_removed(catalog: Catalog) -> None:
    workspace, other, environment = await a_workspace(catalog), await a_workspace(catalog, "other"), uuid4()
    made = await catalog.create_environment(workspace, environment, b"{}")
    assert made.created_at == made.updated_at and made.archived_at is None and made.body == b"{}"
    assert await catalog.read_environment(workspace, environment) == made
    assert await catalog.read_environment(other, environment) is None
    assert await catalog.update_environment(other, environment, made.updated_at, b"1") is None
    assert await catalog.archive_environment(other, environment) is None
    assert await catalog.delete_environment(other, environment) is False
    assert await catalog.delete_environment(workspace, environment) is True
    assert await catalog.delete_environment(workspace, environment) is False
    assert await catalog.read_environment(workspace, environment) is None


async def environment_update_needs_the_latest_time(catalog: Catalog) -> None:
    workspace, environment = await a_workspace(catalog), uuid4()
    made = await catalog.create_environment(workspace, environment, b"1")
    updated = await catalog.update_environment(workspace, environment, made.updated_at, b"2")
    assert isinstance(updated, EnvironmentRecord)
    assert updated.body == b"2" and updated.updated_at > made.updated_at and updated.created_at == made.created_at
    refused = await catalog.update_environment(workspace, environment, made.updated_at, b"3")
    assert isinstance(refused, Refused) and (refused.kind, refused.code) == ("conflict", "environment_changed")
    assert await catalog.read_environment(workspace, environment) == updated


async def of_concurrent_environment_updates_one_commits(catalog: Catalog) -> None:
    workspace, environment = await a_workspace(catalog), uuid4()
    made = await catalog.create_environment(workspace, environment, b"0")
    results = await asyncio.gather(
        *(catalog.update_environment(workspace, environment, made.updated_at, f"{n}".encode()) for n in range(1, 9)),
    )
    won = [r for r in results if isinstance(r, EnvironmentRecord)]
    assert len(won) == 1
    assert await catalog.read_environment(workspace, environment) == won[0]


async def archived_environment_stays_archived(catalog: Catalog) -> None:
    workspace, environment = await a_workspace(catalog), uuid4()
    await catalog.create_environment(workspace, environment, b"1")
    archived = await catalog.archive_environment(workspace, environment)
    assert archived is not None and archived.archived_at is not None
    assert await catalog.archive_environment(workspace, environment) == archived
    refused = await catalog.update_environment(workspace, environment, archived.updated_at, b"2")
    assert isinstance(refused, Refused) and (refused.kind, refused.code) == ("conflict", "environment_archived")
    assert await catalog.delete_environment(workspace, environment) is True


async def environments_come_newest_first_in_pages(catalog: Catalog) -> None:
    workspace = await a_workspace(catalog)
    one, two, three = [await catalog.create_environment(workspace, uuid4(), b"{}") for _ in range(3)]
    await catalog.archive_environment(workspace, two.id)
    first = await catalog.read_environments(PageQuery(workspace_id=workspace, include_archived=True, limit=2))
    assert [e.id for e in first] == [three.id, two.id]
    after = (first[-1].created_at, first[-1].id)
    rest = await catalog.read_environments(PageQuery(workspace_id=workspace, after=after, limit=2))
    assert [e.id for e in rest] == [one.id]
    until = PageQuery(workspace_id=workspace, created_until=two.created_at, limit=9)
    assert [e.id for e in await catalog.read_environments(until)] == [one.id]
    since = PageQuery(workspace_id=workspace, created_from=two.created_at, limit=9)
    assert [e.id for e in await catalog.read_environments(since)] == [three.id]


async def workspace_name_is_taken_once(catalog: Catalog) -> None:
    results = await asyncio.gather(*(catalog.create_workspace(uuid4(), "same") for _ in range(4)))
    made = [r for r in results if isinstance(r, WorkspaceRecord)]
    refused = [r for r in results if isinstance(r, Refused)]
    assert len(made) == 1
    assert {(r.kind, r.code, r.param) for r in refused} == {("conflict", "workspace_name_taken", "name")}
    second = await catalog.create_workspace(uuid4(), "second")
    assert await catalog.read_workspaces() == [made[0], second]


async def key_is_found_by_its_digest_until_and_after_it_is_revoked(catalog: Catalog) -> None:
    workspace, key = await a_workspace(catalog), uuid4()
    made = await catalog.create_key(key, workspace, "laptop", b"d" * 32, "pk-abc")
    assert (made.id, made.workspace_id, made.name, made.digest, made.hint) == (
        key,
        workspace,
        "laptop",
        b"d" * 32,
        "pk-abc",
    )
    assert made.last_used_at is None and made.revoked_at is None
    assert await catalog.find_key(b"d" * 32) == made
    assert await catalog.find_key(b"e" * 32) is None
    revoked = await catalog.revoke_key(key)
    assert revoked is not None and revoked.revoked_at is not None
    assert await catalog.revoke_key(key) == revoked
    assert await catalog.find_key(b"d" * 32) == revoked
    assert await catalog.revoke_key(uuid4()) is None


async def keys_come_oldest_first(catalog: Catalog) -> None:
    workspace, other = await a_workspace(catalog), await a_workspace(catalog, "other")
    one = await catalog.create_key(uuid4(), workspace, "1", b"1", "h")
    two = await catalog.create_key(uuid4(), other, "2", b"2", "h")
    three = await catalog.create_key(uuid4(), workspace, "3", b"3", "h")
    assert await catalog.read_keys() == [one, two, three]
    assert await catalog.read_keys(workspace) == [one, three]


async def key_remembers_when_it_was_used(catalog: Catalog) -> None:
    workspace, key = await a_workspace(catalog), uuid4()
    await catalog.create_key(key, workspace, "1", b"1", "h")
    at = datetime.now(UTC) + timedelta(seconds=5)
    await catalog.touch_keys({})
    await catalog.touch_keys({key: at, uuid4(): at})
    found = await catalog.find_key(b"1")
    assert found is not None and found.last_used_at == at


BEHAVIOURS: tuple[Behaviour, ...] = (
    agent_is_made_at_version_one,
    agent_of_another_workspace_is_missing,
    agent_update_adds_a_version_and_keeps_the_old,
    agent_update_behind_another_version_is_refused,
    of_concurrent_agent_updates_one_commits,
    archived_agent_stays_archived,
    archive_and_updates_at_once_leave_it_archived,
    agent_versions_come_newest_first_in_pages,
    agents_come_newest_first_in_pages,
    agents_are_filtered_by_archive_and_time,
    environment_is_made_read_and_removed,
    environment_update_needs_the_latest_time,
    of_concurrent_environment_updates_one_commits,
    archived_environment_stays_archived,
    environments_come_newest_first_in_pages,
    workspace_name_is_taken_once,
    key_is_found_by_its_digest_until_and_after_it_is_revoked,
    keys_come_oldest_first,
    key_remembers_when_it_was_used,
)
