"""Stops: they end exactly the turn that they met, at any moment of it."""

import pytest
from tests.cases.driving import INTERRUPT, TOOLSET, Site, message, results_in, text_of

from perdure.testing.model_server import Call, Gate, Reply, Text

STUB_TOOLS = True


@pytest.mark.case("B029")
async def test_a_stop_names_one_turn_and_spares_the_next(site: Site) -> None:
    """Elsewhere a stop flag outlived a hung turn and ate the next message; here the next message gets its one model call."""
    session = await site.open(TOOLSET)
    gate = site.tools.hold("b029", stubborn=True)
    site.script(Reply(Call("write", {"file_path": "b029", "content": "x"})))
    await session.send(message("begin"))
    await gate.reached()
    await session.send(INTERRUPT)
    assert await session.idle(1) == "end_turn"
    site.script(Reply(Text("hello")))
    await session.send(message("hi"))
    assert await session.idle(2) == "end_turn"
    assert len(site.requests) == 2
    [result] = results_in(site.requests[1]).values()
    assert result["is_error"]
    site.tools.answer("b029", "too late")
    gate.open()
    await site.tools.ended("b029").wait(5)
    await session.go_on(idles=3)
    assert "too late" not in [text_of(e) for e in await session.listed("agent.tool_result")]
    assert site.tools.executions("b029") == 1


@pytest.mark.case("B029")
async def test_a_tool_that_ends_on_cancel_leaves_no_stop_behind(site: Site) -> None:
    """The same with a tool that obeys: the stop takes effect at once and is over with its turn."""
    session = await site.open(TOOLSET)
    gate = site.tools.hold("b029-obeys")
    site.script(Reply(Call("write", {"file_path": "b029-obeys", "content": "x"})))
    await session.send(message("begin"))
    await gate.reached()
    await session.send(INTERRUPT, INTERRUPT)
    assert await session.idle(1, 2) == "end_turn"
    site.script(Reply(Text("hello")))
    await session.send(message("hi"))
    assert await session.idle(2) == "end_turn"
    await session.go_on(idles=3)
    assert site.tools.executions("b029-obeys") == 1


@pytest.mark.case("B030")
async def test_a_stop_behind_its_message_in_one_request(site: Site) -> None:
    """Elsewhere a stop before the runner existed was lost; here the message that no worker has taken ends without a model call."""
    session = await site.open()
    await session.send(message("queued"), INTERRUPT)
    assert await session.idle(1) == "end_turn"
    await session.check(idles=1)
    assert site.requests == []
    await session.go_on(idles=2)
    assert "queued" not in str(site.requests[-1].body["messages"])


@pytest.mark.case("B030")
async def test_a_stop_right_behind_its_message(site: Site) -> None:
    """At whatever point of its claim the stop meets the turn, that ends once, with at most the one call that was in flight."""
    session = await site.open()
    gate = Gate()
    for idles in range(1, 11):
        before = len(site.requests)
        site.replies.clear()
        site.script(Reply(Text("never"), gate=gate))
        await session.send(message(f"message {idles}"))
        await session.send(INTERRUPT)
        assert await session.idle(idles, 3) == "end_turn"
        assert len(site.requests) - before <= 1
        await session.check(idles=idles)
    site.replies.clear()
    assert await session.texts() == []
    await session.go_on(idles=11)


@pytest.mark.case("B030")
async def test_a_stop_while_the_message_waits_behind_another(site: Site) -> None:
    """A stop ends the turn that runs; what waits behind it runs normally, on a history without the unfinished reply."""
    session = await site.open()
    gate = Gate()
    site.script(Reply(Text("never"), gate=gate), Reply(Text("second done")))
    await session.send(message("first"))
    await gate.reached()
    await session.send(message("second"))
    await session.send(INTERRUPT)
    assert await session.idle(2) == "end_turn"
    await session.check(idles=2)
    assert await session.texts() == ["second done"]
    assert len(site.requests) == 2
    assert site.requests[0].cancelled
    await session.go_on(idles=3)
