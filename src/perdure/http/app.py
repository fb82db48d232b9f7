"""The ASGI application: which face, who asks, which route, and the answer; nothing of what a face means.

Plain ASGI without middleware, because each layer would cost every request and hide the stream's writes from us.
"""

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Final, TypeAlias
from uuid import UUID

import msgspec
import structlog

from perdure import telemetry
from perdure.core.auth import Authenticator
from perdure.core.submissions import Connection
from perdure.domain import ids
from perdure.domain.errors import Refused, Unavailable
from perdure.domain.submission import SubmissionKey
from perdure.http import admin, responses
from perdure.http.asgi import (
    ABORT,
    BODY_SILENCE_S,
    LOSS,
    AsgiStream,
    PeerLoss,
    Receive,
    Scope,
    Send,
    read_body,
    read_headers,
    read_query,
    send_response,
)
from perdure.http.auth import authenticate
from perdure.http.claude.not_built import NOT_BUILT
from perdure.http.claude.not_built import refuse_unbuilt as refuse_unbuilt_claude
from perdure.http.claude.routes import ROUTES as CLAUDE_ROUTES
from perdure.http.metrics import CONTENT_TYPE, UNROUTED, HttpMetrics
from perdure.http.openai.not_built import refuse_unbuilt as refuse_unbuilt_openai
from perdure.http.requests import AnyRoute, Request, Response, Route, StreamRoute
from perdure.http.router import Chosen, Face, Found, Router, UnbuiltRoute, WrongMethod, choose_face
from perdure.http.services import Services
from perdure.ports.catalog import KeyRecord

Readiness: TypeAlias = Callable[[], Awaitable[Mapping[str, str]]]
"""Why this process is not ready: a sentence for each part that is not; empty when it is."""

BODY_METHODS: Final = frozenset({"POST", "PUT", "PATCH", "DELETE"})

UNAVAILABLE: Final = Refused("unavailable", "unavailable", "The stream can't be served right now: open it again.")
FAILED: Final = Refused("unavailable", "internal_error", "The server failed on this request.")

log = structlog.get_logger("perdure.http")


class Exchange(msgspec.Struct, frozen=True):
    """One request on its way through the application."""

    scope: Scope
    receive: Receive
    send: Send
    method: str
    path: str
    """Percent-encoded, without a forced prefix once a face is chosen."""
    face: Face
    headers: dict[str, str]
    request_id: str
    connection: Connection | None
    began_s: float


class OpenStream:
    """A stream that something other than its client may end."""

    def __init__(self) -> None:
        self._scope: asyncio.Timeout | None = None
        self.was_ended = False

    def bind(self, scope: asyncio.Timeout) -> None:
        """The handler runs in this scope: not a deadline, but a way to end it, and only it."""
        self._scope = scope

    def end(self) -> None:
        """Cancel the handler, once; its clean-up runs and the answer is closed. Repeatable."""
        scope, self._scope = self._scope, None
        if scope is not None:
            self.was_ended = True
            scope.reschedule(asyncio.get_running_loop().time())

    def release(self) -> None:
        """The handler is done: there is nothing to end any more."""
        self._scope = None


class App:
    """One process's HTTP surface."""

    def __init__(
        self,
        services: Services,
        *,
        authenticator: Authenticator,
        metrics: HttpMetrics,
        readiness: Readiness,
        routes: Iterable[AnyRoute] = CLAUDE_ROUTES,
        warnings: Iterable[str] = (),
        body_silence_s: float = BODY_SILENCE_S,
    ) -> None:
        self._services = services
        self._warnings = tuple(warnings)
        self._authenticator = authenticator
        self._metrics = metrics
        self._readiness = readiness
        self._body_silence_s = body_silence_s
        unbuilt = [UnbuiltRoute(*row) for row in NOT_BUILT]
        self._routers: dict[Face, Router] = {
            "claude": Router([*routes, *unbuilt]),
            "perdure": Router(admin.ROUTES),
        }
        self._streams: set[OpenStream] = set()
        self._stopping = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            return
        client = scope.get("client")
        exchange = Exchange(
            scope=scope,
            receive=receive,
            send=send,
            method=scope["method"],
            path=scope["raw_path"].decode("latin-1"),
            face="claude",
            headers=read_headers(scope),
            request_id="req_" + ids.token(UUID(bytes=os.urandom(16))),
            connection=(client[0], client[1]) if client else None,
            began_s=asyncio.get_running_loop().time(),
        )
        if exchange.path in ("/healthz", "/readyz", "/metrics"):
            await self._operate(exchange)
            return
        chosen = choose_face(exchange.path, exchange.headers)
        if isinstance(chosen, Chosen):
            if chosen.face != exchange.face or chosen.path != exchange.path:
                exchange = msgspec.structs.replace(exchange, face=chosen.face, path=chosen.path)
            await self._serve(exchange)
        else:
            await self._answer(exchange, UNROUTED, responses.refusal_for_either(chosen, exchange.request_id))

    # ------------------------------------------------------------------------------------------------------- operations

    async def _operate(self, exchange: Exchange) -> None:
        if exchange.method != "GET":
            answer = responses.wrong_method("claude", exchange.method, exchange.path, ("GET",), exchange.request_id)
        elif exchange.path == "/metrics":
            answer = Response(200, self._metrics.page(), {"content-type": CONTENT_TYPE})
        elif exchange.path == "/healthz":
            answer = Response(200, msgspec.json.encode({"status": "ok", "version": self._services.version}))
        else:
            answer = await self._ready()
        await self._answer(exchange, exchange.path, answer)

    async def _ready(self) -> Response:
        try:
            reasons = dict(await self._readiness())
        except Unavailable:
            reasons = {"database": "The database can't be reached."}
        if self._stopping:
            reasons["process"] = "The process is stopping."
        status = "not_ready" if reasons else "ready"
        body = msgspec.json.encode({"status": status, "reasons": reasons, "warnings": self._warnings})
        return Response(503 if reasons else 200, body)

    # ----------------------------------------------------------------------------------------------------------- routes

    async def _serve(self, exchange: Exchange) -> None:
        """Authenticate, find the route, run it. Whatever goes wrong is answered in the face's envelope."""
        route_name = UNROUTED
        try:
            key = await authenticate(self._authenticator, exchange.headers)
            if isinstance(key, Refused):
                await self._refuse(exchange, route_name, key)
                return
            self._services.submissions.request_on(exchange.connection, key.id)
            found = self._find(exchange)
            if isinstance(found, Response):
                await self._answer(exchange, route_name, found)
                return
            route_name = found.route.template
            await self._run(exchange, found, key)
        except Unavailable:
            await self._answer(exchange, route_name, responses.unavailable(exchange.face, exchange.request_id))
        except Exception as error:  # noqa: BLE001 - the border of one request: its neighbours must not feel it
            log_failure(exchange, route_name, error)
            await self._answer(exchange, route_name, responses.failed(exchange.face, exchange.request_id))

    def _find(self, exchange: Exchange) -> Found | Response:
        router = self._routers.get(exchange.face)
        if router is None:
            refused = refuse_unbuilt_openai(exchange.method, exchange.path)
            return responses.refusal(exchange.face, refused, exchange.request_id)
        found = router.find(exchange.method, exchange.path)
        if isinstance(found, WrongMethod):
            return responses.wrong_method(
                exchange.face, exchange.method, exchange.path, found.allowed, exchange.request_id
            )
        if found is None:
            refused = Refused("not_found", "unknown_path", f"Nothing is served at {exchange.method} {exchange.path}.")
            return responses.refusal(exchange.face, refused, exchange.request_id)
        if isinstance(found.route, UnbuiltRoute):
            refused = refuse_unbuilt_claude(exchange.method, exchange.path, found.route.sdk_method)
            return responses.refusal(exchange.face, refused, exchange.request_id)
        return found

    async def _run(self, exchange: Exchange, found: Found, key: KeyRecord) -> None:
        route = found.route
        assert not isinstance(route, UnbuiltRoute)
        request = await self._read(exchange, found, key)
        if request is None:
            return
        if isinstance(request, Response):
            await self._answer(exchange, route.template, request)
        elif isinstance(route, StreamRoute):
            await self._run_stream(exchange, route, request)
        elif route.submits_once:
            await self._run_once(exchange, route, request)
        else:
            await self._conclude(exchange, route, await route.handler(self._services, request))

    async def _read(self, exchange: Exchange, found: Found, key: KeyRecord) -> Request | Response | None:
        """The request as handlers get it; or the answer that it gets instead; or None when the client is gone."""
        query = read_query(exchange.scope)
        if query is None:
            refused = Refused("invalid", "invalid_request_error", "The query has too many parameters.")
            return responses.refusal(exchange.face, refused, exchange.request_id)
        body: bytes = b""
        if exchange.method in BODY_METHODS:
            read = await read_body(exchange.receive, exchange.headers, silence_s=self._body_silence_s)
            if isinstance(read, str):
                return None if read == "gone" else self._body_fault(exchange, read)
            body = read
        return Request(
            method=exchange.method,
            path=exchange.path,
            params=found.params,
            query=query,
            headers=exchange.headers,
            body=body,
            workspace_id=key.workspace_id,
            key_id=key.id,
            submission=None,
            request_id=exchange.request_id,
        )

    def _body_fault(self, exchange: Exchange, fault: str) -> Response:
        if fault == "too_slow":
            return responses.too_slow(exchange.face, exchange.request_id)
        return responses.too_large(exchange.face, exchange.request_id)

    async def _run_once(self, exchange: Exchange, route: Route, request: Request) -> None:
        """A route that recognises repeats: between `enter` and `leave`, equal retries wait.

        A client that goes meanwhile takes its request back, as long as the ledger's writer has not begun with it.
        """
        submissions = self._services.submissions
        key = self._identify(request)
        if isinstance(key, Refused):
            await self._refuse(exchange, route.template, key)
            return
        attempt, key = await submissions.enter(key)
        stored = False
        try:
            named = msgspec.structs.replace(request, submission=key)
            outcome = await self._while_connected(exchange, lambda: route.handler(self._services, named))
            if outcome is None:
                return
            stored = isinstance(outcome, Response)
        finally:
            submissions.leave(attempt, stored=stored)
        self._metrics.admissions.labels(route.template, "accepted" if stored else "refused").inc()
        await self._conclude(exchange, route, outcome)
        if stored:
            submissions.written(attempt, exchange.connection, request.key_id)

    async def _while_connected(
        self, exchange: Exchange, work: Callable[[], Awaitable[Response | Refused]]
    ) -> Response | Refused | None:
        """The outcome; or None when the client went first, and the work was cancelled."""
        loss: PeerLoss = exchange.scope.get(LOSS) or PeerLoss()
        task = asyncio.current_task()
        assert task is not None
        loss.call = task.cancel
        try:
            if not loss.happened:
                return await work()
        except asyncio.CancelledError:
            if not loss.happened or task.uncancel():
                raise
        finally:
            loss.call = None
        return None

    def _identify(self, request: Request) -> SubmissionKey | Refused:
        return self._services.submissions.identify(
            key_id=request.key_id,
            method=request.method,
            route=request.path,
            body=request.body,
            idempotency_key=request.headers.get("idempotency-key"),
            retry_count=request.headers.get("x-stainless-retry-count"),
        )

    # ---------------------------------------------------------------------------------------------------------- answers

    async def _conclude(self, exchange: Exchange, route: Route, outcome: Response | Refused) -> None:
        if isinstance(outcome, Refused):
            await self._refuse(exchange, route.template, outcome)
        else:
            await self._answer(exchange, route.template, outcome)

    async def _refuse(self, exchange: Exchange, route_name: str, refused: Refused) -> None:
        await self._answer(exchange, route_name, responses.refusal(exchange.face, refused, exchange.request_id))

    async def _answer(self, exchange: Exchange, route_name: str, response: Response) -> None:
        await send_response(exchange.send, response, exchange.request_id)
        took_s = asyncio.get_running_loop().time() - exchange.began_s
        self._metrics.answered(exchange.method, route_name, response.status, took_s)

    # ---------------------------------------------------------------------------------------------------------- streams

    async def _run_stream(self, exchange: Exchange, route: StreamRoute, request: Request) -> None:
        """Run a stream until its handler is done, the client goes, the key is revoked, or the process stops."""
        if self._stopping:
            raise Unavailable
        stream = AsgiStream(exchange.send, exchange.request_id, abort=exchange.scope.get(ABORT))
        handle = OpenStream()
        async with asyncio.TaskGroup() as group:
            watcher = group.create_task(self._watch_peer(exchange.receive, stream, handle))
            refused = await self._attend(exchange, route, request, stream, handle)
            watcher.cancel()
        await self._close_stream(exchange, route, stream, refused)

    async def _attend(
        self, exchange: Exchange, route: StreamRoute, request: Request, stream: AsgiStream, handle: OpenStream
    ) -> Refused | None:
        """Run the handler; what it raises becomes what its client is told. Only cancellation passes."""
        self._streams.add(handle)
        self._metrics.open_streams.inc()
        watch = self._authenticator.watch(request.key_id, self._on_revoked(handle))
        try:
            async with asyncio.timeout(None) as scope:
                handle.bind(scope)
                return await route.handler(self._services, request, stream)
        except ConnectionError:
            return None
        except Unavailable:
            return UNAVAILABLE
        except Exception as error:  # noqa: BLE001 - the border of one request, as in `_serve`
            if handle.was_ended:
                return UNAVAILABLE
            log_failure(exchange, route.template, error)
            return FAILED
        finally:
            handle.release()
            watch.close()
            self._streams.discard(handle)
            self._metrics.open_streams.dec()

    def _on_revoked(self, handle: OpenStream) -> Callable[[], None]:
        def end() -> None:
            self._metrics.revoked_streams.inc()
            handle.end()

        return end

    async def _watch_peer(self, receive: Receive, stream: AsgiStream, handle: OpenStream) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        stream.lose()
        handle.end()

    async def _close_stream(
        self, exchange: Exchange, route: StreamRoute, stream: AsgiStream, refused: Refused | None
    ) -> None:
        if stream.started:
            self._metrics.answered(exchange.method, route.template, 200, None)
            with contextlib.suppress(ConnectionError):
                await stream.finish()
        elif refused is FAILED:
            await self._answer(exchange, route.template, responses.failed(exchange.face, exchange.request_id))
        elif refused is not None:
            await self._refuse(exchange, route.template, refused)

    def end_streams(self) -> None:
        """End every open stream and refuse new ones: the process stops, and clients come back to another."""
        self._stopping = True
        for handle in list(self._streams):
            handle.end()


def log_failure(exchange: Exchange, route_name: str, error: Exception) -> None:
    """Where our own bug is, without a byte of the request: the message of an exception may quote it."""
    log.error(
        "request_failed",
        request_id=exchange.request_id,
        method=exchange.method,
        route=route_name,
        **telemetry.blame(error),
    )


def create_app(
    services: Services,
    *,
    authenticator: Authenticator,
    metrics: HttpMetrics,
    readiness: Readiness,
    routes: Iterable[AnyRoute] = CLAUDE_ROUTES,
    warnings: Iterable[str] = (),
    body_silence_s: float = BODY_SILENCE_S,
) -> App:
    """The application of one process. `authenticator.run()` must run beside it, or revoked keys keep their streams.

    `routes` are those of the Claude face; a test may serve others. `warnings` are shown by `/readyz` without making it unready.
    """
    return App(
        services,
        authenticator=authenticator,
        metrics=metrics,
        readiness=readiness,
        routes=routes,
        warnings=warnings,
        body_silence_s=body_silence_s,
    )
