"""G4 to G7: built-in tools, custom tools, confirmations, several of them at once."""

import anthropic
import pytest

from perdure.testing.model_server import Call, Gate, Reply, Text
from perdure.testing.serving import Served, confirm, message, result
from perdure.testing.trail import RUNNING, Mark, call, frames_of, idle, last_idle, only, said, says, trail_of

TOOLSET = {"type": "agent_toolset_20260401"}
ASK_BASH = {
    "type": "agent_toolset_20260401",
    "configs": [{"name": "bash", "permission_policy": {"type": "always_ask"}}],
}
CUSTOM = {
    "type": "custom",
    "name": "lookup",
    "description": "Looks something up.",
    "input_schema": {"type": "object", "properties": {"key": {"type": "string"}}},
}
TOOL_USE, TOOL_RESULT, CUSTOM_USE = "agent.tool_use", "agent.tool_result", "agent.custom_tool_use"


@pytest.mark.rule("MA-G4", "MA-B2.4", "MA-C5.1", "MA-D1.1", "MA-D2.1")
async def test_an_allowed_built_in_tool(served: Served) -> None:
    told = await served.make_session(tools=[TOOLSET])
    listed = await told.turn(
        "run", Reply(Text("Trying."), Call("bash", {"command": "echo out"}, "toolu_a")), Reply(Text("Done."))
    )
    marks = trail_of(listed)
    assert [m for m in marks if m.type != "span.model_request_end"] == [
        said("run"),
        *RUNNING,
        call()[0],
        says("Trying."),
        Mark(TOOL_USE, "bash allow"),
        Mark(TOOL_RESULT),
        call()[0],
        says("Done."),
        *idle(),
    ]
    (use,), (outcome,) = only(listed, TOOL_USE), only(listed, TOOL_RESULT)
    assert outcome["tool_use_id"] == use["id"]
    assert use["input"] == {"command": "echo out"}
    assert outcome["content"] == [{"type": "text", "text": "out"}]
    first, second = told.script.requests
    assert [t["name"] for t in first.body["tools"]] == ["bash", "read", "write", "edit", "glob", "grep"]
    answer = second.body["messages"][-1]["content"]
    called = second.body["messages"][-2]["content"][-1]
    assert [b["type"] for b in answer] == ["tool_result"]
    assert answer[0]["tool_use_id"] == called["id"]
    assert not answer[0].get("is_error")


@pytest.mark.rule("MA-G4", "MA-D1.5", "MA-D1.13")
async def test_a_failed_command_and_an_unknown_tool_are_errors_and_the_turn_goes_on(served: Served) -> None:
    told = await served.make_session(tools=[TOOLSET])
    listed = await told.turn(
        "run",
        Reply(Call("bash", {"command": "echo before; exit 3"})),
        Reply(Call("nobody", {})),
        Reply(Call("bash", {"command": 7})),
        Reply(Text("ok")),
    )
    outcomes = only(listed, TOOL_RESULT)
    assert [o["is_error"] for o in outcomes] == [True, True, True]
    assert "before" in outcomes[0]["content"][0]["text"]
    assert "nobody" in outcomes[1]["content"][0]["text"]
    assert trail_of(listed)[-3:] == idle()


@pytest.mark.rule("MA-G5", "MA-B1.6", "MA-B2.5", "MA-B5.2", "MA-B6.4", "MA-D4.1", "MA-D4.2", "MA-C6.5")
async def test_a_custom_tool_is_answered_by_the_client(served: Served) -> None:
    told = await served.make_session(tools=[CUSTOM])
    told.script.enqueue(Reply(Call("lookup", {"key": "k"}, "toolu_c")), Reply(Text("Found.")))
    await told.say("find")
    parked = await told.until_idle()
    (use,) = only(parked, CUSTOM_USE)
    assert trail_of(parked) == [
        said("find"),
        *RUNNING,
        *call(),
        Mark(CUSTOM_USE, "lookup"),
        *idle("requires_action"),
    ]
    assert last_idle(parked)["stop_reason"] == {"type": "requires_action", "event_ids": [use["id"]]}
    assert await told.status() == "idle"
    (echo,) = await told.send(result(use["id"], "value"))
    assert echo["processed_at"] is not None
    listed = await told.until_idle(2)
    rest = trail_of(listed)[len(parked) :]
    assert rest == [Mark("user.custom_tool_result"), *RUNNING, *call(says("Found.")), *idle()]
    assert told.script.requests[0].body["tools"] == [{k: v for k, v in CUSTOM.items() if k != "type"}]
    (block,) = told.script.messages()[-1]["content"]
    assert block["content"] == [{"type": "text", "text": "value"}]


@pytest.mark.rule("MA-G5.1", "MA-C7.1")
async def test_a_result_is_accepted_as_soon_as_the_call_was_seen(served: Served) -> None:
    told = await served.make_session(tools=[CUSTOM])
    told.script.enqueue(Reply(Call("lookup")), Reply(Text("Found.")))
    async with told.stream() as response:
        await told.say("find")
        async for frame in frames_of(response):
            if frame.name == CUSTOM_USE:
                break
        (echo,) = await told.send(result(frame.data["id"]))
    assert echo["processed_at"] is not None
    listed = await told.until_idle(2)
    assert trail_of(listed)[-7:] == [*RUNNING[1:], *call(says("Found.")), *idle()]


async def park(served: Served, *calls: Call) -> tuple[object, list[dict[str, object]]]:
    told = await served.make_session(tools=[ASK_BASH, CUSTOM])
    told.script.enqueue(Reply(*calls), Reply(Text("All there.")))
    await told.say("go")
    return told, await told.until_idle()


@pytest.mark.rule("MA-G6", "MA-C7.5", "MA-C7.6", "MA-C7.7", "MA-C5.5", "MA-D2.2", "MA-D2.3", "MA-B1.4", "MA-B5.2")
async def test_two_actions_answered_one_after_the_other(served: Served) -> None:
    told, parked = await park(served, Call("lookup", {"key": "a"}), Call("bash", {"command": "echo ran"}))
    custom, ask = only(parked, CUSTOM_USE)[0]["id"], only(parked, TOOL_USE)[0]["id"]
    assert Mark(TOOL_USE, "bash ask") in trail_of(parked)
    assert last_idle(parked)["stop_reason"]["event_ids"] == [custom, ask]
    await told.send(result(custom))
    assert await told.status() == "idle"
    partial = await told.events()
    assert trail_of(partial)[len(parked) :] == [Mark("user.custom_tool_result"), *idle("requires_action")]
    assert last_idle(partial)["stop_reason"]["event_ids"] == [ask]
    assert len(told.script.requests) == 1
    (echo,) = await told.send(confirm(ask))
    assert echo.get("processed_at") is None
    listed = await told.until_idle(3)
    assert trail_of(listed)[len(partial) :] == [
        Mark("user.tool_confirmation", "allow"),
        *RUNNING,
        Mark(TOOL_RESULT),
        *call(says("All there.")),
        *idle(),
    ]
    assert only(listed, "user.tool_confirmation")[0]["processed_at"] is not None
    assert len(told.script.requests) == 2
    results = told.script.messages()[-1]["content"]
    assert [b["type"] for b in results] == ["tool_result", "tool_result"]
    assert [b["tool_use_id"] for b in results] == [b["id"] for b in told.script.messages()[-2]["content"]]


@pytest.mark.rule("MA-G6", "MA-C7.7")
@pytest.mark.parametrize("swapped", [False, True])
async def test_two_actions_answered_in_one_request(served: Served, swapped: bool) -> None:
    told, parked = await park(served, Call("lookup"), Call("bash", {"command": "true"}))
    answers = [result(only(parked, CUSTOM_USE)[0]["id"]), confirm(only(parked, TOOL_USE)[0]["id"])]
    await told.send(*(answers[::-1] if swapped else answers))
    listed = await told.until_idle(2)
    assert len(only(listed, "session.status_idle")) == 2
    assert len(told.script.requests) == 2
    assert len(told.script.messages()[-1]["content"]) == 2


@pytest.mark.rule("MA-G6.1", "MA-C7.10", "MA-C6.5")
async def test_an_allowed_tool_beside_the_actions_has_run_before_the_idle(served: Served) -> None:
    told = await served.make_session(tools=[TOOLSET, CUSTOM])
    told.script.enqueue(Reply(Call("lookup"), Call("bash", {"command": "echo x >> ran; cat ran"})), Reply(Text("end")))
    await told.say("go")
    parked = await told.until_idle()
    (custom,), (outcome,) = only(parked, CUSTOM_USE), only(parked, TOOL_RESULT)
    assert last_idle(parked)["stop_reason"]["event_ids"] == [custom["id"]]
    assert outcome["content"][0]["text"].strip() == "x"
    await told.send(result(custom["id"]))
    listed = await told.until_idle(2)
    assert len(only(listed, TOOL_RESULT)) == 1
    assert [b["type"] for b in told.script.messages()[-1]["content"]] == ["tool_result", "tool_result"]


@pytest.mark.rule("MA-G7", "MA-D2.4", "MA-B1.5")
async def test_a_denied_call_does_not_run(served: Served) -> None:
    told, parked = await park(served, Call("bash", {"command": "touch ran"}))
    (use,) = only(parked, TOOL_USE)
    with pytest.raises(anthropic.BadRequestError, match="deny_message"):
        await told.send({**confirm(use["id"]), "deny_message": "no"})
    assert await told.events() == parked
    await told.send(confirm(use["id"], deny="not today"))
    listed = await told.until_idle(2)
    (outcome,) = only(listed, TOOL_RESULT)
    assert outcome["is_error"] is True
    assert "not today" in outcome["content"][0]["text"]
    assert "not today" in str(told.script.messages()[-1]["content"])
    assert told.script.messages()[-1]["content"][0]["is_error"] is True
    assert trail_of(listed)[-3:] == idle()
    listing = await told.turn("look", Reply(Call("glob", {"pattern": "ran"})), Reply(Text("no")))
    assert "/ran" not in str(only(listing, TOOL_RESULT)[-1]["content"])


@pytest.mark.rule("MA-C7.11", "MA-C5.1")
async def test_a_resumed_turn_may_park_again(served: Served) -> None:
    told = await served.make_session(tools=[CUSTOM])
    told.script.enqueue(Reply(Call("lookup")), Reply(Call("lookup")), Reply(Text("end")))
    await told.say("go")
    for times in (1, 2):
        parked = await told.until_idle(times)
        await told.send(result(only(parked, CUSTOM_USE)[-1]["id"]))
    listed = await told.until_idle(3)
    assert [i["stop_reason"]["type"] for i in only(listed, "session.status_idle")] == [
        "requires_action",
        "requires_action",
        "end_turn",
    ]


@pytest.mark.rule("MA-D1.4", "MA-D1.8", "MA-C13.1", "MA-C13.3")
async def test_files_and_shell_last_across_turns_and_are_not_shared(served: Served) -> None:
    first, second = await served.make_session(tools=[TOOLSET]), await served.make_session(tools=[TOOLSET])
    await first.turn(
        "1",
        Reply(Call("write", {"file_path": "note.txt", "content": "mine"}), Call("bash", {"command": "X=5"})),
        Reply(Text("ok")),
    )
    listed = await first.turn("2", Reply(Call("bash", {"command": "cat note.txt; echo $X"})), Reply(Text("ok")))
    assert only(listed, TOOL_RESULT)[-1]["content"][0]["text"].split() == ["mine5"]
    other = await second.turn("3", Reply(Call("read", {"file_path": "note.txt"})), Reply(Text("ok")))
    assert only(other, TOOL_RESULT)[-1]["is_error"] is True


@pytest.mark.rule("MA-D1.2", "MA-D2.5")
async def test_a_tool_that_was_taken_away_is_denied(served: Served) -> None:
    tools = [{"type": "agent_toolset_20260401", "configs": [{"name": "bash", "enabled": False}]}]
    told = await served.make_session(tools=tools)
    listed = await told.turn("go", Reply(Call("bash", {"command": "true"})), Reply(Text("ok")))
    assert Mark(TOOL_USE, "bash deny") in trail_of(listed)
    assert only(listed, TOOL_RESULT)[0]["is_error"] is True
    assert "bash" not in [t["name"] for t in told.script.requests[0].body["tools"]]


@pytest.mark.rule("MA-C7.13", "MA-G9", "MA-C3.4", "MA-C4.3", "MA-C4.4", "MA-C7.9")
async def test_a_message_while_parked_waits_for_the_answer(served: Served) -> None:
    told = await served.make_session(tools=[CUSTOM])
    told.script.enqueue(Reply(Call("lookup")), Reply(Text("resumed")), Reply(Text("second")))
    await told.say("m1")
    parked = await told.until_idle()
    (echo,) = await told.say("m2")
    assert echo.get("processed_at") is None
    with pytest.raises(anthropic.BadRequestError):
        await told.send(message("m2'"), {"type": "system.message", "content": [{"type": "text", "text": "s"}]})
    waiting = await told.events()
    assert trail_of(waiting)[len(parked) :] == [said("m2")]
    assert await told.status() == "idle"
    await told.send(result(only(parked, CUSTOM_USE)[0]["id"]))
    listed = await told.until_idle(2)
    assert trail_of(listed)[len(waiting) :] == [
        Mark("user.custom_tool_result"),
        *RUNNING,
        *call(says("resumed")),
        *call(says("second")),
        *idle(),
    ]
    assert len(told.script.requests) == 3
    kinds = [b["type"] for m in told.script.messages() for b in m["content"]]
    assert kinds == ["text", "tool_use", "tool_result", "text", "text"]


async def test_a_gate_stops_nothing_else(served: Served) -> None:
    """Two sessions at one provider: one held, the other runs."""
    gate = Gate()
    held, free = await served.make_session(Reply(Text("late"), gate=gate)), await served.make_session()
    await held.say("wait")
    await gate.reached()
    await free.turn("go", Reply(Text("now")))
    gate.open()
    await held.until_idle()
