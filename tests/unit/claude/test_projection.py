"""Status, reasons, usage and refusals as pure functions of what is stored."""

import json
from datetime import timedelta
from typing import Any, get_args

import anthropic
import httpx2
import pytest
from tests.unit.claude.face import Face

from perdure.domain.errors import RefusalKind, Refused
from perdure.domain.event import PhaseName, PhaseSnap
from perdure.domain.projection import STATUS_OF_PHASE, may_follow, project_activity, project_phase
from perdure.domain.session import Session, SessionStatus
from perdure.http.claude.errors import ERRORS, RETRY_HELPS, to_wire_error


@pytest.mark.rule("MA-B3.1", "MA-B5.1", "MA-B6.1")
def test_each_phase_has_one_status() -> None:
    assert set(STATUS_OF_PHASE) == set(get_args(PhaseName))
    idle = project_phase("idle", PhaseSnap())
    assert (idle.status, idle.stop_reason) == ("idle", "end_turn")
    running = project_phase("active", PhaseSnap(stop_reason="refusal"))
    assert (running.status, running.stop_reason) == ("running", None)


@pytest.mark.rule("MA-B3.5", "MA-B6.1", "MA-B6.6")
async def test_only_drawn_transitions_happen(face: Face) -> None:
    statuses: tuple[SessionStatus, ...] = get_args(SessionStatus)
    assert not any(may_follow("terminated", after) for after in statuses)
    assert not may_follow("running", "running")
    session = await face.session()
    await face.say(session, "a")
    await face.say(session, "b")
    await face.fail(session, await face.begin(session), retryable=True)
    face.ledger.clock.advance(seconds=2)
    performing: Any = await face.reply(session, await face.begin(session), "r")
    await face.reply(session, performing, "s")
    await face.ok("POST", f"/v1/sessions/{session}/archive")
    seen = [
        e["type"].removeprefix("session.status_") for e in await face.events(session) if "session.status_" in e["type"]
    ]
    seen = ["rescheduling" if s == "rescheduled" else s for s in seen]
    assert seen == ["running", "rescheduling", "running", "idle", "terminated"]
    assert all(may_follow(a, b) for a, b in zip(["idle", *seen[:-1]], seen, strict=True))  # pyright: ignore[reportArgumentType]


async def test_active_time_counts_the_running_stretch_and_never_runs_backwards(face: Face) -> None:
    session = await face.session()
    await face.say(session, "a")
    (row,) = face.ledger.all(Session)
    now = face.ledger.clock.now
    assert project_activity(row, now + timedelta(milliseconds=1500)).usage.active_ms == 1500
    assert project_activity(row, now - timedelta(hours=1)).usage.active_ms == 0
    face.ledger.clock.advance(seconds=3)
    await face.reply(session, await face.begin(session), "r")
    (row,) = face.ledger.all(Session)
    later = face.ledger.clock.now + timedelta(hours=1)
    activity = project_activity(row, later)
    assert (activity.usage.active_ms, activity.duration_ms) == (3000, 3_603_000)
    await face.ok("POST", f"/v1/sessions/{session}/archive")
    (row,) = face.ledger.all(Session)
    assert project_activity(row, later).duration_ms == 3000


EXCEPTIONS: dict[RefusalKind, type[Exception]] = {
    "invalid": anthropic.BadRequestError,
    "unauthenticated": anthropic.AuthenticationError,
    "forbidden": anthropic.PermissionDeniedError,
    "not_found": anthropic.NotFoundError,
    "conflict": anthropic.BadRequestError,
    "precondition": anthropic.PreconditionFailedError,
    "unsupported": anthropic.BadRequestError,
    "not_built": anthropic.HTTPNotImplementedError,
    "too_large": anthropic.ContentTooLargeError,
    "rate_limited": anthropic.RateLimitError,
    "unavailable": anthropic.ServiceUnavailableError,
}


@pytest.mark.rule("MA-A0.6", "MA-A0.7", "MA-A0.8")
def test_the_error_table_is_total_and_tells_the_sdk_whether_to_retry() -> None:
    client = anthropic.Anthropic(api_key="k")
    kinds: tuple[RefusalKind, ...] = get_args(RefusalKind)
    assert set(ERRORS) == set(kinds)
    for kind in kinds:
        status, body, headers = to_wire_error(Refused(kind, "a_code", "m", "p", {"more": 1}), "req_1")
        value = json.loads(body)
        assert value == {
            "type": "error",
            "error": {
                "type": ERRORS[kind][1],
                "message": "m",
                "details": {"error_code": "a_code", "param": "p", "more": 1},
            },
            "request_id": "req_1",
        }
        assert (headers.get("x-should-retry") == "false") == (kind not in RETRY_HELPS)
        response = httpx2.Response(status, content=body, headers=headers, request=httpx2.Request("GET", "http://h/"))
        error = client._make_status_error_from_response(response)  # pyright: ignore[reportPrivateUsage]
        assert type(error) is EXCEPTIONS[kind]
        assert error.error_code == "a_code"  # pyright: ignore[reportAttributeAccessIssue]
        assert client._should_retry(response) is (kind in RETRY_HELPS)  # pyright: ignore[reportPrivateUsage]
    plain = json.loads(to_wire_error(Refused("invalid", "invalid_request_error", "m"), "r")[1])
    assert plain["error"] == {"type": "invalid_request_error", "message": "m"}
    assert to_wire_error(Refused("unavailable", "unavailable", "m"), "r")[2]["retry-after"] == "1"
