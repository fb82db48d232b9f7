"""Histories that a provider would refuse: whatever a turn met, the next one is sent a history that holds."""

import itertools

import pytest
from tests.cases.driving import INTERRUPT, TOOLSET, Site, history, message, results_in, text_of

from perdure.testing.model_server import Call, Gate, Reply, Text, Thinking

STUB_TOOLS = True


def call(label: str, tool: str = "write") -> Call:
    """A call that the stand-in knows by this label."""
    return Call(tool, {"file_path": label, "content": "x"}) if tool == "write" else Call(tool, {"command": label})


@pytest.mark.case("B001")
async def test_a_stop_while_three_calls_are_in_flight(site: Site) -> None:
    """Elsewhere stopped calls stayed without results and every later request was refused; here each has exactly one."""
    session = await site.open(TOOLSET)
    gates = [site.tools.hold(label) for label in ("c1", "c2", "c3")]
    site.script(Reply(Text("Working."), call("c1"), call("c2"), call("c3")))
    await session.send(message("do three things"))
    for gate in gates:
        await gate.reached()
    gates[0].open()
    await session.frame("agent.tool_result")
    await session.send(INTERRUPT)
    assert await session.idle(1, 3) == "end_turn"
    await session.check(idles=1)
    for gate in gates:
        gate.open()
    site.script(Reply(Text("carrying on")))
    await session.send(message("carry on"))
    assert await session.idle(2) == "end_turn"
    results = results_in(site.requests[1])
    assert len(results) == 3
    by_label = {label: next(r for key, r in results.items() if label in key) for label in ("c1", "c2", "c3")}
    assert text_of(by_label["c1"]) == "done: c1"
    assert not by_label["c1"].get("is_error")
    assert by_label["c2"]["is_error"]
    assert by_label["c3"]["is_error"]
    await session.go_on(idles=3)
    assert [site.tools.executions(label) for label in ("c1", "c2", "c3")] == [1, 1, 1]


@pytest.mark.case("B001")
async def test_a_stop_while_two_of_three_calls_wait_for_the_shell(site: Site) -> None:
    """Calls that had not started when the stop came are closed as not started, and never run."""
    session = await site.open(TOOLSET)
    gate = site.tools.hold("s2")
    site.script(Reply(call("s1", "bash"), call("s2", "bash"), call("s3", "bash")))
    await session.send(message("three commands"))
    await gate.reached()
    await session.send(INTERRUPT)
    assert await session.idle(1, 3) == "end_turn"
    gate.open()
    site.script(Reply(Text("carrying on")))
    await session.send(message("carry on"))
    assert await session.idle(2) == "end_turn"
    texts = [text_of(result) for result in results_in(site.requests[1]).values()]
    assert texts[0] == "done: s1"
    assert "outcome is unknown" in texts[1]
    assert "before it started" in texts[2]
    await session.go_on(idles=3)
    assert [site.tools.executions(label) for label in ("s1", "s2", "s3")] == [1, 1, 0]


@pytest.mark.case("B002")
async def test_an_interrupt_in_the_middle_of_thinking(site: Site) -> None:
    """Elsewhere an unsigned piece of thinking was replayed and refused for ever; here it is left out."""
    session = await site.open(TOOLSET)
    site.script(Reply(Thinking("a long thought " * 20), Text("never said"), stall_after=5))
    await session.send(message("think"))
    await site.arrived(1)
    await session.frame("span.model_request_start")
    await session.send(INTERRUPT)
    assert await session.idle(1, 3) == "end_turn"
    site.script(Reply(Thinking("a new thought"), Text("continued")))
    await session.send(message("continue"))
    assert await session.idle(2) == "end_turn"
    assert not [b for b in history(site.requests[1]) if b["type"] == "thinking"]
    await session.go_on(idles=3)
    [kept] = [b for b in history(site.requests[2]) if b["type"] == "thinking"]
    assert kept == {"type": "thinking", "thinking": "a new thought", "signature": Thinking("a new thought").signed()}


@pytest.mark.case("B002")
async def test_an_interrupt_in_a_call_behind_signed_thinking(site: Site) -> None:
    """A whole signed thought before a call that is cut goes back byte for byte or not at all; what was said stays readable."""
    session = await site.open(TOOLSET)
    thought = Thinking("  an exact thought \u2028 with  spaces\n")
    gate = Gate()
    cut = Call("write", {"file_path": "cut", "content": "y" * 200})
    site.script(Reply(thought, Text("I will write."), cut, gate_after_blocks={2: gate}))
    await session.send(message("write"))
    await gate.reached()
    site.replies.clear()
    await session.send(INTERRUPT)
    assert await session.idle(1, 3) == "end_turn"
    assert await session.texts() == ["I will write."]
    site.script(Reply(Text("continued")))
    await session.send(message("continue"))
    assert await session.idle(2) == "end_turn"
    blocks = history(site.requests[1])
    expected = {"type": "thinking", "thinking": thought.thinking, "signature": thought.signed()}
    assert [b for b in blocks if b["type"] == "thinking"] in ([], [expected])
    assert not [b for b in blocks if b["type"] == "tool_use"]
    await session.go_on(idles=3)
    assert site.tools.executions("cut") == 0


@pytest.mark.case("B004")
async def test_a_model_that_says_nothing(site: Site) -> None:
    """Elsewhere an empty reply was stored and replayed as an empty block; here nothing is made up and the next turn works."""
    session = await site.open(TOOLSET)
    silent = [Reply(), Reply(Text("")), Reply(Text("\n\n")), Reply(Text(" \u200b ")), Reply(Thinking("only a thought"))]
    for idles, reply in enumerate(silent, start=1):
        site.script(reply)
        await session.send(message(f"message {idles}"))
        assert await session.idle(idles) == "end_turn"
        await session.check(idles=idles)
    assert await session.texts() == []
    await session.go_on(idles=len(silent) + 1)
    sent = [m["role"] for m in site.requests[-1].body["messages"]]
    assert all(before != after for before, after in itertools.pairwise(sent))


@pytest.mark.case("B004")
async def test_an_empty_text_beside_a_call_whose_result_is_empty(site: Site) -> None:
    """An empty block is dropped, an empty result still answers its call."""
    session = await site.open(TOOLSET)
    site.tools.answer("silent", "")
    site.script(Reply(Text(""), call("silent"), Text("\n")), Reply(Text("")))
    await session.send(message("run the silent one"))
    assert await session.idle(1) == "end_turn"
    [result] = results_in(site.requests[1]).values()
    assert text_of(result) == ""
    assert [b["type"] for b in history(site.requests[1])] == ["text", "tool_use", "tool_result"]
    assert await session.texts() == []
    await session.go_on(idles=2)
    assert site.tools.executions("silent") == 1


@pytest.mark.case("B004")
@pytest.mark.parametrize("text", ["", "   ", "\u200b", "\n\t\u2060"])
async def test_a_user_who_says_nothing(site: Site, text: str) -> None:
    """Blank input is refused with its place, and never gets into a history."""
    session = await site.open()
    error = await session.refuse("invalid_request_error", message(text))
    assert "events.0.content.0.text" in error["message"]
    await session.go_on(idles=1)


@pytest.mark.case("B005")
@pytest.mark.parametrize("stop_reason", ["max_tokens", "tool_use"])
async def test_arguments_cut_off_by_the_output_limit(site: Site, stop_reason: str) -> None:
    """Elsewhere half a call was stored or run; here it is never run, the model reads why, and the history holds."""
    session = await site.open(TOOLSET)
    cut = Call("write", '{"file_path":"cut-off","content":"abc')
    site.script(Reply(Text("Writing."), cut, stop_reason=stop_reason), Reply(Text("I see.")))
    await session.send(message("write a file"))
    assert await session.idle(1) == "end_turn"
    [result] = results_in(site.requests[1]).values()
    assert result["is_error"]
    assert "cut off" in text_of(result)
    [shown] = await session.listed("agent.tool_result")
    assert shown["is_error"]
    site.script(Reply(Text("done")))
    await session.send(message("try again"))
    assert await session.idle(2) == "end_turn"
    assert len(await session.listed("user.message")) == 2
    await session.go_on(idles=3)
    assert site.tools.executions("cut-off") == 0


@pytest.mark.case("B005")
async def test_a_whole_looking_call_at_the_output_limit_is_not_run(site: Site) -> None:
    """A reply that met its limit in a call was cut there, however whole the call looks."""
    session = await site.open(TOOLSET)
    site.script(Reply(call("whole-looking"), stop_reason="max_tokens"), Reply(Text("I see.")))
    await session.send(message("write a file"))
    assert await session.idle(1) == "end_turn"
    await session.go_on(idles=2)
    assert site.tools.executions("whole-looking") == 0


@pytest.mark.case("B005")
async def test_a_connection_cut_in_the_arguments_repeats_the_call_of_the_model(site: Site) -> None:
    """The same cut by the line: the model is asked again, nothing of the first reply is run or sent back."""
    session = await site.open(TOOLSET)
    site.script(Reply(Text("Writing."), call("half"), cut_after=2), Reply(call("half")), Reply(Text("done")))
    await session.send(message("write a file"))
    assert await session.idle(1) == "end_turn"
    assert [e["error"]["retry_status"]["type"] for e in session.seen("session.error")] == ["retrying"]
    assert "Writing." not in str(site.requests[2].body["messages"])
    await session.go_on(idles=2)
    assert site.tools.executions("half") == 1


@pytest.mark.case("B006")
async def test_a_provider_that_reuses_call_ids(site: Site) -> None:
    """Elsewhere the second call of an id was skipped, or two results had one id; here each runs once and has its own id."""
    session = await site.open(TOOLSET)
    for idles, label in enumerate(("n1", "n2", "n2"), start=1):
        site.script(Reply(Call("write", {"file_path": label, "content": "x"}, id="t:0")), Reply(Text(f"turn {idles}")))
        await session.send(message(f"turn {idles}"))
        assert await session.idle(idles) == "end_turn"
    assert (site.tools.executions("n1"), site.tools.executions("n2")) == (1, 2)
    await session.go_on(idles=4)
    sent = [b["id"] for b in history(site.requests[-1]) if b["type"] == "tool_use"]
    assert len(set(sent)) == 3
    assert len({e["id"] for e in await session.listed("agent.tool_use")}) == 3


@pytest.mark.case("B006")
async def test_one_call_id_twice_in_one_reply(site: Site) -> None:
    """Two calls are two calls: both run, each result stands at its own."""
    session = await site.open(TOOLSET)
    twice = [Call("write", {"file_path": label, "content": "x"}, id="t:0") for label in ("twice-a", "twice-b")]
    site.script(Reply(*twice), Reply(Text("done")))
    await session.send(message("both"))
    assert await session.idle(1) == "end_turn"
    results = results_in(site.requests[1])
    assert {text_of(r) for r in results.values()} == {"done: twice-a", "done: twice-b"}
    assert all(text_of(r).removeprefix("done: ") in key for key, r in results.items())
    await session.go_on(idles=2)
    assert (site.tools.executions("twice-a"), site.tools.executions("twice-b")) == (1, 1)
