"""Rows with everything filled in, of which a test says only what it is about."""

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from perdure.domain.barrier import Action
from perdure.domain.control import Control
from perdure.domain.lease import Worker
from perdure.domain.mailbox import Input
from perdure.domain.step import Step
from perdure.domain.submission import Submission, SubmissionKey
from perdure.domain.transcript import TranscriptEntry
from perdure.domain.turn import Turn

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
SESSION, THREAD, TURN, WORKER, FIRST_REQUEST, LATER_REQUEST = (UUID(int=n) for n in range(1, 7))


def ms(count: int) -> timedelta:
    return timedelta(milliseconds=count)


def an_input(seq: int, **fields: Any) -> Input:
    row: dict[str, Any] = {
        "session_id": SESSION,
        "seq": seq,
        "id": UUID(int=1000 + seq),
        "thread_id": THREAD,
        "kind": "message",
        "state": "waiting",
        "reason": None,
        "turn_id": None,
        "action_id": None,
        "companion_of": None,
        "causal_pos": None,
        "size_bytes": 10,
        "authority": None,
        "received_at": NOW,
        "settled_at": None,
    }
    return Input(**row | fields)


def a_turn(**fields: Any) -> Turn:
    row: dict[str, Any] = {
        "session_id": SESSION,
        "id": TURN,
        "thread_id": THREAD,
        "gen": 1,
        "state": "active",
        "wait": None,
        "wake_at": None,
        "attempt_no": 2,
        "charge": 1,
        "charged": True,
        "worker_id": WORKER,
        "lease_token": 7,
        "outcome": None,
        "error_code": None,
        "round": 1,
        "cut_rounds": 0,
        "causal_pos": 1,
        "out_index": 0,
        "input_tokens": 0,
        "output_tokens": 0,
        "cache_read_tokens": 0,
        "cache_creation_5m_tokens": 0,
        "cache_creation_1h_tokens": 0,
        "progress_at": NOW,
        "created_at": NOW,
        "ended_at": None,
    }
    return Turn(**row | fields)


def a_step(position: int, **fields: Any) -> Step:
    row: dict[str, Any] = {
        "session_id": SESSION,
        "id": UUID(int=2000 + position),
        "turn_id": TURN,
        "thread_id": THREAD,
        "kind": "tool",
        "ordinal": 1,
        "try_no": 1,
        "failures": 0,
        "round": 1,
        "position": position,
        "name": "bash",
        "state": "prepared",
        "on_lost": "ambiguous",
        "serial": False,
        "item_id": UUID(int=3000 + position),
        "event_seq": 1,
        "attempt_no": 1,
        "dispatched_at": None,
        "settled_at": None,
    }
    return Step(**row | fields)


def an_action(position: int = 1, **fields: Any) -> Action:
    row: dict[str, Any] = {
        "session_id": SESSION,
        "id": UUID(int=4000 + position),
        "thread_id": THREAD,
        "turn_id": TURN,
        "round": 1,
        "position": position,
        "kind": "custom",
        "name": "weather",
        "on_lost": "ambiguous",
        "serial": False,
        "state": "open",
        "event_seq": 1,
        "answer": None,
        "answer_seq": None,
        "opened_at": NOW,
    }
    return Action(**row | fields)


def a_control(**fields: Any) -> Control:
    row: dict[str, Any] = {
        "session_id": SESSION,
        "seq": 9,
        "thread_id": THREAD,
        "kind": "interrupt",
        "state": "open",
        "target_turn_id": TURN,
        "target_gen": 1,
        "outcome": None,
        "at": NOW,
    }
    return Control(**row | fields)


def a_worker(**fields: Any) -> Worker:
    row: dict[str, Any] = {
        "id": WORKER,
        "host": "h",
        "boot": "b",
        "pid": 1,
        "started": "s",
        "lease_until": NOW + ms(5_000),
        "lock_free_since": None,
        "dead_at": None,
    }
    return Worker(**row | fields)


def a_key(**fields: Any) -> SubmissionKey:
    row: dict[str, Any] = {
        "digest": b"d",
        "body_digest": b"body",
        "explicit": False,
        "attempt": 1,
        "request_id": LATER_REQUEST,
        "known": None,
    }
    return SubmissionKey(**row | fields)


def a_record(**fields: Any) -> Submission:
    row: dict[str, Any] = {
        "digest": b"d",
        "session_id": SESSION,
        "body_digest": b"body",
        "explicit": False,
        "attempt": 0,
        "first_seq": 2,
        "last_seq": 3,
        "request_id": FIRST_REQUEST,
        "written_at": None,
        "connection_reused": False,
        "created_at": NOW,
    }
    return Submission(**row | fields)


def an_entry(causal_pos: int, kind: str, **fields: Any) -> TranscriptEntry:
    row: dict[str, Any] = {
        "session_id": SESSION,
        "thread_id": THREAD,
        "causal_pos": causal_pos,
        "position": 0,
        "kind": kind,
        "turn_id": TURN,
        "ref_seq": None,
        "body": None,
        "ref_body": None,
    }
    return TranscriptEntry(**row | fields)
