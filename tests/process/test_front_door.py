"""A killed server as its clients see it: through HTTP alone, they find what they were promised."""

import asyncio
import signal

import pytest
from tests.process.world import World

from perdure.testing.model_server import Gate
from perdure.testing.processes import Json, until

DEATH_S = 20.0


async def of_type(world: World, session: str, kind: str) -> list[Json]:
    return [e for e in await world.listed(session) if e["type"] == kind]


async def serve_doomed(world: World, point: str) -> "asyncio.Task[None]":
    """A server that dies at `point`; when the task is done, the next one is there."""
    doomed = await world.serve(crash_at=f"{point}:1")

    async def follow() -> None:
        assert await doomed.wait(DEATH_S) == -signal.SIGKILL, doomed.errors()[-2000:]
        world.gone()
        await world.serve()

    return asyncio.ensure_future(follow())


@pytest.mark.rule("MA-G15.3", "MA-C9.1", "MA-C10.6")
async def test_turn_cut_off_by_a_kill_ends_once_and_keeps_the_result_of_its_tool(world: World) -> None:
    """Killed in the second call of the model, when the tool had run and its result was recorded."""
    server = await world.serve()
    gate = world.script.gates["a-1"] = Gate()
    session = await world.session()
    await world.say(session, "tool", "a")
    await gate.reached(20)
    world.gone()
    await server.kill()
    gate.open()
    await world.serve()
    assert await world.at_rest(session) == "end_turn"
    assert len(await of_type(world, session, "agent.message")) == 1
    assert len(await of_type(world, session, "agent.tool_use")) == 1
    [result] = await of_type(world, session, "agent.tool_result")
    assert not result["is_error"]
    assert await of_type(world, session, "session.error") == []
    assert (world.data / "workspaces" / world.token_of(session) / "effects").read_text() == "a\n"
    assert world.data.stat().st_mode & 0o066 == (world.data / "workspaces").stat().st_mode & 0o077 == 0
    assert world.script.calls == {"a-0": 1, "a-1": 2}
    await world.check()


@pytest.mark.rule("MA-E1.7")
async def test_message_committed_before_the_kill_is_admitted_once(world: World) -> None:
    """The answer was lost with the server; the client sends again with its key, and is answered with what it did."""
    followed = await serve_doomed(world, "after_commit.accept")
    session = await world.session()
    [told] = await world.say(session, "talk", "a")
    await followed
    assert await world.at_rest(session) == "end_turn"
    assert [e["id"] for e in await of_type(world, session, "user.message")] == [told["id"]]
    assert world.script.calls["a-0"] >= 1
    await world.check()


@pytest.mark.rule("MA-E1.7")
async def test_session_created_before_the_kill_is_created_once(world: World) -> None:
    followed = await serve_doomed(world, "after_commit.create")
    session = await world.session()
    await followed
    listed = (await world.request("GET", "/v1/sessions")).ok()["data"]
    assert [s["id"] for s in listed] == [session]
    await world.check()


@pytest.mark.rule("MA-G14.2", "MA-E1.7")
@pytest.mark.parametrize("point", ["after_commit.delete", "before_workspace_removal", "before_row_removal"])
async def test_deletion_cut_off_by_a_kill_is_completed_by_the_next_process(world: World, point: str) -> None:
    followed = await serve_doomed(world, point)
    session = await world.session()
    await world.say(session, "tool", "a")
    await world.at_rest(session)
    folder = world.data / "workspaces" / world.token_of(session)
    assert folder.exists()
    assert (await world.request("DELETE", f"/v1/sessions/{session}")).status in (200, 404)
    await followed
    assert (await world.request("GET", f"/v1/sessions/{session}")).status == 404

    async def is_gone() -> bool:
        [left] = await world.pool.fetch("select (select count(*) from event) as events, (select state from session)")
        return (left["events"], left["state"]) == (0, "deleted") and not folder.exists()

    await until(is_gone, 20)
