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
