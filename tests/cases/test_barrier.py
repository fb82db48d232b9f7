"""Answers that a client owes: each counts for its own call, once, whoever sends it and when."""

import asyncio
from collections import Counter

import pytest
from tests.cases.driving import (
    INTERRUPT,
    TOOLSET,
    Driven,
    Json,
    Site,
    confirmation_of,
    custom_tool,
    message,
    open_peer,
    result_of,
    results_in,
    text_of,
)

from perdure.testing.model_server import Call, Reply, Text

STUB_TOOLS = True
ASKING = {"default_config": {"permission_policy": {"type": "always_ask"}}, **TOOLSET}


async def owed(session: Driven, count: int) -> list[str]:
    """The open actions that the `count`th idle names."""
    idle = await session.frame("session.status_idle", count)
    assert idle["stop_reason"]["type"] == "requires_action"
    return idle["stop_reason"]["event_ids"]


def colours(events: list[Json]) -> dict[str, str]:
    """Ids of custom calls by their colour."""
    return {e["input"]["colour"]: e["id"] for e in events}


@pytest.mark.case("B023")
async def test_the_same_tool_called_twice_in_parallel(site: Site) -> None:
    """Elsewhere both calls shared one pending id; here each is owed under its own, and the last answer resumes once."""
    session = await site.open(custom_tool("draw_box"))
    site.script(Reply(Call("draw_box", {"colour": "red"}), Call("draw_box", {"colour": "blue"})))
    await session.send(message("two boxes"))
    ids = await owed(session, 1)
    calls = colours(session.seen("agent.custom_tool_use"))
    assert sorted(ids) == sorted(calls.values())
    assert len(set(ids)) == 2
    await session.send(result_of(calls["blue"], "blue drawn"))
    assert await owed(session, 2) == [calls["red"]]
    assert len(site.requests) == 1
    site.script(Reply(Text("both drawn")))
    await session.send(result_of(calls["red"], "red drawn"))
    assert await session.idle(3) == "end_turn"
    results = results_in(site.requests[1])
    assert text_of(results['{"colour": "red"}']) == "red drawn"
    assert text_of(results['{"colour": "blue"}']) == "blue drawn"
    await session.go_on(idles=4)


@pytest.mark.case("B024")
async def test_half_a_batch_and_stale_ids(site: Site) -> None:
    """Elsewhere a stale or early answer blocked the session; here wrong ones are refused and right ones count one by one."""
    session = await site.open(TOOLSET, custom_tool("ask"))
    site.script(Reply(Call("ask", {"colour": "z"})), Reply(Text("round 1")))
    await session.send(message("round 1"))
    [z] = await owed(session, 1)
    await session.send(result_of(z, "z"))
    assert await session.idle(2) == "end_turn"
    write = Call("write", {"file_path": "b024", "content": "x"})
    site.script(Reply(write, Call("ask", {"colour": "a"}), Call("ask", {"colour": "b"})))
    await session.send(message("round 2"))
    ids = await owed(session, 3)
    calls = colours(session.seen("agent.custom_tool_use")[1:])
    assert ids == [calls["a"], calls["b"]]
    server_call = session.seen("agent.tool_use")[0]["id"]
    assert server_call not in ids
    await session.send(result_of(calls["a"], "a"))
    assert await owed(session, 4) == [calls["b"]]
    await session.refuse("already_resolved", result_of(z, "late"))
    await session.refuse("unknown_action", result_of("sevt_" + "0" * 26, "never issued"))
    await session.refuse("unknown_action", result_of("b", "no id"))
    await session.refuse("unknown_action", result_of(server_call, "not asked"))
    await session.refuse("already_resolved", result_of(calls["b"], "b"), result_of(z, "with a stale one"))
    wrong_thread = {**result_of(calls["b"], "b"), "session_thread_id": "sthr_" + "0" * 26}
    await session.refuse("unknown_thread", wrong_thread)
    # Another process, which has seen nothing of this session, knows the same.
    site.script(Reply(Text("round 2 done")))
    async with open_peer(site) as peer:
        assert (await peer.http.get(session.path)).json()["status"] == "idle"
        answered = await session.post(result_of(calls["b"], "b"), http=peer.http)
        assert answered.status_code == 200
        assert await session.idle(5) == "end_turn"
    assert {text_of(r) for r in results_in(site.requests[-1]).values()} == {"z", "done: b024", "a", "b"}
    assert len(site.requests) == 4
    await session.go_on(idles=6)
    assert site.tools.executions("b024") == 1


@pytest.mark.case("B025")
async def test_a_message_while_an_approval_is_open(site: Site) -> None:
    """Elsewhere the prompt came again for ever or messages were refused; here the message waits and the answer goes first."""
    session = await site.open(ASKING)
    site.script(Reply(Call("write", {"file_path": "b025", "content": "x"})))
    await session.send(message("write"))
    [action] = await owed(session, 1)
    [waiting] = await session.send(message("also do X"))
    assert waiting["processed_at"] is None
    [acknowledged] = await session.send(INTERRUPT)
    assert acknowledged["processed_at"] is not None
    assert (await session.retrieve())["status"] == "idle"
    assert len(session.seen("session.status_idle")) == 1
    assert len(site.requests) == 1
    site.script(Reply(Text("written")), Reply(Text("X done")))
    await session.send(confirmation_of(action, "allow"))
    assert await session.idle(2) == "end_turn"
    assert await session.texts() == ["written", "X done"]
    assert "also do X" not in str(site.requests[1].body["messages"])
    assert "also do X" in str(site.requests[2].body["messages"][-1])
    await session.go_on(idles=3)
    assert site.tools.executions("b025") == 1


@pytest.mark.case("B025")
async def test_denying_is_the_way_out(site: Site) -> None:
    """A call that is denied is not run; the message behind it becomes the next turn."""
    session = await site.open(ASKING)
    site.script(Reply(Call("write", {"file_path": "b025-denied", "content": "x"})))
    await session.send(message("write"))
    [action] = await owed(session, 1)
    await session.send(message("never mind"))
    site.script(Reply(Text("not written")), Reply(Text("fine")))
    await session.send(confirmation_of(action, "deny"))
    assert await session.idle(2) == "end_turn"
    [result] = results_in(site.requests[1]).values()
    assert result["is_error"]
    assert await session.texts() == ["not written", "fine"]
    await session.go_on(idles=3)
    assert site.tools.executions("b025-denied") == 0


@pytest.mark.case("B027")
@pytest.mark.parametrize("mixed", [False, True], ids=["all allow", "half deny"])
async def test_twenty_clients_approve_at_once(site: Site, *, mixed: bool) -> None:
    """Elsewhere the continuation ran twice; here one answer of twenty counts, and what it says is what happens."""
    session = await site.open(ASKING)
    label = f"b027-{mixed}"
    site.script(Reply(Call("write", {"file_path": label, "content": "x"})))
    await session.send(message("write"))
    [action] = await owed(session, 1)
    site.script(Reply(Text("resumed")))
    async with open_peer(site) as peer:
        words = ["deny" if mixed and n % 2 else "allow" for n in range(20)]
        posts = [
            session.post(confirmation_of(action, word), http=(site.http, peer.http)[n // 2 % 2])
            for n, word in enumerate(words)
        ]
        answers = await asyncio.gather(*posts)
        assert await session.idle(2) == "end_turn"
    assert Counter(a.status_code for a in answers) == {200: 1, 400: 19}
    refused = [a.json()["error"]["details"]["error_code"] for a in answers if a.status_code == 400]
    assert set(refused) == {"already_resolved"}
    decided = words[next(n for n, a in enumerate(answers) if a.status_code == 200)]
    [stored] = await session.listed("user.tool_confirmation")
    assert stored["result"] == decided
    assert site.tools.executions(label) == (1 if decided == "allow" else 0)
    assert len(site.requests) == 2
    await session.go_on(idles=3)


@pytest.mark.case("B027")
async def test_one_client_repeats_its_approval(site: Site) -> None:
    """Sent again under its key, an approval gets its first answer and changes nothing."""
    session = await site.open(ASKING)
    site.script(Reply(Call("write", {"file_path": "b027-key", "content": "x"})))
    await session.send(message("write"))
    [action] = await owed(session, 1)
    site.script(Reply(Text("resumed")))
    key = {"Idempotency-Key": "approve once"}
    async with open_peer(site) as peer:
        posts = [
            session.post(confirmation_of(action, "allow"), http=(site.http, peer.http)[n % 2], headers=key)
            for n in range(20)
        ]
        answers = await asyncio.gather(*posts)
    assert {a.status_code for a in answers} == {200}
    assert len({a.json()["data"][0]["id"] for a in answers}) == 1
    assert await session.idle(2) == "end_turn"
    other = await session.post(confirmation_of(action, "deny"), headers=key)
    assert other.status_code == 400
    assert other.json()["error"]["details"]["error_code"] == "idempotency_key_reused"
    await session.go_on(idles=3)
    assert site.tools.executions("b027-key") == 1
