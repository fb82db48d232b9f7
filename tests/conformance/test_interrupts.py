"""G10 to G13: interrupts of calls, of nothing, of what waits; and racing the end of a turn."""

import asyncio
from random import Random

import anthropic
import pytest
from tests.conformance.test_tools import CUSTOM, CUSTOM_USE, TOOL_RESULT, TOOL_USE, TOOLSET

from perdure.testing.model_server import Call, Gate, Reply, Text
from perdure.testing.serving import INTERRUPT, Served, message, result
from perdure.testing.trail import RUNNING, Mark, call, idle, only, says, statuses_of, trail_of

STOPPED = Mark("user.interrupt")


def ordered(listed: list[dict[str, object]]) -> list[Mark]:
    """The trail without receipts of client events, whose place depends on when they came."""
    return [m for m in trail_of(listed) if not m.type.startswith(("user.", "system."))]


@pytest.mark.rule("MA-G10", "MA-C8.1", "MA-C8.3", "MA-C8.4", "MA-B1.3", "MA-B3.6", "MA-B5.1", "MA-C5.4")
async def test_an_interrupt_cancels_a_slow_model_call(served: Served) -> None:
    told = await served.make_session(Reply(Text("An answer that never ends"), stall_after=1))
    await told.say("m1")
    (request,) = await told.script.wait_for_requests(1)
    echo = await told.interrupt()
    assert echo["processed_at"] is None
    listed = await told.until_idle()
    await request.ended.wait(5)
    assert request.cancelled
    assert ordered(listed) == [*RUNNING, *call(failed=True), *idle()]
    assert only(listed, "user.interrupt")[0]["processed_at"] is not None
    assert await told.status() == "idle"
    await told.turn("m2", Reply(Text("fine")))
    assert len(told.script.requests) == 2


@pytest.mark.rule("MA-G10", "MA-C8.4", "MA-C8.6")
async def test_finished_parts_of_an_interrupted_reply_stay(served: Served) -> None:
    gate = Gate()
    told = await served.make_session(
        Reply(Text("whole"), Text("second"), gate_after_blocks={1: gate}, stall_after=None), tools=[CUSTOM]
    )
    await told.say("m1")
    await gate.reached()
    await told.interrupt()
    listed = await told.until_idle()
    gate.open()
    spoken = [m.short for m in trail_of(listed) if m.type == "agent.message"]
    assert spoken in ([], ["whole"])
    await told.turn("m2", Reply(Text("fine")))
    history = str(told.script.messages())
    assert ("whole" in history) == (spoken == ["whole"])
    assert "second" not in history


@pytest.mark.rule("MA-C8.5", "MA-C5.1", "MA-G12", "MA-C8.7")
async def test_redirect_while_a_tool_runs(served: Served) -> None:
    told = await served.make_session(tools=[TOOLSET])
    told.script.enqueue(Reply(Call("bash", {"command": "echo began >> log; sleep 30"})), Reply(Text("redirected")))
    await told.say("m1")
    await told.until(lambda events: bool(only(events, TOOL_USE)))
    echo = await told.send(INTERRUPT, message("m2"))
    assert [e["processed_at"] for e in echo] == [None, None]
    listed = await told.until_idle(2)
    marks = trail_of(listed)
    assert ordered(listed)[-8:] == [*idle()[1:], *RUNNING, *call(says("redirected")), *idle()][-8:]
    assert statuses_of(listed) == ["running", "idle", "running", "idle"]
    (outcome,) = only(listed, TOOL_RESULT)
    assert outcome["is_error"] is True
    assert marks.index(Mark(TOOL_RESULT, "error")) < marks.index(idle()[0])
    first_idle = only(listed, "session.status_idle")[0]
    assert only(listed, "user.message")[1]["processed_at"] >= first_idle["processed_at"]
    blocks = [b for m in told.script.messages(1) for b in m["content"]]
    assert [b["type"] for b in blocks] == ["text", "tool_use", "tool_result", "text"]
    assert blocks[2]["is_error"] is True
    looked = await told.turn("m3", Reply(Call("bash", {"command": "cat log 2>/dev/null | wc -l"})), Reply(Text("ok")))
    assert only(looked, TOOL_RESULT)[-1]["content"][0]["text"].strip()[-1] in "01"


@pytest.mark.rule("MA-G12", "MA-C8.7")
async def test_redirect_while_the_model_is_called(served: Served) -> None:
    told = await served.make_session(Reply(Text("no end"), stall_after=0), Reply(Text("redirected")))
    await told.say("m1")
    await told.script.wait_for_requests(1)
    await told.send(INTERRUPT, message("m2"))
    listed = await told.until_idle(2)
    assert statuses_of(listed) == ["running", "idle", "running", "idle"]
    assert only(listed, "user.message")[1]["processed_at"] >= only(listed, "session.status_idle")[0]["processed_at"]
    assert [e["content"][0]["text"] for e in only(listed, "agent.message")] == ["redirected"]


@pytest.mark.rule("MA-G13", "MA-C8.1")
async def test_an_interrupt_while_idle_changes_nothing(served: Served) -> None:
    told = await served.make_session()
    echo = await told.interrupt()
    assert trail_of(await told.events()) == [STOPPED]
    assert echo["processed_at"] is not None
    assert await told.status() == "idle"
    before = await told.turn("m", Reply(Text("ok")))
    await told.interrupt()
    listed = await told.events()
    assert listed[:-1] == before
    assert listed[-1]["processed_at"] is not None


@pytest.mark.rule("MA-G13", "MA-C8.13")
async def test_an_interrupt_while_parked_leaves_the_action_answerable(served: Served) -> None:
    told = await served.make_session(tools=[CUSTOM])
    told.script.enqueue(Reply(Call("lookup")), Reply(Text("resumed")))
    await told.say("go")
    parked = await told.until_idle()
    await told.interrupt()
    assert trail_of(await told.events())[len(parked) :] == [STOPPED]
    assert await told.status() == "idle"
    await told.send(INTERRUPT, result(only(parked, CUSTOM_USE)[0]["id"]))
    listed = await told.until_idle(2)
    assert ordered(listed)[-8:] == [*RUNNING, *call(says("resumed")), *idle()]


@pytest.mark.rule("MA-C8.8")
async def test_an_interrupt_may_name_the_thread_and_no_other(served: Served) -> None:
    told = await served.make_session(Reply(Text("no end"), stall_after=0))
    await told.say("m")
    thread = (await served.ok("GET", f"{told.path}/threads"))["data"][0]["id"]
    with pytest.raises(anthropic.BadRequestError, match="session_thread_id"):
        await told.send({**INTERRUPT, "session_thread_id": "sthr_" + "1" * 26})
    [echo] = await told.send({**INTERRUPT, "session_thread_id": thread})
    assert echo["session_thread_id"] == thread
    listed = await told.until_idle()
    assert statuses_of(listed) == ["running", "idle"]
    assert [e["session_thread_id"] for e in only(listed, "user.interrupt")] == [thread]


@pytest.mark.rule("MA-C8.11", "MA-C8.10")
async def test_a_message_and_its_interrupt_in_one_request(served: Served) -> None:
    told = await served.make_session()
    await told.send(message("m"), INTERRUPT)
    listed = await told.until_idle()
    assert statuses_of(listed) == ["running", "idle"]
    assert told.script.requests == []
    assert [e["processed_at"] is not None for e in only(listed, "user.message", "user.interrupt")] == [True, True]
    await told.turn("m2", Reply(Text("ok")))
    assert [b["text"] for m in told.script.messages() for b in m["content"]] == ["m2"]


@pytest.mark.rule("MA-C8.12")
async def test_two_interrupts_are_one_idle(served: Served) -> None:
    told = await served.make_session(Reply(Text("no end"), stall_after=0))
    await told.say("m")
    await told.script.wait_for_requests(1)
    await told.send(INTERRUPT, INTERRUPT)
    listed = await told.until_idle()
    assert statuses_of(listed) == ["running", "idle"]
    assert all(e["processed_at"] for e in only(listed, "user.interrupt"))


@pytest.mark.rule("MA-G11", "MA-C8.2")
async def test_an_interrupt_races_the_end_over_the_socket(served: Served) -> None:
    """100 turns of some milliseconds, each interrupted at a random moment."""
    random = Random(11)
    text = "A reply of several words."

    async def race(number: int) -> bool:
        told = await served.make_session(Reply(Text(text), delay_ms=random.randrange(8)))
        await told.say(f"m{number}")
        # The moment is the test: there is no signal for the middle of a commit.
        await asyncio.wait({asyncio.ensure_future(asyncio.Event().wait())}, timeout=random.random() * 0.06)
        await told.interrupt()
        listed = await told.until_idle()
        spoken = [e["content"][0]["text"] for e in only(listed, "agent.message")]
        assert spoken in ([], [text])
        assert statuses_of(listed) == ["running", "idle"]
        assert all(e["processed_at"] for e in only(listed, "user.interrupt", "user.message"))
        assert only(listed, "session.error") == []
        assert await told.status() == "idle"
        completed = trail_of(listed)[-1] == STOPPED
        assert not completed or spoken == [text]
        return completed

    completed = [c for start in range(0, 100, 5) for c in await asyncio.gather(*map(race, range(start, start + 5)))]
    assert 0 < sum(completed) < 100, "the delays meet one side of the race only"
