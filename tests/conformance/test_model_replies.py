"""What models say besides plain text, and what they are sent: pauses, limits, refusals, thinking, pictures, system messages."""

from pathlib import Path
from typing import Any

import anthropic
import pytest
from tests.conformance.test_tools import CUSTOM, CUSTOM_USE, TOOL_RESULT, TOOLSET

from perdure.testing.model_server import Call, Redacted, Reply, Text, Thinking
from perdure.testing.serving import Served, message, result, serve
from perdure.testing.trail import RUNNING, Mark, call, idle, last_idle, only, said, says, statuses_of, trail_of

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


@pytest.mark.rule("MA-C6.1")
async def test_a_paused_turn_goes_on_with_another_call(served: Served) -> None:
    told = await served.make_session()
    listed = await told.turn(
        "go",
        Reply(Text("so far"), stop_reason="pause_turn"),
        Reply(Text("and done")),
    )
    assert trail_of(listed) == [said("go"), *RUNNING, *call(says("so far")), *call(says("and done")), *idle()]
    assert told.script.messages()[1]["content"] == [{"type": "text", "text": "so far"}]


@pytest.mark.rule("MA-C6.3", "MA-F13")
async def test_a_cut_reply_is_continued_three_times_and_then_ends(served: Served) -> None:
    told = await served.make_session()
    cut = [Reply(Text(f"part {n}"), stop_reason="max_tokens") for n in range(4)]
    listed = await told.turn("go", *cut)
    assert len(told.script.requests) == 4
    assert trail_of(listed)[-3:] == idle()
    assert [m.short for m in trail_of(listed) if m.type == "agent.message"] == [f"part {n}" for n in range(4)]
    assert len(only(listed, "user.message")) == 1
    assert [m["role"] for m in told.script.messages()] == ["user", "assistant"] * 3 + ["user"]


@pytest.mark.rule("MA-D1.13", "MA-C6.3", "MA-C5.1")
async def test_a_call_that_was_cut_off_is_not_run(served: Served) -> None:
    told = await served.make_session(tools=[TOOLSET])
    listed = await told.turn(
        "go",
        Reply(Call("bash", '{"command": "touch ra'), stop_reason="max_tokens"),
        Reply(Call("bash", {"command": "ls"})),
        Reply(Text("ok")),
    )
    first, second = only(listed, TOOL_RESULT)
    assert first["is_error"] is True
    assert not second["is_error"]
    assert "ra" not in second["content"][0]["text"]


@pytest.mark.rule("MA-B5.4", "MA-C10.7")
async def test_a_refusal_has_its_details_and_the_session_stays_usable(served: Served) -> None:
    told = await served.make_session()
    details = {"type": "refusal", "category": "cyber", "explanation": "Not this."}
    listed = await told.turn("bad", Reply(Text("I"), stop_reason="refusal", stop_details=details))
    assert trail_of(listed)[-3:] == idle("refusal")
    assert last_idle(listed)["stop_details"] == details
    assert only(listed, "session.error") == []
    assert len(told.script.requests) == 1
    (stop,) = [
        e.stop_details async for e in served.client.beta.sessions.events.list(told.id, types=["session.status_idle"])
    ]
    assert stop.category == "cyber"
    await told.turn("good", Reply(Text("ok")))
    assert "I" not in [b["text"] for m in told.script.messages() for b in m["content"] if m["role"] == "assistant"]
    bare = await served.make_session()
    listed = await bare.turn("bad", Reply(stop_reason="refusal"))
    assert last_idle(listed)["stop_details"] is None


@pytest.mark.rule("MA-B5.4", "MA-C2.3")
async def test_what_waits_behind_a_refusal_runs(served: Served) -> None:
    told = await served.make_session(Reply(stop_reason="refusal"), Reply(Text("ok")))
    await told.say("bad", "good")
    listed = await told.until_idle(2)
    assert statuses_of(listed) == ["running", "idle", "running", "idle"]
    assert trail_of(listed)[-4:] == [Mark("span.model_request_end"), *idle()]


@pytest.mark.rule("MA-C5.3", "MA-B2.3", "MA-B2.2")
async def test_thinking_goes_back_as_it_came_and_is_never_shown(served: Served) -> None:
    told = await served.make_session(tools=[TOOLSET])
    listed = await told.turn(
        "go",
        Reply(
            Thinking("secret plan"),
            Redacted("b64=="),
            Text("  "),
            Text(""),
            Text("I will."),
            Call("bash", {"command": "true"}),
        ),
        Reply(Thinking("unsigned", signature=""), Text("Done.")),
    )
    assert "secret" not in str(listed)
    assert [m.type for m in trail_of(listed)].count("agent.thinking") >= 2
    assert [m.short for m in trail_of(listed) if m.type == "agent.message"] == ["I will.", "Done."]
    await told.turn("more", Reply(Text("ok")))
    replies = [m["content"] for m in told.script.messages() if m["role"] == "assistant"]
    assert [b["type"] for b in replies[0]] == ["thinking", "redacted_thinking", "text", "tool_use"]
    assert replies[0][0]["thinking"] == "secret plan"
    assert replies[0][1] == {"type": "redacted_thinking", "data": "b64=="}
    assert [b["type"] for b in replies[1]] == ["text"]


@pytest.mark.rule("MA-B1.1", "MA-B1.7", "MA-D4.2")
async def test_images_documents_and_search_results_reach_the_model(served: Served) -> None:
    content: list[dict[str, Any]] = [
        {"type": "text", "text": "Look:"},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}},
        {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}},
        {
            "type": "document",
            "source": {"type": "text", "media_type": "text/plain", "data": "A text."},
            "title": "T",
            "context": "C",
        },
        {"type": "document", "source": {"type": "url", "url": "https://example.com/a.pdf"}},
    ]
    found = {
        "type": "search_result",
        "source": "https://example.com",
        "title": "Found",
        "citations": {"enabled": True},
        "content": [{"type": "text", "text": "hit"}],
    }
    told = await served.make_session(Reply(Call("lookup")), Reply(Text("seen")), tools=[CUSTOM])
    (echo,) = await told.send({"type": "user.message", "content": content})
    listed = await told.until_idle()
    assert listed[0]["content"] == content == echo["content"]
    (use,) = only(listed, CUSTOM_USE)
    answer = {"type": "user.custom_tool_result", "custom_tool_use_id": use["id"]}
    await told.send({**answer, "content": [content[0], content[1], found]})
    listed = await told.until_idle(2)
    assert only(listed, "user.custom_tool_result")[0]["content"] == [content[0], content[1], found]
    first, _, second = told.script.messages()
    assert first["content"] == content
    assert second["content"][0]["content"] == [content[0], content[1], found]


@pytest.mark.rule("MA-B1.7", "MA-D4.2", "MA-C5.1")
async def test_a_failed_call_may_give_back_a_picture(served: Served) -> None:
    """Providers take text alone in a result that is an error; the session must survive what the contract accepts."""
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}
    told = await served.make_session(Reply(Call("lookup")), Reply(Text("I see.")), tools=[CUSTOM])
    await told.say("go")
    (use,) = only(await told.until_idle(), CUSTOM_USE)
    answer = {"type": "user.custom_tool_result", "custom_tool_use_id": use["id"], "is_error": True}
    await told.send({**answer, "content": [picture]})
    listed = await told.until_idle(2)
    assert only(listed, "user.custom_tool_result")[0]["is_error"] is True
    assert trail_of(listed)[-3:] == idle()
    (block,) = told.script.messages()[-1]["content"]
    assert picture in block["content"]
    assert "failed" in block["content"][0]["text"]


@pytest.mark.rule("MA-B1.7", "MA-D4.2")
async def test_a_result_may_say_nothing(served: Served) -> None:
    told = await served.make_session(Reply(Call("lookup")), Reply(Text("ok")), tools=[CUSTOM])
    await told.say("go")
    (use,) = only(await told.until_idle(), CUSTOM_USE)
    await told.send({"type": "user.custom_tool_result", "custom_tool_use_id": use["id"]})
    listed = await told.until_idle(2)
    assert trail_of(listed)[-3:] == idle()
    assert len(told.script.requests) == 2


def system(text: str) -> dict[str, Any]:
    """A `system.message` to send."""
    return {"type": "system.message", "content": [{"type": "text", "text": text}]}


@pytest.mark.rule("MA-B1.9", "MA-B1.10", "MA-C7.9")
async def test_the_model_sees_a_system_message_with_what_it_follows(served: Served) -> None:
    told = await served.make_session(Reply(Text("1")), Reply(Call("lookup")), Reply(Text("2")), tools=[CUSTOM])
    await told.send(message("hi"), system("Answer in French."))
    listed = await told.until_idle()
    user, note = listed[0], listed[1]
    assert (user["type"], note["type"]) == ("user.message", "system.message")
    assert note["processed_at"] == user["processed_at"] is not None
    assert "Answer in French." in str(told.script.messages(0))
    await told.say("tool, please")
    (use,) = only(await told.until_idle(2), CUSTOM_USE)
    with pytest.raises(anthropic.BadRequestError):
        await told.send(system("alone"))
    await told.send(result(use["id"]), system("Now in German."))
    await told.until_idle(3)
    assert "Now in German." in str(told.script.messages(2)[-1])
    assert "Now in German." not in str(told.script.messages(1))


@pytest.mark.rule("MA-D1.2", "MA-C5.2")
async def test_system_prompt_effort_and_speed_are_sent(served: Served) -> None:
    script = served.script()
    script.enqueue(Reply(Text("ok")))
    beta = served.client.beta
    agent = await beta.agents.create(
        name="n", model={"id": script.model, "effort": "high", "speed": "fast"}, system="Be brief."
    )
    session = await beta.sessions.create(
        agent=agent.id, environment_id=served.environment_id, initial_events=[message("hi")]
    )
    (request,) = await script.wait_for_requests(1)
    assert request.body["system"] == "Be brief."
    assert request.body["output_config"] == {"effort": "high"}
    assert "tools" not in request.body
    assert (await beta.sessions.retrieve(session.id)).agent.model.id == script.model


async def test_without_a_provider_key_a_claude_session_is_refused_when_it_is_made(
    database_url: str, tmp_path: Path
) -> None:
    async with serve(database_url, tmp_path, anthropic_base_url=None) as served:
        with pytest.raises(anthropic.BadRequestError, match="ANTHROPIC_API_KEY"):
            await served.make_session()
        agent = await served.client.beta.agents.create(name="n", model="gpt-5")
        with pytest.raises(anthropic.BadRequestError, match="gpt-5"):
            await served.client.beta.sessions.create(agent=agent.id, environment_id=served.environment_id)
        assert (await served.client.beta.sessions.list()).data == []
