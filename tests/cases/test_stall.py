"""Providers that fall silent: a turn never waits longer than its deadline, and a stop never waits for it."""

import time

import pytest
from tests.cases.driving import INTERRUPT, Site, message

from perdure.testing.model_server import Gate, Reply, Text

STALL_S = 1.5
SETTINGS = {"model_stall_ms": int(STALL_S * 1000)}
LONG = Text("three deltas and then silence, which this text would not be")


@pytest.mark.case("B049")
@pytest.mark.rule("MA-F15")
@pytest.mark.parametrize("silent_after", [3, 0], ids=["after three deltas", "from the start"])
async def test_a_stalled_stream_is_called_again(site: Site, silent_after: int) -> None:
    """Elsewhere a silent stream froze the turn for hours; here the call is given up at its deadline and made again."""
    session = await site.open()
    site.script(Reply(LONG, stall_after=silent_after), Reply(Text("second try")), Reply(Text("queued")))
    await session.send(message("speak"))
    await session.send(message("queued meanwhile"))
    assert await session.idle(1) == "end_turn"
    [error] = session.seen("session.error")
    assert error["error"]["retry_status"] == {"type": "retrying"}
    assert await session.texts() == ["second try", "queued"]
    spans = session.seen("span.model_request_end")
    assert [s["is_error"] for s in spans] == [True, False, False]
    assert [s["model_usage"]["input_tokens"] > 0 for s in spans] == [True, True, True], "what it took in is paid for"
    assert all("three deltas" not in str(r.body["messages"]) for r in site.requests)
    await site.requests[0].ended.wait(5)
    assert site.requests[0].cancelled
    await session.go_on(idles=2)


@pytest.mark.case("B049")
async def test_a_provider_that_never_answers(site: Site) -> None:
    """Three silent tries end the turn visibly; the message that waited says why it did not run, and the session works."""
    session = await site.open()
    site.script(*[Reply(Text("never"), gate=Gate()) for _ in range(3)])
    await session.send(message("speak"))
    await session.send(message("queued"))
    assert await session.idle(1, 3 * STALL_S + 8) == "retries_exhausted"
    errors = [e["error"] for e in session.seen("session.error")]
    assert [e["retry_status"]["type"] for e in errors] == ["retrying", "retrying", "exhausted"]
    assert f"{STALL_S:g} s" in errors[-1]["message"]
    queued = (await session.listed("user.message"))[1]
    assert session.seen("session.error")[-1]["flushed_event_ids"] == [queued["id"]]
    await session.go_on(idles=2)


@pytest.mark.case("B049")
@pytest.mark.parametrize("silent_after", [3, None], ids=["after three deltas", "from the start"])
async def test_an_interrupt_during_the_stall(site: Site, silent_after: int | None) -> None:
    """Elsewhere a stop had no effect on a stalled turn; here it takes well under a second, and the queued message runs."""
    session = await site.open()
    gate = None if silent_after else Gate()
    site.script(Reply(LONG, stall_after=silent_after, gate=gate), Reply(Text("queued done")))
    await session.send(message("speak"))
    await site.arrived(1)
    await session.send(message("queued"))
    began = time.monotonic()
    await session.send(INTERRUPT)
    assert await session.idle(1, STALL_S) == "end_turn"
    assert time.monotonic() - began < 1
    assert await session.idle(2) == "end_turn"
    assert await session.texts() == ["queued done"]
    assert session.seen("session.error") == []
    spans = session.seen("span.model_request_end")
    assert [s["model_usage"]["input_tokens"] > 0 for s in spans] == [bool(silent_after), True]
    await session.go_on(idles=3)


@pytest.mark.case("B049")
async def test_an_interrupt_while_the_retry_waits(site: Site) -> None:
    """A stop between two tries ends the turn without another one."""
    session = await site.open()
    site.script(Reply(LONG, stall_after=0))
    await session.send(message("speak"))
    await session.frame("session.status_rescheduled")
    await session.send(INTERRUPT)
    assert await session.idle(1, 0.9) == "end_turn"
    await session.go_on(idles=2)
    assert len(site.requests) == 2


@pytest.mark.case("B049")
async def test_a_slow_stream_is_no_stall(site: Site) -> None:
    """A reply that takes longer than the deadline in all, but never falls silent for so long, is not given up."""
    session = await site.open()
    text = "word " * 40
    site.script(Reply(Text(text), chunk_chars=50, delay_ms=500))
    began = time.monotonic()
    await session.send(message("slowly"))
    assert await session.idle(1) == "end_turn"
    assert time.monotonic() - began > STALL_S
    assert await session.texts() == [text]
    await session.go_on(idles=2)
