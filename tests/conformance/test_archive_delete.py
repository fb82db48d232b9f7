"""G14: the end of a session, kept or gone."""

import anthropic
import pytest
from tests.conformance.test_bad_references import refused_once
from tests.conformance.test_sessions import refused
from tests.conformance.test_tools import CUSTOM, TOOLSET

from perdure.environments.local import LocalEnvironment
from perdure.testing.model_server import Call, Reply, Text
from perdure.testing.processes import until
from perdure.testing.serving import INTERRUPT, Served, Told, message
from perdure.testing.trail import TERMINATED, frames_of, kinds_of, trail_of


async def listed_ids(served: Served, **filters: object) -> set[str]:
    return {s.id async for s in served.client.beta.sessions.list(limit=100, **filters)}


@pytest.mark.rule(
    "MA-G14", "MA-A1.19", "MA-A1.29", "MA-A2.14", "MA-B7.13", "MA-B6.6", "MA-A1.28", "SDK:sessions.archive"
)
async def test_archive_ends_a_session_and_keeps_its_history(served: Served) -> None:
    sessions = served.client.beta.sessions
    told = await served.make_session(Reply(Text("no end"), stall_after=0))
    await told.say("m")
    await told.script.wait_for_requests(1)
    async with refused_once(told):
        await sessions.archive(told.id)
    assert await told.status() == "running"
    await told.interrupt()
    before = await told.until_idle()
    async with told.stream() as response:
        archived = await sessions.archive(told.id)
        frames = []
        async for frame in frames_of(response):
            frames.append(frame.data)
            if frame.name == "session.status_terminated":
                break
    assert archived.status == "terminated"
    assert archived.archived_at is not None
    assert trail_of(frames) == TERMINATED
    listed = await told.events()
    assert listed == [*before, *frames]
    for events in ([message("late")], [INTERRUPT], [message("a"), INTERRUPT]):
        async with refused_once(told):
            await told.send(*events)
    error = await refused(sessions.update(told.id, title="late"), "nothing of it changes")
    assert error["details"]["error_code"] == "session_archived"
    assert await told.events() == [*before, *frames]
    again = await sessions.archive(told.id)
    assert again.archived_at == archived.archived_at
    assert await told.events() == listed
    assert told.id not in await listed_ids(served)
    assert told.id in await listed_ids(served, include_archived=True)
    thread = (await sessions.threads.list(told.id)).data[0]
    assert (thread.status, thread.archived_at) == ("terminated", archived.archived_at)


@pytest.mark.rule("MA-A1.29", "MA-C2.3")
async def test_archive_of_a_parked_session_closes_its_actions(served: Served) -> None:
    told = await served.make_session(tools=[CUSTOM])
    told.script.enqueue(Reply(Call("lookup")))
    await told.say("go")
    await told.until_idle()
    archived = await served.client.beta.sessions.archive(told.id)
    assert archived.status == "terminated"
    listed = await told.events()
    assert trail_of(listed)[-2:] == TERMINATED
    assert all(e["processed_at"] for e in listed)


async def test_archive_says_in_the_history_that_it_ended_the_turn_and_blames_nobody(served: Served) -> None:
    toolset = {**TOOLSET, "default_config": {"permission_policy": {"type": "always_ask"}}}
    told = await served.make_session(Reply(Call("bash", {"command": "echo"})), tools=[toolset])
    await told.say("go")
    await told.until_idle()
    await served.client.beta.sessions.archive(told.id)
    [closed] = [e for e in await told.events() if e["type"] == "agent.tool_result"]
    assert closed["is_error"]
    assert closed["content"][0]["text"] == "The session was archived before this call was answered."


@pytest.mark.rule("MA-C2.3")
async def test_archive_loses_no_message_that_waits_behind_an_action(served: Served) -> None:
    told = await served.make_session(tools=[CUSTOM])
    told.script.enqueue(Reply(Call("lookup")))
    await told.say("go")
    await told.until_idle()
    await told.say("waits")
    async with refused_once(told, "input_waiting"):
        await served.client.beta.sessions.archive(told.id)
    (waiting, *_) = (await served.ok("GET", f"/perdure{told.path}/inputs"))["data"]
    await served.ok("POST", f"/perdure{told.path}/inputs/{waiting['id']}/withdraw")
    assert (await served.client.beta.sessions.archive(told.id)).status == "terminated"
    assert all(e["processed_at"] for e in await told.events())


@pytest.mark.rule(
    "MA-G14.1", "MA-A1.30", "MA-C11.1", "MA-C11.2", "MA-C11.3", "MA-C11.6", "MA-B3.8", "MA-A2.13", "MA-C2.6"
)
@pytest.mark.rule("SDK:sessions.delete")
async def test_delete_ends_streams_and_leaves_nothing(served: Served) -> None:
    sessions = served.client.beta.sessions
    told = await served.make_session(Reply(Text("no end"), stall_after=0))
    await told.say("m")
    await told.script.wait_for_requests(1)
    async with refused_once(told):
        await sessions.delete(told.id)
    await told.interrupt()
    await told.until_idle()
    async with told.stream() as first, told.stream(last_id="1.0") as second:
        deleted = await sessions.delete(told.id)
        tails = [[f async for f in frames_of(r)] for r in (first, second)]
    assert (deleted.id, deleted.type) == (told.id, "session_deleted")
    assert [f.name for f in tails[0]] == ["session.deleted"]
    assert tails[1][-1].name == "session.deleted"
    assert tails[0][0].id == ""
    gone = [
        sessions.retrieve(told.id),
        sessions.update(told.id, title="x"),
        sessions.archive(told.id),
        sessions.events.send(told.id, events=[message("m")]),
        sessions.events.list(told.id),
        sessions.events.stream(told.id),
        sessions.threads.list(told.id),
    ]
    for asked in gone:
        with pytest.raises(anthropic.NotFoundError):
            await asked
    assert told.id not in await listed_ids(served, include_archived=True)


@pytest.mark.rule("MA-C11.2", "MA-C11.5", "MA-C11.6")
async def test_delete_takes_the_files_with_it_and_repeats_well(served: Served) -> None:
    told = await served.make_session(tools=[TOOLSET])
    await told.turn("go", Reply(Call("write", {"file_path": "note", "content": "x"})), Reply(Text("ok")))
    workspaces = served.settings.data / "workspaces"
    own = [p for p in workspaces.iterdir() if told.id.removeprefix("sesn_") in p.name]
    assert len(own) == 1
    await served.client.beta.sessions.delete(told.id)
    for _ in range(200):
        again = await served.call("DELETE", told.path)
        if again.status_code == 404:
            break
        assert again.json() == {"id": told.id, "type": "session_deleted"}
    assert again.status_code == 404
    assert not own[0].exists()


@pytest.mark.rule("MA-C11.2")
async def test_folder_that_can_not_be_removed_holds_up_its_own_session_alone(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck, free = await served.make_session(), await served.make_session()
    whole = LocalEnvironment.destroy

    async def destroy(environment: LocalEnvironment, session: str) -> None:
        if session in stuck.id:
            raise OSError("could not be removed")
        await whole(environment, session)

    async def is_removed(told: Told) -> bool:
        return (await served.call("DELETE", told.path)).status_code == 404

    monkeypatch.setattr(LocalEnvironment, "destroy", destroy)
    await served.client.beta.sessions.delete(stuck.id)
    await served.client.beta.sessions.delete(free.id)
    await until(lambda: is_removed(free), 20)
    assert not await is_removed(stuck)
    monkeypatch.undo()
    await until(lambda: is_removed(stuck), 20)


@pytest.mark.rule("MA-C11.2")
async def test_delete_of_parked_and_of_archived_sessions(served: Served) -> None:
    sessions = served.client.beta.sessions
    parked, archived = await served.make_session(tools=[CUSTOM]), await served.make_session()
    parked.script.enqueue(Reply(Call("lookup")))
    await parked.say("go")
    await parked.until_idle()
    await sessions.archive(archived.id)
    for told in (parked, archived):
        await sessions.delete(told.id)
        with pytest.raises(anthropic.NotFoundError):
            await sessions.retrieve(told.id)


@pytest.mark.rule("MA-A1.30")
@pytest.mark.parametrize("body", [{}, {"content": b"", "headers": {"content-type": "application/json"}}, {"json": {}}])
async def test_delete_does_not_look_at_body_or_content_type(served: Served, body: dict[str, object]) -> None:
    told = await served.make_session()
    assert (await served.ok("DELETE", told.path, **body))["type"] == "session_deleted"


@pytest.mark.rule("MA-B7.13")
async def test_the_list_of_an_archived_session_ends_with_its_termination(served: Served) -> None:
    told = await served.make_session()
    await served.client.beta.sessions.archive(told.id)
    assert kinds_of(await told.events()) == ["session.thread_status_terminated", "session.status_terminated"]
