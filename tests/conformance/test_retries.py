"""Failures of the provider: tried again, given up, or final."""

import asyncio

import pytest
from tests.conformance.test_archive_delete import refused_once

from perdure.testing.model_server import Failure, Gate, Reply, Text
from perdure.testing.serving import Served, Told, message
from perdure.testing.trail import (
    RESCHEDULED,
    RUNNING,
    TERMINATED,
    Mark,
    call,
    idle,
    only,
    said,
    says,
    statuses_of,
    trail_of,
)

SOON = "0.01"
"""`Retry-After` of a provider that is in no hurry to be spared."""


def overloaded(retry_after: str | int | None = SOON) -> Failure:
    """The failure that may be tried again."""
    return Failure(529, "overloaded_error", "Overloaded", retry_after=retry_after)


@pytest.mark.rule("MA-C10.1", "MA-B4.1", "MA-B4.2", "MA-B4.3", "MA-B6.5", "MA-B3.6", "MA-B3.7", "MA-B3.2")
@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (overloaded(), "model_overloaded_error"),
        (Failure(429, "rate_limit_error", "Slow down", retry_after=SOON), "model_rate_limited_error"),
        (Failure(500, "api_error", "Oops", retry_after=SOON), "model_request_failed_error"),
    ],
)
async def test_a_failure_is_shown_and_tried_again(served: Served, failure: Failure, kind: str) -> None:
    told = await served.make_session()
    listed = await told.turn("go", failure, Reply(Text("after all")))
    assert trail_of(listed) == [
        said("go"),
        *RUNNING,
        *call(failed=True),
        Mark("session.error", f"{kind} retrying"),
        *RESCHEDULED,
        *RUNNING,
        *call(says("after all")),
        *idle(),
    ]
    assert told.script.messages(0) == told.script.messages(1)
    (error,) = only(listed, "session.error")
    assert "Traceback" not in error["error"]["message"]
    assert served.api_key not in error["error"]["message"]


@pytest.mark.rule("MA-C10.1", "MA-B7.11")
@pytest.mark.parametrize("how", ["cut", "error"])
async def test_a_reply_that_breaks_off_is_asked_for_again_and_appears_once(served: Served, how: str) -> None:
    text = "A reply that is long enough to be cut in the middle."
    broken = (
        Reply(Text(text), cut_after=2)
        if how == "cut"
        else Reply(Text(text), error=Failure(529, "overloaded_error", "Overloaded"))
    )
    told = await served.make_session()
    listed = await told.turn("go", broken, Reply(Text("whole")))
    assert [m.short for m in trail_of(listed) if m.type == "agent.message"] == ["whole"]
    assert statuses_of(listed) == ["running", "rescheduled", "running", "idle"]


@pytest.mark.rule("MA-C10.2")
async def test_retry_after_is_honoured(served: Served) -> None:
    told = await served.make_session(overloaded(1), Reply(Text("ok")))
    clock = asyncio.get_running_loop().time
    await told.say("go")
    await told.until(lambda e: bool(only(e, "session.status_rescheduled")))
    assert await told.status() == "rescheduling"
    began = clock()
    await told.until_idle()
    assert 0.7 < clock() - began < 3


@pytest.mark.rule("MA-C10.3", "MA-C10.4", "MA-F14", "MA-B4.4", "MA-B5.3")
async def test_exhausted_retries_flush_what_waits_and_leave_the_session_usable(served: Served) -> None:
    gate = Gate()
    told = await served.make_session()
    told.script.respond_with(lambda _: overloaded())
    told.script.enqueue(Reply(Text("first"), gate=gate))
    await told.say("m0")
    await gate.reached()
    sent = await told.say("m1", "m2", "m3")
    gate.open()
    listed = await told.until_idle()
    assert len(told.script.requests) == 4
    errors = only(listed, "session.error")
    assert [e["error"]["retry_status"]["type"] for e in errors] == ["retrying", "retrying", "exhausted"]
    assert errors[-1]["flushed_event_ids"] == [e["id"] for e in sent[1:]]
    assert trail_of(listed)[-4:] == [
        Mark("session.error", "model_overloaded_error exhausted"),
        *idle("retries_exhausted"),
    ]
    assert all(e["processed_at"] for e in only(listed, "user.message"))
    custody = (await served.ok("GET", f"/perdure{told.path}/inputs"))["data"]
    assert [(c["state"], c["reason"]) for c in custody[:2]] == [("dropped", "retries_exhausted")] * 2
    again = await told.turn("m4", Reply(Text("fine")))
    assert trail_of(again)[-3:] == idle()
    history = str(told.script.messages())
    assert "m4" in history
    assert "m2" not in history
    assert "m3" not in history


@pytest.mark.rule("MA-C10.5", "MA-B4.2", "MA-B6.6", "MA-B4.3")
@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (Failure(401, "authentication_error", "Bad key"), "model_request_failed_error"),
        (Failure(402, "billing_error", "No credit"), "billing_error"),
        (Failure(400, "invalid_request_error", "Bad request"), "model_request_failed_error"),
    ],
)
async def test_a_permanent_failure_terminates(served: Served, failure: Failure, kind: str) -> None:
    told = await served.make_session(failure)
    await told.say("m1", "m2")
    listed = await told.until_idle()
    assert trail_of(listed)[2:] == [
        *RUNNING,
        *call(failed=True),
        Mark("session.error", f"{kind} terminal"),
        *TERMINATED,
    ]
    assert all(e["processed_at"] for e in only(listed, "user.message"))
    assert len(told.script.requests) == 1
    assert await told.status() == "terminated"
    async with refused_once(told):
        await told.say("late")
    archived = await served.client.beta.sessions.archive(told.id)
    assert archived.archived_at is not None
    assert await told.events() == listed
    await served.client.beta.sessions.delete(told.id)


async def _rescheduling(served: Served) -> Told:
    told = await served.make_session(overloaded(30))
    await told.say("m1")
    await told.until(lambda e: bool(only(e, "session.status_rescheduled")))
    return told


@pytest.mark.rule("MA-C8.9", "MA-B6.5")
async def test_an_interrupt_ends_the_wait(served: Served) -> None:
    told = await _rescheduling(served)
    echo = await told.interrupt()
    listed = await told.events()
    assert echo["processed_at"] is not None or only(listed, "user.interrupt")[0]["processed_at"] is not None
    assert statuses_of(listed) == ["running", "rescheduled", "idle"]
    assert trail_of(listed)[-3:] == idle()
    again = await told.turn("m2", Reply(Text("ok")))
    assert statuses_of(again)[-2:] == ["running", "idle"]
    assert len(told.script.requests) == 2


@pytest.mark.rule("MA-C2.5", "MA-C11.1", "MA-G14")
async def test_messages_wait_for_a_rescheduling_session_and_it_can_not_be_deleted(served: Served) -> None:
    told = await _rescheduling(served)
    (echo,) = await told.say("m2")
    assert echo.get("processed_at") is None
    assert await told.status() == "rescheduling"
    for refuse in (served.client.beta.sessions.delete, served.client.beta.sessions.archive):
        async with refused_once(told):
            await refuse(told.id)
    told.script.enqueue(Reply(Text("two")))
    await told.send({"type": "user.interrupt"})
    listed = await told.until_idle(2)
    assert statuses_of(listed) == ["running", "rescheduled", "idle", "running", "idle"]
    assert trail_of(listed)[-5:] == [says("two"), Mark("span.model_request_end"), *idle()]


@pytest.mark.rule("MA-F12", "MA-B4.5")
async def test_a_turn_that_never_stops_calling_is_ended(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    from perdure.core import advance, outcomes
    from perdure.domain import turn
    from perdure.testing.model_server import Call

    for module in (advance, outcomes, turn):
        if hasattr(module, "ROUNDS_MAX"):
            monkeypatch.setattr(module, "ROUNDS_MAX", 4)
    assert turn.ROUNDS_MAX == 4
    told = await served.make_session(tools=[{"type": "agent_toolset_20260401"}])
    told.script.respond_with(lambda _: Reply(Call("glob", {"pattern": "*"})))
    await told.send(message("go"))
    listed = await told.until_idle()
    assert trail_of(listed)[-4:] == [
        Mark("session.error", "tool_use_limit_reached_error exhausted"),
        *idle("retries_exhausted"),
    ]
    assert len(told.script.requests) == 4
