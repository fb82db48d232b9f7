"""When a worker counts as dead, and when a thread must be looked at."""

from datetime import datetime, timedelta
from typing import Any

import pytest
from tests.unit.domain.rows import NOW, a_control, a_turn, a_worker, ms

from perdure.domain.control import STOP_GRACE_MS
from perdure.domain.lease import LAPSE_TRUST_MS, LOCK_FREE_MS, LOCK_TRUST_MS, Evidence, is_dead
from perdure.domain.wakeup import due_at

LONG_UP = NOW - timedelta(hours=1)


def seen(*, up_since: datetime = LONG_UP, gone: bool = False) -> Evidence:
    return Evidence(now=NOW, database_up_since=up_since, process_gone=gone)


@pytest.mark.rule("MA-C15.1")
@pytest.mark.parametrize(
    ("worker", "evidence", "dead"),
    [
        pytest.param({}, seen(), False, id="alive"),
        pytest.param({}, seen(gone=True), True, id="its process is gone"),
        pytest.param({}, seen(gone=True, up_since=NOW), True, id="its process is gone, whatever the database"),
        pytest.param({"dead_at": NOW}, seen(up_since=NOW), True, id="buried for good"),
        pytest.param({"lock_free_since": NOW - ms(LOCK_FREE_MS)}, seen(), True, id="its lock is free long enough"),
        pytest.param({"lock_free_since": NOW - ms(LOCK_FREE_MS - 1)}, seen(), False, id="it may be reconnecting"),
        pytest.param(
            {"lock_free_since": NOW - ms(60_000)},
            seen(up_since=NOW - ms(LOCK_TRUST_MS - 1)),
            False,
            id="everybody is reconnecting",
        ),
        pytest.param({"lease_until": NOW}, seen(), True, id="its lease lapsed"),
        pytest.param({"lease_until": NOW + ms(1)}, seen(), False, id="its lease has not lapsed yet"),
        pytest.param(
            {"lease_until": NOW - ms(60_000)},
            seen(up_since=NOW - ms(LAPSE_TRUST_MS - 1)),
            False,
            id="nobody could renew",
        ),
    ],
)
def test_when_a_worker_is_dead(worker: dict[str, Any], evidence: Evidence, dead: bool) -> None:
    assert is_dead(a_worker(**worker), evidence) == dead


def due(turn: Any, *, dead: bool = False, waiting: int = 0, controls: tuple[Any, ...] = ()) -> datetime | None:
    return due_at(NOW, turn=turn, worker_dead=dead, waiting_count=waiting, controls=controls)


@pytest.mark.rule("MA-C3.1")
@pytest.mark.parametrize(
    ("found", "expected"),
    [
        pytest.param(due(None), None, id="nothing to do"),
        pytest.param(due(None, waiting=1), NOW, id="claimable work"),
        pytest.param(due(a_turn(), waiting=3), None, id="its owner will"),
        pytest.param(due(a_turn(), dead=True), NOW, id="its owner is dead"),
        pytest.param(due(a_turn(state="waiting", wait="action"), waiting=3), None, id="a client owes answers"),
        pytest.param(
            due(a_turn(state="waiting", wait="retry", wake_at=NOW + ms(900))), NOW + ms(900), id="a retry to come"
        ),
        pytest.param(due(a_turn(state="waiting", wait="capacity")), NOW, id="all answers are there"),
        pytest.param(due(a_turn(), controls=(a_control(),)), NOW + ms(STOP_GRACE_MS), id="an open stop"),
        pytest.param(due(a_turn(), dead=True, controls=(a_control(),)), NOW, id="a stop whose owner is dead"),
    ],
)
def test_when_a_thread_must_be_looked_at(found: datetime | None, expected: datetime | None) -> None:
    assert found == expected
