"""Submit once, the process's part: names of requests, waiting for the first, and what is known of its response."""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from uuid import UUID

import msgspec
import pytest

from perdure.core.submissions import REMEMBERED_S, Attempt, Submissions
from perdure.domain.errors import Refused, Unavailable
from perdure.domain.submission import (
    New,
    Repeat,
    Submission,
    SubmissionKey,
    Written,
    WrittenNote,
    decide_submission,
)

KEY, OTHER_KEY, SESSION = UUID(int=2), UUID(int=3), UUID(int=4)
START = datetime(2026, 1, 1, tzinfo=UTC)
HERE, THERE = ("10.0.0.1", 4001), ("10.0.0.1", 4002)


class Clock:
    def __init__(self) -> None:
        self.s = 0.0

    @property
    def at(self) -> datetime:
        return START + timedelta(seconds=self.s)

    def __call__(self) -> float:
        return self.s

    def pass_s(self, seconds: float) -> None:
        self.s += seconds


class Room:
    """Submissions of one process on a clock, with the record that a ledger would keep."""

    def __init__(self, **options: float) -> None:
        self.clock = Clock()
        self.options = options
        self.submissions = self.another_process()
        self.record: Submission | None = None

    def another_process(self) -> Submissions:
        return Submissions(now_s=self.clock, **self.options)  # type: ignore[arg-type]

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
            self.record = msgspec.structs.replace(
                decision.record, attempt=key.attempt, request_id=key.request_id, written_at=None
            )
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
            request_id=key.request_id,
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
    room.submissions.written(attempt, HERE, KEY)
    room.clock.pass_s(seconds)
    room.submissions.request_on(THERE, KEY)
    assert (await room.admit(1))[1] == outcome


async def test_a_connection_that_goes_on_has_seen_its_answer() -> None:
    room = Room()
    attempt, _ = await room.admit()
    room.submissions.leave(attempt, stored=True)
    room.submissions.written(attempt, HERE, KEY)
    room.submissions.request_on(HERE, OTHER_KEY)
    room.submissions.request_on(None, KEY)
    assert not attempt.connection_reused, "a proxy shares its connections"
    room.submissions.request_on(HERE, KEY)
    assert (await room.admit(1))[1] == "new"


async def test_the_same_request_made_anew_is_new_and_ends_the_doubt_about_the_first() -> None:
    room = Room()
    attempt, _ = await room.admit()
    room.submissions.leave(attempt, stored=True)
    room.submissions.written(attempt, HERE, KEY)
    second, outcome = await room.admit()
    assert outcome == "new"
    room.submissions.leave(second, stored=False)
    assert (await room.submissions.enter(room.name(1)))[1].known == Written(attempt.request_id, timedelta(0), True)


async def test_a_request_that_was_not_stored_leaves_the_one_before_as_it_was() -> None:
    room = Room()
    first, _ = await room.admit()
    room.submissions.leave(first, stored=True)
    room.submissions.written(first, HERE, KEY)
    room.clock.pass_s(60)
    second, _ = await room.submissions.enter(room.name())
    third, _ = await room.submissions.enter(room.name())
    room.submissions.leave(second, stored=False)
    room.submissions.leave(third, stored=False)
    _, key = await room.submissions.enter(room.name(1))
    assert key.known == Written(first.request_id, timedelta(seconds=60), True)


@pytest.mark.rule("MA-E1.1")
@pytest.mark.parametrize("reused", [False, True])
async def test_an_answer_that_failed_after_the_commit_leaves_its_retry_a_repeat(reused: bool) -> None:
    """It looked as if nothing was stored; what is known of the equal request before says nothing of this one."""
    room = Room()
    first, _ = await room.admit()
    room.submissions.leave(first, stored=True)
    room.submissions.written(first, HERE, KEY)
    room.clock.pass_s(60)
    if reused:
        room.submissions.request_on(HERE, KEY)
    second, outcome = await room.admit()
    room.submissions.leave(second, stored=False)
    assert (outcome, (await room.admit(1))[1]) == ("new", "repeat")


@pytest.mark.rule("MA-E1.1", "MA-E1.7")
async def test_a_retry_at_another_process_finds_what_was_admitted_last() -> None:
    """The one that admitted it was killed; the other one answered an equal request before."""
    room = Room()
    here, there = room.submissions, room.another_process()
    first, _ = await room.admit()
    here.leave(first, stored=True)
    here.written(first, HERE, KEY)
    room.clock.pass_s(60)
    room.submissions = there
    _, outcome = await room.admit()
    room.submissions = here
    retry, again = await room.admit(1)
    assert (outcome, again) == ("new", "repeat")
    here.leave(retry, stored=True)
    here.written(retry, THERE, KEY)
    here.request_on(THERE, KEY)
    room.submissions = there
    assert (await room.admit(0))[1] == "new", "an input that is meant is not lost"


@pytest.mark.rule("MA-E1.1")
async def test_equal_requests_side_by_side_do_not_count_each_other_as_read() -> None:
    """Either may be the one whose answer is lost."""
    room = Room()
    second, _ = await room.admit()
    first, _ = await room.admit()
    for attempt in (first, second):
        room.submissions.leave(attempt, stored=True)
    assert not first.connection_reused and not second.connection_reused


@pytest.mark.rule("MA-E1.1")
@pytest.mark.parametrize(("seconds", "told"), [(5, [False, True]), (21, [False])])
async def test_the_ledger_is_told_again_when_an_answer_turns_out_to_be_read(seconds: int, told: list[bool]) -> None:
    """Another process may be asked next. After the grace it makes no difference."""
    room, notes = Room(), list[WrittenNote]()

    async def hear(heard: Sequence[WrittenNote]) -> None:
        notes.extend(heard)

    attempt, _ = await room.admit()
    room.submissions.leave(attempt, stored=True)
    room.submissions.written(attempt, HERE, KEY)
    await room.submissions.tell(hear)
    room.clock.pass_s(seconds)
    for _ in range(2):
        room.submissions.request_on(HERE, KEY)
        await room.submissions.tell(hear)
    assert [note.written.connection_reused for note in notes] == told


async def test_what_the_ledger_could_not_be_told_is_told_again_and_older_by_then() -> None:
    room = Room()
    told: list[WrittenNote] = []

    async def fail(notes: Sequence[WrittenNote]) -> None:
        raise Unavailable

    async def hear(notes: Sequence[WrittenNote]) -> None:
        told.extend(notes)

    first, _ = await room.admit()
    room.submissions.written(first, HERE, KEY)
    with pytest.raises(Unavailable):
        await room.submissions.tell(fail)
    room.clock.pass_s(3)
    room.submissions.request_on(HERE, KEY)
    for _ in range(2):
        await room.submissions.tell(hear)
    assert told == [WrittenNote(first.digest, Written(first.request_id, timedelta(seconds=3), True))]


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
        room.submissions.written(attempt, ("h", n), KEY)
    assert room.submissions.remembered_count == 10
    room.clock.pass_s(REMEMBERED_S + 1)
    await room.submissions.enter(room.name(body=b"last"))
    assert room.submissions.remembered_count == 1
