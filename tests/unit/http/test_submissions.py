"""Submit once, the process's part: names of requests, waiting for the first, and what is known of its response."""

import asyncio
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest

from perdure.core.submissions import REMEMBERED_S, Attempt, Submissions
from perdure.domain.errors import Refused
from perdure.domain.submission import New, Repeat, Submission, SubmissionKey, Written, decide_submission

PROCESS, KEY, OTHER_KEY, SESSION = UUID(int=1), UUID(int=2), UUID(int=3), UUID(int=4)
START = datetime(2026, 1, 1, tzinfo=UTC)
HERE, THERE = ("10.0.0.1", 4001), ("10.0.0.1", 4002)


class Clock:
    def __init__(self) -> None:
        self.at = START

    def __call__(self) -> datetime:
        return self.at

    def pass_s(self, seconds: float) -> None:
        self.at += timedelta(seconds=seconds)


class Room:
    """Submissions on a clock, with the record that a ledger would keep."""

    def __init__(self, **options: float) -> None:
        self.clock = Clock()
        self.submissions = Submissions(PROCESS, now=self.clock, **options)  # type: ignore[arg-type]
        self.record: Submission | None = None

    def name(
        self, retry: int = 0, *, body: bytes = b"{}", key: UUID = KEY, explicit: str | None = None
    ) -> SubmissionKey:
        named = self.submissions.identify(
            key_id=key, method="POST", route="/v1/x", body=body, idempotency_key=explicit, retry_count=str(retry)
        )
        assert isinstance(named, SubmissionKey)
        return named

    async def admit(self, retry: int = 0, **options: str) -> tuple[Attempt, str]:
        """Enter and decide, as a handler and its ledger do; the caller leaves."""
        attempt, key = await self.submissions.enter(self.name(retry, **options))  # type: ignore[arg-type]
        decision = decide_submission(key, self.record, self.clock.at)
        if isinstance(decision, Refused):
            return attempt, "refused"
        if isinstance(decision, Repeat):
            return attempt, "repeat"
        assert isinstance(decision, New)
        self.record = Submission(
            digest=key.digest,
            session_id=SESSION,
            body_digest=key.body_digest,
            explicit=key.explicit,
            attempt=key.attempt,
            first_seq=1,
            last_seq=1,
            process=PROCESS,
            written_at=None,
            connection_reused=False,
            created_at=self.clock.at,
        )
        return attempt, "new"


def test_a_name_depends_on_key_route_and_body() -> None:
    room = Room()
    first = room.name()
    assert room.name().digest == first.digest
    assert room.name(body=b"{} ").digest != first.digest
    assert room.name(key=OTHER_KEY).digest != first.digest
    explicit = room.name(explicit="a")
    assert room.name(explicit="a", body=b"[]").digest == explicit.digest != first.digest
    assert room.name(explicit="a", body=b"[]").body_digest != explicit.body_digest


@pytest.mark.parametrize("key", ["", "x" * 257, "é" * 257])
def test_an_idempotency_key_has_1_to_256_bytes(key: str) -> None:
    refused = Room().submissions.identify(
        key_id=KEY, method="POST", route="/v1/x", body=b"", idempotency_key=key, retry_count=None
    )
    assert isinstance(refused, Refused)
    assert refused.kind == "invalid" and refused.param == "Idempotency-Key" and "256" in refused.message


@pytest.mark.parametrize(("text", "count"), [(None, 0), ("2", 2), ("", 0), ("-1", 0), ("1e3", 0), ("99999", 0)])
def test_a_retry_count_that_is_no_number_is_none(text: str | None, count: int) -> None:
    named = Room().submissions.identify(
        key_id=KEY, method="POST", route="/v1/x", body=b"", idempotency_key=None, retry_count=text
    )
    assert isinstance(named, SubmissionKey) and named.attempt == count


async def test_a_retry_whose_answer_was_never_written_is_a_repeat() -> None:
    room = Room()
    attempt, _ = await room.admit()
    room.submissions.leave(attempt, stored=True)
    room.clock.pass_s(600)
    assert (await room.admit(1))[1] == "repeat"


@pytest.mark.parametrize(("seconds", "outcome"), [(19, "repeat"), (21, "new")])
async def test_a_written_answer_may_be_missed_for_twenty_seconds(seconds: float, outcome: str) -> None:
    room = Room()
    attempt, _ = await room.admit()
    room.submissions.leave(attempt, stored=True)
    room.submissions.written(attempt, HERE)
    room.clock.pass_s(seconds)
    room.submissions.request_on(THERE)
    assert (await room.admit(1))[1] == outcome


async def test_a_connection_that_goes_on_has_seen_its_answer() -> None:
    room = Room()
    attempt, _ = await room.admit()
    room.submissions.leave(attempt, stored=True)
    room.submissions.written(attempt, HERE)
    room.submissions.request_on(HERE)
    assert (await room.admit(1))[1] == "new"


async def test_the_same_request_made_anew_is_new_and_ends_the_doubt_about_the_first() -> None:
    room = Room()
    attempt, _ = await room.admit()
    room.submissions.leave(attempt, stored=True)
    room.submissions.written(attempt, HERE)
    second, outcome = await room.admit()
    assert outcome == "new"
    room.submissions.leave(second, stored=False)
    assert (await room.submissions.enter(room.name(1)))[1].first_response == Written(START, True)


async def test_a_request_that_was_not_stored_leaves_the_one_before_as_it_was() -> None:
    room = Room()
    first, _ = await room.admit()
    room.submissions.leave(first, stored=True)
    room.submissions.written(first, HERE)
    room.clock.pass_s(60)
    second, _ = await room.submissions.enter(room.name())
    third, _ = await room.submissions.enter(room.name())
    room.submissions.leave(second, stored=False)
    room.submissions.leave(third, stored=False)
    _, key = await room.submissions.enter(room.name(1))
    assert key.first_response is not None and key.first_response.at == START


async def test_a_retry_waits_for_its_first_attempt() -> None:
    room = Room()
    first, _ = await room.admit()
    retry = asyncio.create_task(room.admit(1))
    await asyncio.sleep(0)
    assert not retry.done()
    room.submissions.leave(first, stored=True)
    async with asyncio.timeout(5):
        assert (await retry)[1] == "repeat"


async def test_equal_requests_made_on_purpose_do_not_wait() -> None:
    room = Room()
    await room.admit()
    async with asyncio.timeout(5):
        assert (await room.admit())[1] == "new"


async def test_an_explicit_key_waits_whatever_its_retry_count() -> None:
    room = Room()
    first, _ = await room.admit(explicit="k")
    second = asyncio.create_task(room.admit(explicit="k"))
    await asyncio.sleep(0)
    assert not second.done()
    room.submissions.leave(first, stored=True)
    async with asyncio.timeout(5):
        assert (await second)[1] == "repeat"


async def test_the_wait_for_the_first_attempt_ends() -> None:
    room = Room(in_flight_wait_s=0.01)
    await room.admit()
    async with asyncio.timeout(5):
        await room.submissions.enter(room.name(1))


async def test_memory_is_bounded_by_age_and_number() -> None:
    room = Room(entries_max=10)
    for n in range(30):
        attempt, _ = await room.submissions.enter(room.name(body=str(n).encode()))
        room.submissions.leave(attempt, stored=True)
        room.submissions.written(attempt, ("h", n))
    assert room.submissions.remembered_count == 10
    room.clock.pass_s(REMEMBERED_S + 1)
    await room.submissions.enter(room.name(body=b"last"))
    assert room.submissions.remembered_count == 1
