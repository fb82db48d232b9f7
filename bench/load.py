"""The load: clients with one request outstanding each, and a random pause before the next. Bounded in count and in time.

It runs in a process of its own (`python -m bench.load`, order on standard input, result on standard output) and does as little as it can
for each request, because it shares the machine with the server. What was acknowledged is read back through the API after the clock has
stopped: every acknowledged event must be listed, once, and in an order that agrees with when it was sent and acknowledged.
"""

import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, cast
from urllib.parse import urlsplit

import msgspec

from bench.api import VERSION_HEADERS, Api
from bench.pairs import percentile
from bench.subject import processor_s

THINK_S: Final = (0.001, 0.005)
TEXT_CHARS: Final = 200
"""With the frame around it, a body of 300 bytes: what a person types."""

SESSION_POSTS_MAX: Final = 900
"""A mailbox holds 1,000 messages that nobody takes out; the next session comes before it is full."""

LOST_S: Final = 20.0
"""An answer that takes this long never comes."""


class Watched(msgspec.Struct):
    """A server of this machine."""

    pid: int
    data: str


class Order(msgspec.Struct, kw_only=True):
    """What to do."""

    url: str
    api_key: str
    sessions: list[str]
    """One for each client; or, when `shared`, one after the other for all clients."""
    clients: int
    shared: bool = False
    posts_max: int = 1_000_000
    seconds_max: float = 10.0
    warm_s: float = 0.3
    """Not counted: connections are made and statements prepared in it."""
    read_back: bool = True
    watched: Watched | None = None
    """Whose processor time is noted."""


class Loaded(msgspec.Struct, kw_only=True):
    """What came of it."""

    acked: int
    """2xx answers, all in all."""
    refused: int
    per_s: float
    """2xx answers a second, after the warm-up and until the first client had to stop."""
    p50_ms: float
    p99_ms: float
    client_cpu_us: float
    """Of this process, for each request."""
    server_cpu_us: float = 0
    postgres_cpu_us: float = 0
    lost: int = 0
    """Acknowledged, and not in the list."""
    doubled: int = 0
    disordered: int = 0
    """Listed before something that was acknowledged before it was sent."""
    listed: int = 0


@dataclass
class Ack:
    """One answered request."""

    session: str
    sent_s: float
    got_s: float
    status: int
    body: bytes


@dataclass
class Plan:
    """What all clients share: who posts next, where, and until when."""

    order: Order
    ends_s: float
    posted: int = 0
    session_posts: dict[str, int] = field(default_factory=dict[str, int])
    acks: list[Ack] = field(default_factory=list[Ack])
    first_stop_s: float | None = None

    def next_session(self, client: int) -> str | None:
        """Where a client posts now; None ends it."""
        if self.posted >= self.order.posts_max or time.perf_counter() >= self.ends_s:
            return None
        place = self.posted // SESSION_POSTS_MAX if self.order.shared else client
        if place >= len(self.order.sessions):
            return None
        session = self.order.sessions[place]
        count = self.session_posts.get(session, 0)
        if count >= SESSION_POSTS_MAX + self.order.clients:
            return None
        self.session_posts[session] = count + 1
        self.posted += 1
        return session


class Client(asyncio.Protocol):
    """One connection."""

    def __init__(self, plan: Plan, number: int, host: str) -> None:
        self._plan = plan
        self._number = number
        self._host = host
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._buffer = b""
        self._session = ""
        self._sent_s = 0.0
        self.done: asyncio.Future[None] = self._loop.create_future()
        own = {"host": host, "x-api-key": plan.order.api_key, "content-type": "application/json", **VERSION_HEADERS}
        self._head = "".join(f"{k}: {v}\r\n" for k, v in own.items())

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin after a pause, so that clients don't march in step."""
        # The transports of uvloop are no subclasses of asyncio's.
        self._transport = cast("asyncio.Transport", transport)
        self._pause()

    def _pause(self) -> None:
        self._loop.call_later(random.uniform(*THINK_S), self._send)

    def _send(self) -> None:
        session = self._plan.next_session(self._number)
        if session is None:
            if self._plan.first_stop_s is None:
                self._plan.first_stop_s = time.perf_counter()
            self._finish()
            return
        text = f"{self._number:04d} {self._plan.posted:08d} ".ljust(TEXT_CHARS, "x")
        body = f'{{"events":[{{"type":"user.message","content":[{{"type":"text","text":"{text}"}}]}}]}}'
        head = f"POST /v1/sessions/{session}/events HTTP/1.1\r\n{self._head}content-length: {len(body)}\r\n\r\n"
        self._session = session
        assert self._transport is not None
        self._sent_s = time.perf_counter()
        self._transport.write((head + body).encode())

    def data_received(self, data: bytes) -> None:
        """An answer, or a part of one."""
        self._buffer += data
        found = split_answer(self._buffer)
        if found is None:
            return
        status, body, self._buffer = found
        self._plan.acks.append(Ack(self._session, self._sent_s, time.perf_counter(), status, body))
        self._pause()

    def connection_lost(self, exc: Exception | None) -> None:
        """The server hung up, or we did."""
        if not self.done.done():
            self.done.set_result(None)

    def _finish(self) -> None:
        if self._transport is not None:
            self._transport.close()
        if not self.done.done():
            self.done.set_result(None)


def split_answer(buffer: bytes) -> tuple[int, bytes, bytes] | None:
    """Status, body and rest of what a server sent; None until an answer is whole. Only answers with a length are understood."""
    end = buffer.find(b"\r\n\r\n")
    if end < 0:
        return None
    head = buffer[:end].lower()
    place = head.find(b"content-length:")
    length = int(head[place + 15 :].split(b"\r\n", 1)[0]) if place >= 0 else 0
    begin = end + 4
    if len(buffer) < begin + length:
        return None
    return int(buffer[9:12]), buffer[begin : begin + length], buffer[begin + length :]


def check_order(acks: Sequence[tuple[str, float, float]], listed: Sequence[str]) -> tuple[int, int, int]:
    """Lost, doubled and disordered of one session: acknowledged (id, sent, got) against the ids as listed."""
    counts: dict[str, int] = {}
    for identity in listed:
        counts[identity] = counts.get(identity, 0) + 1
    lost = sum(1 for identity, _, _ in acks if identity not in counts)
    doubled = sum(n - 1 for n in counts.values())
    times = {identity: (sent, got) for identity, sent, got in acks}
    latest_sent = float("-inf")
    disordered = 0
    for identity in listed:
        known = times.get(identity)
        if known is None:
            continue
        sent, got = known
        if got < latest_sent:
            disordered += 1
        latest_sent = max(latest_sent, sent)
    return lost, doubled, disordered


def read_back(order: Order, acks: Iterable[Ack]) -> dict[str, int]:
    """Compare what was acknowledged with what the API lists."""
    of_session: dict[str, list[tuple[str, float, float]]] = {}
    for ack in acks:
        identity = json.loads(ack.body)["data"][0]["id"]
        of_session.setdefault(ack.session, []).append((identity, ack.sent_s, ack.got_s))
    api = Api(order.url, order.api_key)
    found = {"lost": 0, "doubled": 0, "disordered": 0, "listed": 0}
    for session, known in of_session.items():
        listed = [e["id"] for e in api.events(session, "&types[]=user.message")]
        lost, doubled, disordered = check_order(known, listed)
        found["lost"] += lost
        found["doubled"] += doubled
        found["disordered"] += disordered
        found["listed"] += len(listed)
    api.close()
    return found


async def _load(order: Order) -> tuple[Loaded, list[Ack]]:
    parts = urlsplit(order.url)
    assert parts.hostname is not None and parts.port is not None
    loop = asyncio.get_running_loop()
    began_s = time.perf_counter()
    plan = Plan(order, began_s + order.warm_s + order.seconds_max)
    host = f"{parts.hostname}:{parts.port}"
    clients: list[Client] = []
    for number in range(order.clients):
        _, client = await loop.create_connection(lambda n=number: Client(plan, n, host), parts.hostname, parts.port)
        clients.append(client)
    before = _processors_s(order.watched)
    await asyncio.wait([c.done for c in clients], timeout=order.warm_s + order.seconds_max + LOST_S)
    after = _processors_s(order.watched)
    ends_s = min(plan.ends_s, plan.first_stop_s or plan.ends_s)
    spent = tuple(b - a for a, b in zip(before, after, strict=True))
    return summarise(plan.acks, counted=(began_s + order.warm_s, ends_s), spent=spent), plan.acks


def _processors_s(watched: Watched | None) -> tuple[float, float, float]:
    """Processor time so far: ours, the server's, PostgreSQL's."""
    server_s, postgres_s = (0.0, 0.0) if watched is None else processor_s(watched.pid, Path(watched.data))
    return time.process_time(), server_s, postgres_s


def summarise(acks: Sequence[Ack], *, counted: tuple[float, float], spent: Sequence[float]) -> Loaded:
    """The figures of a run."""
    good = [a for a in acks if 200 <= a.status < 300]
    timed = [a for a in good if counted[0] <= a.got_s < counted[1]]
    if not timed:
        first = next((a.body[:200] for a in acks), b"nothing")
        raise RuntimeError(f"no request was acknowledged while it counted; the server said {first!r}")
    took_ms = [(a.got_s - a.sent_s) * 1000 for a in timed]
    return Loaded(
        acked=len(good),
        refused=len(acks) - len(good),
        per_s=len(timed) / (counted[1] - counted[0]),
        p50_ms=percentile(took_ms, 0.5),
        p99_ms=percentile(took_ms, 0.99),
        client_cpu_us=spent[0] / len(acks) * 1e6,
        server_cpu_us=spent[1] / len(acks) * 1e6,
        postgres_cpu_us=spent[2] / len(acks) * 1e6,
    )


def run(order: Order) -> Loaded:
    """Do it in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "bench.load"],
        input=msgspec.json.encode(order),
        stdout=subprocess.PIPE,
        check=True,
        timeout=order.warm_s + order.seconds_max + 120,
    )
    return msgspec.json.decode(done.stdout, type=Loaded)


def main() -> None:
    """Read an order, do it, say what came of it."""
    import uvloop

    order = msgspec.json.decode(sys.stdin.buffer.read(), type=Order)
    loaded, acks = uvloop.run(_load(order))
    if order.read_back:
        good = [a for a in acks if 200 <= a.status < 300]
        loaded = msgspec.structs.replace(loaded, **read_back(order, good))
    sys.stdout.buffer.write(msgspec.json.encode(loaded))


if __name__ == "__main__":
    main()
