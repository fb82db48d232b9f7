"""The built-in tools over the wire: what they give back, where they stop, what they refuse; and two limits of a session."""

from typing import Any

import anthropic
import pytest
from tests.conformance.test_model_replies import PIXEL
from tests.conformance.test_tools import ASK_BASH, CUSTOM, CUSTOM_USE, TOOL_RESULT, TOOLSET

from perdure.domain import mailbox
from perdure.domain.projection import FOLLOWED_BY, may_follow
from perdure.testing.model_server import Call, Failure, Gate, Reply, Text
from perdure.testing.serving import INTERRUPT, Served, Told, result
from perdure.testing.trail import only, statuses_of


async def run(told: Told, *calls: Call) -> list[dict[str, Any]]:
    """The results of these calls, one turn for each."""
    before = len(only(await told.events(), TOOL_RESULT))
    for call in calls:
        await told.turn("next", Reply(call), Reply(Text("ok")))
    return only(await told.events(), TOOL_RESULT)[before:]


def texts(outcome: dict[str, Any]) -> str:
    """What a result says."""
    return "".join(b["text"] for b in outcome["content"] if b["type"] == "text")


@pytest.mark.rule("MA-D1.4", "MA-D1.5", "MA-D1.6")
async def test_the_shell(served: Served) -> None:
    told = await served.make_session(tools=[TOOLSET])
    quiet, moved, there, slow, after, restarted, fresh = await run(
        told,
        Call("bash", {"command": "true"}),
        Call("bash", {"command": "mkdir d && cd d && X=1"}),
        Call("bash", {"command": "basename $PWD; echo $X"}),
        Call("bash", {"command": "sleep 60 & sleep 60", "timeout_ms": 300}),
        Call("bash", {"command": "pgrep -x sleep | wc -l"}),
        Call("bash", {"restart": True}),
        Call("bash", {"command": "echo [$X]"}),
    )
    assert texts(quiet) == "(no output)"
    assert not moved["is_error"]
    assert texts(there).split() == ["d", "1"]
    assert slow["is_error"] is True
    assert texts(after).split()[-1] == "0"
    assert not restarted["is_error"]
    assert "[]" in texts(fresh)


@pytest.mark.rule("MA-D1.7", "MA-D1.8", "MA-D1.9", "MA-D1.10", "MA-D1.11")
async def test_files(served: Served) -> None:
    told = await served.make_session(tools=[TOOLSET])
    lines = "\n".join(f"line {n}" for n in range(1, 6))
    wrote, part, twice, once, kept, every, whole = await run(
        told,
        Call("write", {"file_path": "a/b/c.txt", "content": lines}),
        Call("read", {"file_path": "a/b/c.txt", "view_range": [2, 3]}),
        Call("edit", {"file_path": "a/b/c.txt", "old_string": "line", "new_string": "row"}),
        Call("edit", {"file_path": "a/b/c.txt", "old_string": "line 3", "new_string": "third"}),
        Call("bash", {"command": "cat a/b/c.txt"}),
        Call("edit", {"file_path": "a/b/c.txt", "old_string": "line", "new_string": "row", "replace_all": True}),
        Call("read", {"file_path": "a/b/c.txt"}),
    )
    assert not wrote["is_error"]
    assert "line 2" in texts(part)
    assert "line 4" not in texts(part)
    assert twice["is_error"] is True
    assert not once["is_error"]
    assert texts(kept).strip() == lines.replace("line 3", "third")
    assert not every["is_error"]
    assert "line" not in texts(whole)
    assert "third" in texts(whole)
    _, globbed, found, nothing, outside, linked = await run(
        told,
        Call("bash", {"command": "sleep 0.01; touch newer.txt; ln -s /etc link"}),
        Call("glob", {"pattern": "**/*.txt"}),
        Call("grep", {"pattern": "third"}),
        Call("grep", {"pattern": "nowhere to be found"}),
        Call("read", {"file_path": "/etc/passwd"}),
        Call("read", {"file_path": "link/passwd"}),
    )
    assert texts(globbed).index("newer.txt") < texts(globbed).index("c.txt")
    assert "c.txt" in texts(found)
    assert not nothing["is_error"]
    assert outside["is_error"] is True
    assert linked["is_error"] is True


@pytest.mark.rule("MA-D1.7")
async def test_a_picture_is_read_as_one(served: Served) -> None:
    told = await served.make_session(tools=[TOOLSET])
    _, picture = await run(
        told,
        Call("bash", {"command": f"echo {PIXEL} | base64 -d > p.png"}),
        Call("read", {"file_path": "p.png"}),
    )
    (image,) = [b for b in picture["content"] if b["type"] == "image"]
    assert image["source"] == {"type": "base64", "media_type": "image/png", "data": PIXEL}
    block = told.script.messages()[-1]["content"][0]
    assert image in block["content"]


@pytest.mark.rule("MA-D1.12", "MA-F7")
async def test_long_output_is_kept_in_a_file(served: Served) -> None:
    told = await served.make_session(tools=[TOOLSET])
    first = Call("bash", {"command": "for i in $(seq 30000); do echo number-$i; done > long"})
    _, long = await run(told, first, Call("bash", {"command": "cat long"}))
    assert len(texts(long)) <= 100_000
    path = next(word.strip("`'\".,:;()[]") for word in texts(long).split() if "/" in word)
    (again,) = await run(told, Call("bash", {"command": f"wc -c < {path}"}))
    assert not again["is_error"], texts(long)[-300:]
    assert int(texts(again)) > 100_000 - 1_000


@pytest.mark.rule("MA-C2.4", "MA-F10")
async def test_a_full_mailbox_refuses_before_anything_is_stored(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (mailbox.WAITING_COUNT_MAX, mailbox.WAITING_BYTES_MAX) == (1_000, 64 * 1024 * 1024)
    monkeypatch.setattr(mailbox, "WAITING_COUNT_MAX", 5)
    monkeypatch.setattr(mailbox, "WAITING_BYTES_MAX", 10_000)
    gate = Gate()
    told = await served.make_session(Reply(Text("ok"), gate=gate))
    told.script.respond_with(lambda _: Reply(Text("ok")))
    client = served.sdk(max_retries=0)
    await told.say("running")
    await gate.reached()
    await told.say(*(f"m{n}" for n in range(4)))
    before = await told.events()
    for batch in (["a", "b"], ["x" * 10_001]):
        with pytest.raises(anthropic.RateLimitError) as caught:
            await client.beta.sessions.events.send(
                told.id,
                events=[{"type": "user.message", "content": [{"type": "text", "text": text}]} for text in batch],
            )
        assert caught.value.body["error"]["details"]["error_code"] == "mailbox_full"
    assert await told.events() == before
    await told.say("fits")
    gate.open()
    listed = await told.until_idle()
    assert len(only(listed, "agent.message")) == 6
    await client.close()


@pytest.mark.rule("MA-B6.1", "MA-B3.1", "MA-C4.4", "MA-B6.3")
async def test_statuses_follow_each_other_as_they_may(served: Served) -> None:
    """One session through everything that changes its status; each step is one that the rules have."""
    told = await served.make_session(tools=[ASK_BASH, CUSTOM])
    told.script.enqueue(
        Failure(529, "overloaded_error", "Overloaded", retry_after="0.01"),
        Reply(Call("lookup"), Call("lookup")),
        Reply(Text("resumed")),
        Reply(Text("waited")),
        Reply(Text("never ends"), stall_after=0),
        Failure(401, "authentication_error", "No"),
    )
    await told.say("go")
    first, second = only(await told.until_idle(), CUSTOM_USE)
    await told.say("waits")
    await told.send(result(first["id"]))
    await told.send(result(second["id"]))
    await told.until_idle(3)
    await told.say("long")
    await told.script.wait_for_requests(5)
    await told.send(INTERRUPT)
    await told.until_idle(4)
    await told.say("last")
    listed = await told.until(lambda events: bool(only(events, "session.status_terminated")))
    names = {"rescheduled": "rescheduling"}
    seen = [names.get(s, s) for s in statuses_of(listed)]
    assert " ".join(seen) == ("running rescheduling running idle idle running idle running idle running terminated")
    before = "idle"
    for after in seen:
        assert may_follow(before, after)  # pyright: ignore[reportArgumentType]
        before = after
    assert set(seen) == set(FOLLOWED_BY)
    events = [e.to_dict(mode="json") async for e in served.client.beta.sessions.events.list(told.id)]
    assert [e["id"] for e in events] == [e["id"] for e in listed]
