"""Hints between buses on one database, as between processes; and what happens to them when PostgreSQL cuts the line."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from uuid import UUID, uuid4

import pytest
from tests.conftest import DurablePostgres, connected

from perdure.bus.inprocess import InProcessBus
from perdure.ports.bus import Bus, Hint, Preview, PreviewDelta, PreviewStarted
from perdure.postgres.notify import (
    CHANNEL,
    PAYLOAD_BYTES_MAX,
    PENDING_MAX,
    NotifyBus,
    decode_hint,
    encode_hint,
    payloads,
)

DEADLINE_S = 20.0


class Ear:
    """What one bus says, and a way to wait for it."""

    def __init__(self, bus: NotifyBus) -> None:
        self.bus = bus
        self.hints: list[Hint] = []
        self.gaps = 0
        self._heard = asyncio.Event()
        bus.on_hint(self._hint)
        bus.on_gap(self._gap)

    def _hint(self, hint: Hint) -> None:
        self.hints.append(hint)
        self._heard.set()

    def _gap(self) -> None:
        self.gaps += 1
        self._heard.set()

    async def until(self, fact: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not fact():
                self._heard.clear()
                await self._heard.wait()


@asynccontextmanager
async def listening(url: str) -> AsyncGenerator[Ear]:
    bus = NotifyBus(url)
    ear = Ear(bus)
    await bus.start()
    try:
        yield ear
    finally:
        await bus.stop()


def hint(*, thread: bool = False, stop: bool = False) -> Hint:
    return Hint(session_id=uuid4(), thread_id=uuid4() if thread else None, stop=stop)


async def cut_buses(url: str) -> None:
    async with connected(url) as admin:
        await admin.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where application_name = 'perdure-bus' and datname = current_database()"
        )


async def test_hints_reach_the_others_and_not_oneself(database_url: str) -> None:
    async with listening(database_url) as one, listening(database_url) as two, listening(database_url) as three:
        sent = [hint(), hint(thread=True), hint(thread=True, stop=True)]
        for each in sent:
            one.bus.publish(each)
        await two.until(lambda: len(two.hints) == 3)
        await three.until(lambda: len(three.hints) == 3)
        assert two.hints == sent and three.hints == sent
        # Its own came before this answer on the same line, if it came at all.
        back = hint()
        two.bus.publish(back)
        await one.until(lambda: back in one.hints)
        assert one.hints == [back]
        assert (one.gaps, two.gaps, three.gaps) == (0, 0, 0)


async def test_many_hints_travel_in_few_messages(database_url: str) -> None:
    messages: list[str] = []
    async with connected(database_url) as raw, listening(database_url) as one, listening(database_url) as two:
        await raw.add_listener(CHANNEL, lambda *said: messages.append(said[3]))  # pyright: ignore
        again = hint(thread=True)
        sent = [again, *(hint(thread=True) for _ in range(999))]
        for each in (*sent, again):
            one.bus.publish(each)
        await two.until(lambda: len(two.hints) == 1000)
        assert two.hints == sent
        await raw.execute("select 1")
    assert len(messages) <= 10
    assert all(len(m.encode()) <= PAYLOAD_BYTES_MAX for m in messages)


async def test_cut_line_is_made_anew_and_says_so(database_url: str) -> None:
    async with listening(database_url) as one, listening(database_url) as two:
        await cut_buses(database_url)
        await one.until(lambda: one.gaps == 1)
        await two.until(lambda: two.gaps == 1)
        after = hint()
        one.bus.publish(after)
        await two.until(lambda: after in two.hints)


async def test_hints_given_while_postgres_is_away_arrive_when_it_is_back(durable_postgres: DurablePostgres) -> None:
    async with listening(durable_postgres.url) as one, listening(durable_postgres.url) as two:
        await durable_postgres.stop()
        meanwhile = hint(thread=True)
        one.bus.publish(meanwhile)
        await durable_postgres.start()
        await two.until(lambda: two.gaps >= 1)
        await one.until(lambda: one.gaps >= 1)
        # Whether the other listened again in time to hear it is chance; that it looks at everything is not.
        later = hint()
        one.bus.publish(later)
        await two.until(lambda: later in two.hints)
        assert two.hints in ([meanwhile, later], [later])


async def test_start_waits_for_no_database() -> None:
    bus = NotifyBus("postgresql://postgres@127.0.0.1:1/none")
    ear = Ear(bus)
    async with asyncio.timeout(DEADLINE_S):
        await bus.start()
        bus.publish(hint())
        await bus.stop()
        await bus.stop()
    assert ear.hints == [] and ear.gaps == 0


async def test_too_many_hints_become_one_word(database_url: str) -> None:
    one = NotifyBus(database_url)
    async with listening(database_url) as two:
        for n in range(PENDING_MAX + 1):
            one.publish(Hint(session_id=UUID(int=n)))
        await one.start()
        await two.until(lambda: two.gaps == 1)
        assert two.hints == []
        last = hint()
        one.publish(last)
        await two.until(lambda: two.hints == [last])
        await one.stop()


async def test_last_words_are_sent(database_url: str) -> None:
    async with listening(database_url) as two:
        one = NotifyBus(database_url)
        await one.start()
        last = hint()
        one.publish(last)
        await one.stop()
        await two.until(lambda: two.hints == [last])


@pytest.mark.parametrize("said", ["2 whatever", "1 somebody x.y.z", "1 somebody", ""])
async def test_what_cannot_be_read_is_a_reason_to_look_at_everything(database_url: str, said: str) -> None:
    async with listening(database_url) as one, connected(database_url) as other:
        await other.execute("select pg_notify($1, $2)", CHANNEL, said)
        await one.until(lambda: one.gaps == 1)
        assert one.hints == []


def test_hint_comes_out_as_it_went_in() -> None:
    for each in (hint(), hint(stop=True), hint(thread=True), hint(thread=True, stop=True)):
        assert decode_hint(encode_hint(each)) == each
    assert payloads(uuid4(), []) == []


@pytest.mark.parametrize("bus", [InProcessBus(), NotifyBus("")], ids=["inprocess", "notify"])
def test_previews_are_shown_at_once_in_their_process_only(bus: Bus) -> None:
    ids = {"session_id": uuid4(), "thread_id": uuid4(), "item_id": uuid4()}
    shown: list[Preview] = []
    also: list[Preview] = []
    bus.on_preview(shown.append)
    bus.on_preview(also.append)
    hints: list[Hint] = []
    bus.on_hint(hints.append)
    given = [PreviewStarted(**ids, kind="message"), PreviewDelta(**ids, offset=0, text="a")]
    for preview in given:
        bus.preview(preview)
    bus.publish(hint())
    assert shown == given and also == given and hints == []
