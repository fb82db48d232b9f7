"""A whole HTTP surface on a socket, over in-memory ports: what the tests of this folder drive with the real SDK."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, cast
from uuid import UUID, uuid4

import anthropic
import httpx2

from perdure.core.auth import Authenticator, NewKey, make_key
from perdure.core.feed import Feeds
from perdure.core.submissions import Submissions
from perdure.domain.errors import Refused
from perdure.http.app import App, create_app
from perdure.http.claude.routes import ROUTES
from perdure.http.metrics import HttpMetrics
from perdure.http.requests import AnyRoute
from perdure.http.serve import HttpServer
from perdure.http.services import Services
from perdure.ports.environment import Environment
from perdure.ports.model import ModelRouter
from perdure.testing.oracle import OracleLedger
from perdure.testing.oracle_catalog import OracleCatalog

VERSION = {"anthropic-version": "2026-10-21"}
DEADLINE_S = 5.0


class Unused:
    """A port that these tests must not reach."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} is not for these tests")


@dataclass
class Serving:
    """A running surface, and what a test may look at or change behind it."""

    url: str
    app: App
    catalog: OracleCatalog
    ledger: OracleLedger
    submissions: Submissions
    metrics: HttpMetrics
    authenticator: Authenticator
    server: HttpServer
    workspace_id: UUID
    key: NewKey
    key_id: UUID
    reasons: dict[str, str] = field(default_factory=dict[str, str])

    def sdk(self, *, key: str | None = None, **options: Any) -> anthropic.AsyncAnthropic:
        """The real SDK, as its users make it."""
        options.setdefault("base_url", self.url)
        return anthropic.AsyncAnthropic(api_key=key or self.key.secret, **options)

    def http(self, **options: Any) -> httpx2.AsyncClient:
        """A plain client, for what the SDK would not send."""
        return httpx2.AsyncClient(base_url=self.url, timeout=DEADLINE_S, **options)

    def signed(self, **headers: str) -> dict[str, str]:
        """Headers of a request of this key."""
        return {"authorization": f"Bearer {self.key.secret}", **VERSION, **headers}

    async def add_key(self, workspace_id: UUID | None = None, *, seed: str = "second") -> tuple[NewKey, UUID]:
        """One more key."""
        key, key_id = make_key(sha256(seed.encode()).digest()), uuid4()
        await self.catalog.create_key(key_id, workspace_id or self.workspace_id, seed, key.digest, key.hint)
        return key, key_id

    def requests(self) -> int:
        """How many requests were answered."""
        samples = (s for m in self.metrics.registry.collect() for s in m.samples)
        return int(sum(s.value for s in samples if s.name == "perdure_http_requests_total"))


@asynccontextmanager
async def serve(
    routes: Iterable[AnyRoute] = ROUTES, *, submissions: Submissions | None = None, **options: Any
) -> AsyncGenerator[Serving]:
    """Start on a free port; stop when the block ends."""
    catalog, ledger, metrics = OracleCatalog(), OracleLedger(), HttpMetrics()
    submissions = Submissions() if submissions is None else submissions
    services = Services(
        ledger=ledger,
        catalog=catalog,
        feeds=Feeds(ledger),
        models=cast(ModelRouter, Unused()),
        environment=cast(Environment, Unused()),
        submissions=submissions,
        version="9.9.9",
    )
    reasons: dict[str, str] = {}

    async def readiness() -> dict[str, str]:
        return reasons

    authenticator = Authenticator(catalog, cache_s=0.0, check_s=0.02)
    app = create_app(
        services, authenticator=authenticator, metrics=metrics, readiness=readiness, routes=routes, **options
    )
    workspace_id, key_id, key = uuid4(), uuid4(), make_key(sha256(b"first").digest())
    assert not isinstance(await catalog.create_workspace(workspace_id, "default"), Refused)
    await catalog.create_key(key_id, workspace_id, "first", key.digest, key.hint)
    server = HttpServer(app)
    port = await server.start()
    running = asyncio.create_task(authenticator.run())
    try:
        yield Serving(
            url=f"http://127.0.0.1:{port}",
            app=app,
            catalog=catalog,
            ledger=ledger,
            submissions=submissions,
            metrics=metrics,
            authenticator=authenticator,
            server=server,
            workspace_id=workspace_id,
            key=key,
            key_id=key_id,
            reasons=reasons,
        )
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await server.stop(1)


async def exchange(url: str, *parts: bytes | asyncio.Event) -> bytes:
    """Send raw bytes, waiting at each event between them; the answer until the server closes or falls silent after its headers."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        for part in parts:
            if isinstance(part, asyncio.Event):
                await part.wait()
            else:
                writer.write(part)
                await writer.drain()
        async with asyncio.timeout(DEADLINE_S):
            head = await reader.readuntil(b"\r\n\r\n")
            length = _length(head.split(b"\r\n"))
            return head + await reader.readexactly(length)
    finally:
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)


def _length(lines: Sequence[bytes]) -> int:
    for line in lines:
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0
