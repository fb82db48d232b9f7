"""Cases from the field that need real processes, a real database, or many sessions."""

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.process.test_kills import exists
from tests.process.world import World, plan, uuid_of

from perdure import bootstrap
from perdure.bootstrap import open_server
from perdure.postgres.housekeeping import sessions_being_deleted
from perdure.settings import load
from perdure.testing.model_server import ModelServerThread, Reply, Text
from perdure.testing.processes import Caller, Json, until

FAIL_ONCE = """
create sequence failures;
create function fail_once() returns trigger language plpgsql as $$
begin
    if new.type = 'item.closed' and new.kind = 'tool' and nextval('failures') <= {times} then
        raise exception 'made to fail' using errcode = '{code}';
    end if;
    return new;
end $$;
create trigger fail_once before insert on event for each row execute function fail_once()"""

SESSIONS = 2_000
STREAMS = 300
CLIENTS = 20


def texts_of(events: list[Json], kind: str) -> list[str]:
    return [e["content"][0]["text"] for e in events if e["type"] == kind]


@pytest.mark.case("B013")
async def test_two_clients_at_once_through_two_processes_share_one_order(world: World) -> None:
    """Forty messages from two clients, a batch among them, an update and an interrupt in the middle; each API has its own writer."""
    first = await world.serve("serve")
    second = await world.child("serve").start()
    await world.child("worker").start()
    session = await world.session()
    path = f"/v1/sessions/{session}/events"

    async def client(api: Caller, name: str) -> list[str]:
        said: list[str] = []
        for n in range(20):
            events = [plan("talk", f"{name}{n}")]
            if name == "a" and n == 7:
                events = [plan("talk", f"{name}{n}{part}") for part in "xyz"]
            answer = await api.call("POST", path, {"events": events})
            for event in answer.ok()["data"]:
                world.checker.acknowledge(uuid_of(session), event["id"])
                said.append(event["id"])
        return said

    async def middle(api: Caller) -> None:
        await world.provider.server.wait_for_requests(world.first_request + 5, 20)
        (await api.call("POST", f"/v1/sessions/{session}", {"metadata": {"between": "yes"}})).ok()
        interrupt = await api.call("POST", path, {"events": [{"type": "user.interrupt"}]})
        world.checker.acknowledge(uuid_of(session), interrupt.ok()["data"][0]["id"])

    a, b, _ = await asyncio.gather(client(first.api, "a"), client(second.api, "b"), middle(second.api))
    assert await world.at_rest(session) == "end_turn"
    one, other = await first.api.events(session), await second.api.events(session)
    assert one == other
    order = [e["id"] for e in one if e["type"] == "user.message"]
    assert sorted(order) == sorted(a + b)
    for said in (a, b):
        assert [i for i in order if i in said] == said
    assert order.index(a[9]) - order.index(a[7]) == 2, "a batch is not torn apart"
    # The strict provider and the checker say that no two turns ran at once.
    await world.check()


@pytest.mark.case("B020")
@pytest.mark.parametrize("code", ["40P01", "XX000"], ids=["passing", "unexplained"])
async def test_result_of_a_tool_whose_first_commit_fails_is_not_lost(world: World, code: str) -> None:
    """What passes is tried again and the result is there; what can't be explained leaves the call ambiguous, never missing."""
    await world.serve()
    await world.pool.execute(FAIL_ONCE.format(code=code, times=1))
    session = await world.session(policy="always_ask")
    await world.say(session, "tool", "a")
    assert await world.at_rest(session) == "requires_action"
    asked = (await world.listed(session))[-1]["stop_reason"]["event_ids"]
    await world.send(session, {"type": "user.tool_confirmation", "tool_use_id": asked[0], "result": "allow"})
    assert await world.at_rest(session) == "end_turn"
    await world.say(session, "talk", "b")
    assert await world.at_rest(session) == "end_turn"
    events = await world.listed(session)
    results = [e for e in events if e["type"] == "agent.tool_result"]
    assert [e["tool_use_id"] for e in results] == asked
    assert [e["is_error"] for e in results] == [code == "XX000"]
    effects = world.data / "workspaces" / world.token_of(session) / "effects"
    assert effects.read_text().split() == ["a"]
    sent = world.provider.server.requests[-1].body["messages"]
    assert sum(b["type"] == "tool_result" for m in sent for b in m["content"]) == 1
    await world.check()


@pytest.mark.case("B048")
@pytest.mark.rule("MA-C11.4")
async def test_late_writer_does_not_bring_a_deleted_session_back(world: World) -> None:
    """Interrupted and deleted while its tool still runs; the worker writes what it has afterwards, and finds nothing."""
    server = await world.serve()
    session = await world.session()
    await world.say(session, "longtool", "a")
    workspace = world.data / "workspaces" / world.token_of(session)
    await until(lambda: exists(workspace / "effects"), 20)
    async with server.api.stream(session) as frames:
        refused = await world.request("DELETE", f"/v1/sessions/{session}")
        assert refused.status == 400, "a running session is interrupted first"
        await world.send(session, {"type": "user.interrupt"})
        await world.at_rest(session)
        assert (await world.request("DELETE", f"/v1/sessions/{session}")).status == 200
        async with asyncio.timeout(20):
            last = [frame.event async for frame in frames][-1]
        assert last["type"] == "session.deleted"
    for method, path in (("GET", ""), ("GET", "/events"), ("POST", "/events")):
        body = {"events": [plan("talk", "late")]} if method == "POST" else None
        assert (await world.request(method, f"/v1/sessions/{session}{path}", body)).status == 404, (method, path)
    listed = (await world.request("GET", "/v1/sessions")).ok()["data"]
    assert session not in [s["id"] for s in listed]

    async def is_removed() -> bool:
        return not workspace.exists() and not await sessions_being_deleted(world.pool)

    await until(is_removed, 20)
    again = await world.request("DELETE", f"/v1/sessions/{session}")
    assert again.status == 404, "a repeat joins a deletion while it lasts; afterwards there is nothing to delete"
    assert "request_failed" not in server.errors()
    assert "runner_failed" not in server.errors()
    world.checker.acknowledged.pop(uuid_of(session))
    world.workspaces.pop(uuid_of(session))
    await world.check()


@pytest.mark.case("B048")
async def test_deletion_of_a_parked_session_meets_a_worker_that_was_frozen(world: World) -> None:
    """The worker stopped in the middle of a tool; its turn was taken over, ended and deleted before it wakes up."""
    await world.serve("serve")
    first = await world.child("worker").start()
    session = await world.session()
    await world.say(session, "slowtool", "a")
    await until(lambda: exists(world.data / "workspaces" / world.token_of(session) / "effects"), 20)
    first.send(signal.SIGSTOP)
    second = await world.child("worker").start()
    await world.pool.execute("update worker set dead_at = clock_timestamp() where pid = $1", first.pid)
    await world.at_rest(session)
    assert (await world.request("DELETE", f"/v1/sessions/{session}")).status == 200

    async def is_gone() -> bool:
        return await world.pool.fetchval("select state from session where id = $1", uuid_of(session)) == "deleted"

    await until(is_gone, 20)
    first.send(signal.SIGCONT)
    back = "select true from worker where pid = $1 and dead_at is null"
    await until(lambda: world.pool.fetchval(back, first.pid), 20)
    assert (await world.request("GET", f"/v1/sessions/{session}")).status == 404
    assert "runner_failed" not in first.errors() + second.errors()
    world.checker.acknowledged.pop(uuid_of(session))
    world.workspaces.pop(uuid_of(session))
    await world.check()


def objects_of(server: Any) -> dict[str, int]:
    """What a process holds for each session, by kind."""
    parts = server
    return {
        "runners": len(parts.engine._runners),
        "pending": len(parts.engine._pending),
        "offered": len(parts.engine._offered),
        "timers": len(parts.engine._timers),
        "feeds": len(parts.feeds._feeds),
        "workspaces": len(parts.environment._slots),
        "queued": sum(len(w._queue) for w in (*parts.ledger._writers, parts.ledger._creator)),
    }


@pytest.mark.case("B050")
@pytest.mark.timeout(300)
async def test_many_short_sessions_leave_no_objects_behind(
    database_url: str, tmp_path: Path, provider: ModelServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two thousand sessions with a turn each, half of them deleted, some streamed: what is held per session falls back to nothing."""
    seen: list[Any] = []

    class Watched(bootstrap._Parts):  # pyright: ignore[reportPrivateUsage]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            seen.append(self)

    monkeypatch.setattr(bootstrap, "_Parts", Watched)
    provider.server.respond_with(lambda _: Reply(Text("done")))
    flags = {"database_url": database_url, "data": tmp_path, "port": 0, "anthropic_base_url": provider.base_url}
    async with open_server(load({**flags, "anthropic_api_key": "test-key"}), api=True, worker=True) as server:
        assert server.url is not None and server.api_key is not None
        api = Caller(server.url, server.api_key)
        agent = (await api.post("/v1/agents", {"name": "agent", "model": "claude-opus-5"}))["id"]
        environment = (await api.post("/v1/environments", {"name": "environment"}))["id"]

        async def client(number: int) -> None:
            for n in range(SESSIONS // CLIENTS):
                message = {"type": "user.message", "content": [{"type": "text", "text": f"{number} {n}"}]}
                body = {"agent": agent, "environment_id": environment, "initial_events": [message]}
                session = (await api.post("/v1/sessions", body))["id"]
                if n < STREAMS // CLIENTS:
                    async with api.stream(session, after="1.0") as frames:
                        async for frame in frames:
                            if frame.event["type"] == "session.status_idle":
                                break
                if n % 2:
                    await until(lambda session=session: deleted(api, session), 30)

        await asyncio.gather(*(client(i) for i in range(CLIENTS)))

        async def is_empty() -> bool:
            return not any(objects_of(seen[0]).values())

        try:
            await until(is_empty, 60)
        except TimeoutError:
            raise AssertionError(objects_of(seen[0])) from None
        assert seen[0].submissions.remembered_count <= 20_000
        assert len(asyncio.all_tasks()) < 100
        await api.close()


async def deleted(api: Caller, session: str) -> bool:
    """Delete it, as soon as it is not running any more."""
    return (await api.call("DELETE", f"/v1/sessions/{session}")).status == 200
