"""G1 to G3: plain turns, sessions created with events, several messages."""

import anthropic
import pytest

from perdure.testing.model_server import Gate, Reply, Text
from perdure.testing.serving import INTERRUPT, Served, message
from perdure.testing.trail import RUNNING, call, frames_of, idle, only, said, says, trail_of


@pytest.mark.rule(
    "MA-G1", "MA-G1.1", "MA-B1.2", "MA-B2.1", "MA-B2.6", "MA-B3.2", "MA-B3.3", "MA-B3.4", "MA-B7.7", "MA-B7.8"
)
@pytest.mark.rule("MA-B8.2", "MA-B8.3", "MA-A1.14", "MA-B7.1", "MA-B7.3", "MA-B8.4")
async def test_a_plain_turn_in_its_exact_order(served: Served) -> None:
    told = await served.make_session(Reply(Text("Hello, you.")))
    assert told.created["status"] == "idle"
    assert await told.events() == []
    frames = []
    async with told.stream() as response:
        echo = await told.say("Hi")
        async for frame in frames_of(response):
            frames.append(frame.data)
            assert frame.name == frame.data["type"]
            if frame.name == "session.status_idle":
                break
        assert await told.status() == "idle"
    turn = [said("Hi"), *RUNNING, *call(says("Hello, you."))]
    assert trail_of(frames) == [*turn, said("Hi"), *idle()]
    listed = await told.events()
    assert trail_of(listed) == [*turn, *idle()]
    first, second = only(frames, "user.message")
    assert first["id"] == second["id"] == echo[0]["id"] == listed[0]["id"]
    assert first["processed_at"] is None
    assert echo[0].get("processed_at") is None
    assert second == listed[0]
    assert second["processed_at"] is not None
    assert listed[1:] == [f for f in frames[1:] if f["type"] != "user.message"]
    assert told.script.messages(0) == [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]


@pytest.mark.rule("MA-G2", "SDK:sessions.create")
async def test_a_session_created_with_events_runs_at_once(served: Served) -> None:
    told = await served.make_session(Reply(Text("Good.")), initial_events=[message("Go")])
    assert told.created["status"] == "running"
    assert trail_of(await told.events())[0] == said("Go")
    listed = await told.until_idle()
    assert listed[0]["id"].startswith("sevt_")
    assert trail_of(listed) == [said("Go"), *RUNNING, *call(says("Good.")), *idle()]


@pytest.mark.rule("MA-G2.1", "MA-A1.9", "MA-F2", "MA-B1.12")
@pytest.mark.parametrize(
    "events",
    [
        [message("ok"), {"type": "user.message", "content": []}],
        [message("ok"), INTERRUPT],
        [message("ok"), {"type": "system.message", "content": [{"type": "text", "text": "s"}]}],
        [{"type": "user.define_outcome", "description": "d", "rubric": {"type": "text", "content": "r"}}],
        [message("m")] * 51,
    ],
    ids=["invalid second", "interrupt", "system", "outcome", "51"],
)
async def test_a_bad_initial_event_creates_no_session(served: Served, events: list[object]) -> None:
    before = [s.id async for s in served.client.beta.sessions.list(limit=100)]
    with pytest.raises(anthropic.BadRequestError, match="initial_events"):
        await served.make_session(initial_events=events)
    assert [s.id async for s in served.client.beta.sessions.list(limit=100)] == before


@pytest.mark.rule("MA-F2")
async def test_fifty_initial_events_are_fifty_turns(served: Served) -> None:
    script = served.script()
    script.respond_with(lambda _: Reply(Text("ok")))
    told = await served.make_session(script=script, initial_events=[message(f"m{n}") for n in range(50)])
    listed = await told.until_idle()
    assert len(only(listed, "agent.message")) == 50
    assert len(only(listed, "session.status_running")) == 1


@pytest.mark.rule(
    "MA-G3", "MA-G3.1", "MA-C2.2", "MA-C4.1", "MA-B6.3", "MA-C4.2", "MA-C5.2", "MA-C6.2", "MA-B3.5", "MA-B8.1"
)
async def test_three_messages_one_of_them_in_mid_turn(served: Served) -> None:
    gate = Gate()
    told = await served.make_session(Reply(Text("r1"), gate=gate), Reply(Text("r2")), Reply(Text("r3")))
    await told.say("m1", "m2")
    await gate.reached()
    await told.say("m3")
    assert await told.status() == "running"
    gate.open()
    listed = await told.until_idle()
    assert trail_of(listed) == [
        said("m1"),
        said("m2"),
        *RUNNING,
        call()[0],
        said("m3"),
        *call(says("r1"))[1:],
        *call(says("r2")),
        *call(says("r3")),
        *idle(),
    ]
    texts = [[b["text"] for m in r.body["messages"] for b in m["content"]] for r in told.script.requests]
    assert texts == [["m1"], ["m1", "r1", "m2"], ["m1", "r1", "m2", "r2", "m3"]]


@pytest.mark.rule("MA-A2.2", "MA-A2.3", "SDK:sessions.events.send")
async def test_the_echo_is_the_sent_events_alone_and_all_or_none(served: Served) -> None:
    told = await served.make_session(Reply(Text("1")), Reply(Text("2")))
    with pytest.raises(anthropic.BadRequestError, match=r"events\.1\.content"):
        await told.send(message("a"), {"type": "user.message", "content": []})
    assert await told.events() == []
    echo = await told.say("a", "b")
    assert trail_of(echo) == [said("a"), said("b")]
    listed = await told.until_idle()
    assert [e["id"] for e in only(listed, "user.message")] == [e["id"] for e in echo]
