"""Starting and stopping: what is promised when `start` returns, and what a stop lets finish."""

import asyncio
import socket
from typing import Any

import httpx2
import pytest
from tests.unit.http.serving import DEADLINE_S, serve

from perdure.domain.errors import Refused
from perdure.http.requests import Request, Response, Route
from perdure.http.serve import HttpServer, listen
from perdure.http.services import Services
from perdure.testing.signals import Gate


def post(handler: Any) -> Route:
    return Route(method="POST", template="/v1/slow", handler=handler, sdk_method="slow")


async def test_a_given_socket_is_served_and_closed_by_the_stop() -> None:
    async with serve() as running:
        listener = listen("127.0.0.1", 0)
        server = HttpServer(running.app, listener=listener)
        port = await server.start()
        assert port == listener.getsockname()[1]
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            assert (await http.get("/healthz")).status_code == 200
        await server.stop(1)
        await server.stop(1)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)


def test_a_taken_port_is_an_error_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(OSError, match="in use"):
            listen("127.0.0.1", taken.getsockname()[1])


async def test_a_stop_lets_a_request_in_flight_finish() -> None:
    gate = Gate()

    async def slow(services: Services, request: Request) -> Response | Refused:
        await gate.pass_through()
        return Response(200, b"{}")

    async with serve([post(slow)]) as running, running.http() as http:
        asked = asyncio.create_task(http.post("/v1/slow", headers=running.signed()))
        await gate.reached()
        stopping = asyncio.create_task(running.server.stop(5))
        gate.open()
        async with asyncio.timeout(DEADLINE_S):
            assert (await asked).status_code == 200
            await stopping


async def test_a_stop_cuts_off_what_outlasts_its_grace() -> None:
    gate = Gate()

    async def stuck(services: Services, request: Request) -> Response | Refused:
        await gate.pass_through()
        return Response(200, b"{}")

    async with serve([post(stuck)]) as running, running.http() as http:
        asked = asyncio.create_task(http.post("/v1/slow", headers=running.signed()))
        await gate.reached()
        async with asyncio.timeout(DEADLINE_S):
            await running.server.stop(1)
            outcome = (await asyncio.gather(asked, return_exceptions=True))[0]
    cut_off = isinstance(outcome, httpx2.HTTPError)
    assert cut_off or (isinstance(outcome, httpx2.Response) and outcome.status_code >= 500)


async def test_a_stopping_process_is_not_ready() -> None:
    async with serve() as running, running.http() as http:
        running.app.end_streams()
        answer = await http.get("/readyz")
    assert answer.status_code == 503 and "process" in answer.json()["reasons"]
