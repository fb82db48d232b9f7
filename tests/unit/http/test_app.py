"""What every request gets, whatever its route: envelopes, limits, request ids, and the operational pages."""

import asyncio
import gzip
import zlib
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest
from structlog.testing import capture_logs
from tests.unit.http.serving import VERSION, Serving, exchange, serve

from perdure.core.submissions import Attempt, Submissions
from perdure.domain.errors import Refused
from perdure.domain.submission import SubmissionKey
from perdure.http.asgi import BODY_BYTES_MAX
from perdure.http.claude.not_built import NOT_BUILT
from perdure.http.claude.routes import ROUTES, SERVED_METHODS
from perdure.http.requests import Request, Response, Route
from perdure.http.services import Services
from perdure.testing.compatibility import SERVED, read_sdk_methods
from perdure.testing.signals import Gate, Signal


async def echo(services: Services, request: Request) -> Response | Refused:
    return Response(200, str(len(request.body)).encode(), {"content-type": "text/plain"})


async def fail(services: Services, request: Request) -> Response | Refused:
    raise KeyError(request.body.decode())


def post(template: str, handler: Any, *, submits_once: bool = False) -> Route:
    return Route(method="POST", template=template, handler=handler, sdk_method=template, submits_once=submits_once)


@pytest.fixture
async def probing() -> AsyncIterator[Serving]:
    async with serve([post("/v1/echo", echo), post("/v1/fail", fail)], body_silence_s=0.1) as running:
        yield running


@pytest.mark.rule("MA-A0.5", "MA-A0.6", "MA-A0.17")
@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/v1/nothing", 404), ("DELETE", "/v1/agents", 405), ("PUT", "/healthz", 405)]
)
async def test_errors_have_one_envelope_and_every_answer_its_own_id(
    serving: Serving, method: str, path: str, status: int
) -> None:
    async with serving.http() as http:
        answers = [await http.request(method, path, headers=serving.signed()) for _ in range(2)]
    seen: set[str] = set()
    for answer in answers:
        body = answer.json()
        assert (answer.status_code, body["type"]) == (status, "error")
        assert set(body["error"]) >= {"type", "message"}
        assert body["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
        seen.add(body["request_id"])
    assert len(seen) == 2


@pytest.mark.rule("MA-A0.17")
async def test_a_wrong_method_says_which_are_right(serving: Serving) -> None:
    async with serving.http() as http:
        answer = await http.delete("/v1/agents", headers=serving.signed())
    assert answer.headers["allow"] == "GET, POST"


@pytest.mark.rule("MA-A0.4")
@pytest.mark.parametrize("version", ["2023-06-01", "2026-10-21", "1999-01-01"])
async def test_any_generation_of_the_version_header_is_accepted(serving: Serving, version: str) -> None:
    async with serving.http() as http:
        headers = serving.signed(**{"anthropic-version": version})
        assert (await http.get("/v1/agents?beta=true", headers=headers)).status_code == 200
        assert (await http.get("/v1/environments?beta=anything", headers=headers)).status_code == 200


@pytest.mark.rule("MA-A0.26")
async def test_ambiguous_headers_are_400_in_an_envelope_of_both_sdks(serving: Serving) -> None:
    async with serving.http() as http:
        answer = await http.get("/v1/agents", headers={"authorization": "Bearer x"})
    body = answer.json()
    assert answer.status_code == 400
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    assert {"message", "type", "param", "code"} <= set(body["error"])
    assert answer.headers["x-should-retry"] == "false"


@pytest.mark.rule("MA-A0.27")
async def test_the_base_url_of_this_face_serves_the_sdk(serving: Serving) -> None:
    async with serving.sdk(base_url=f"{serving.url}/claude") as client:
        assert (await client.beta.agents.list()).data == []


@pytest.mark.parametrize("path", ["/v1/agents/sessions", "/openai/v1/agents/x", "/openai/v1/responses"])
async def test_the_other_face_says_in_its_own_form_that_it_is_not_built(serving: Serving, path: str) -> None:
    async with serving.http() as http:
        answer = await http.post(path, headers={"authorization": f"Bearer {serving.key.secret}"}, json={})
        denied = await http.post(path, json={})
    error = answer.json()["error"]
    assert answer.status_code == 501 and answer.headers["x-should-retry"] == "false"
    assert set(error) == {"message", "type", "param", "code"}
    assert "POST /v1/" in error["message"]
    assert denied.status_code == 401 and set(denied.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.rule("MA-A0.7", "MA-A0.16")
async def test_methods_that_are_not_built_name_themselves_after_one_request(serving: Serving) -> None:
    async with serving.sdk() as client:
        calls = {
            "vaults.list": lambda: client.beta.vaults.list(),
            "vaults.create": lambda: client.beta.vaults.create(display_name="v"),
            "files.list": lambda: client.beta.files.list(),
            "memory_stores.create": lambda: client.beta.memory_stores.create(name="m"),
            "deployments.pause": lambda: client.beta.deployments.pause("depl_1"),
            "skills.list": lambda: client.beta.skills.list(),
            "environments.work.stats": lambda: client.beta.environments.work.stats("env_1"),
            "sessions.resources.list": lambda: client.beta.sessions.resources.list("sesn_1"),
            "sessions.threads.archive": lambda: client.beta.sessions.threads.archive("sthr_1", session_id="sesn_1"),
        }
        for count, (name, call) in enumerate(calls.items(), start=1):
            with pytest.raises(anthropic.APIStatusError) as caught:
                await call()
            assert caught.value.status_code == 501
            assert f"{name} (" in caught.value.message and " /v1/" in caught.value.message
            assert serving.requests() == count


def test_every_method_of_the_sdk_is_served_or_said_to_be_missing() -> None:
    unbuilt = {name: (method, template) for method, template, name in NOT_BUILT}
    served = {route.sdk_method: (route.method, route.template) for route in ROUTES}
    for method in read_sdk_methods():
        if method.route is None:
            continue
        answered = unbuilt.get(method.name) or served.get(method.name)
        assert answered is not None, method.name
        assert answered[0] == method.verb
        assert _shape(answered[1]) == _shape(method.route), method.name
    assert not set(unbuilt) & set(SERVED_METHODS)
    assert set(SERVED_METHODS) == set(SERVED)


def _shape(template: str) -> list[str]:
    return ["{}" if part.startswith("{") else part for part in template.split("/")]


@pytest.mark.rule("MA-A0.12", "MA-F1")
async def test_a_body_of_the_limit_is_taken(probing: Serving) -> None:
    async with probing.http() as http:
        answer = await http.post("/v1/echo", headers=probing.signed(), content=b"x" * BODY_BYTES_MAX)
    assert (answer.status_code, answer.text) == (200, str(BODY_BYTES_MAX))


@pytest.mark.rule("MA-A0.12", "MA-F1")
@pytest.mark.parametrize("announced", [True, False])
async def test_a_larger_body_is_413_however_it_comes(probing: Serving, announced: bool) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(33):
            yield b"x" * (1024 * 1024)

    content = b"x" * (BODY_BYTES_MAX + 1) if announced else chunks()
    async with probing.http() as http:
        answer = await http.post("/v1/echo", headers=probing.signed(), content=content)
    assert answer.status_code == 413
    assert answer.json()["error"]["type"] == "request_too_large"


async def test_an_announced_length_over_the_limit_is_refused_before_the_body(probing: Serving) -> None:
    answer = await exchange(
        probing.url,
        b"POST /v1/echo HTTP/1.1\r\nhost: x\r\n"
        + f"x-api-key: {probing.key.secret}\r\ncontent-length: {BODY_BYTES_MAX + 1}\r\n\r\n".encode(),
    )
    assert answer.startswith(b"HTTP/1.1 413")


async def test_a_body_that_stops_coming_is_408_and_ends_its_connection(probing: Serving) -> None:
    answer = await exchange(
        probing.url,
        b"POST /v1/echo HTTP/1.1\r\nhost: x\r\n"
        + f"x-api-key: {probing.key.secret}\r\ncontent-length: 10\r\n\r\nhalf".encode(),
    )
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"connection: close" in answer and b"request_timeout" in answer


async def test_a_failure_is_500_in_the_envelope_and_tells_nothing(probing: Serving) -> None:
    with capture_logs() as logs:
        async with probing.http() as http:
            answer = await http.post("/v1/fail", headers=probing.signed(), content=b"private words")
    assert answer.status_code == 500
    assert answer.json()["request_id"] in answer.json()["error"]["message"]
    logged = repr(logs)
    assert answer.json()["request_id"] in logged and "KeyError" in logged and "fail" in logged
    for text in (answer.text, logged):
        assert "private words" not in text and "Traceback" not in text


@pytest.mark.rule("MA-A0.25", "MA-A0.7")
async def test_without_a_database_requests_are_503_and_asked_to_come_back(serving: Serving) -> None:
    serving.catalog.away = True
    async with serving.http() as http:
        answer = await http.get("/v1/environments", headers=serving.signed())
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert "x-should-retry" not in answer.headers
    async with serving.sdk(max_retries=0) as client:
        with pytest.raises(anthropic.InternalServerError):
            await client.beta.agents.list()


async def test_operational_pages_need_no_key(serving: Serving) -> None:
    async with serving.http() as http:
        health = await http.get("/healthz")
        assert (health.status_code, health.json()) == (200, {"status": "ok", "version": "9.9.9"})
        assert (await http.get("/readyz")).json() == {"status": "ready", "reasons": {}, "warnings": []}
        serving.reasons["database"] = "The schema is older than this version: run 'perdure migrate'."
        unready = await http.get("/readyz")
        assert (unready.status_code, unready.json()["reasons"]) == (503, serving.reasons)
        serving.metrics.watch("perdure_open_turns", "Turns now.", lambda: 3.0)
        await http.get("/v1/nothing/sesn_123", headers=serving.signed())
        page = (await http.get("/metrics")).text
    assert 'perdure_http_requests_total{method="GET",route="/healthz",status="2xx"} 1.0' in page
    assert "perdure_open_turns 3.0" in page and "sesn_123" not in page


class Noting(Submissions):
    """Says when a retry has come as far as the wait for its first attempt."""

    def __init__(self) -> None:
        super().__init__()
        self.retried = Signal("the retry is here")

    async def enter(self, key: SubmissionKey) -> tuple[Attempt, SubmissionKey]:
        if key.attempt:
            self.retried.set()
        return await super().enter(key)


@pytest.mark.rule("MA-E1.3")
async def test_a_retry_waits_for_its_first_attempt_in_flight() -> None:
    gate, seen, submissions = Gate(), list[str](), Noting()

    async def slow(services: Services, request: Request) -> Response | Refused:
        assert request.submission is not None
        if request.submission.attempt == 0:
            await gate.pass_through()
        seen.append(f"attempt {request.submission.attempt}")
        return Response(200, b"{}")

    routes = [post("/v1/once", slow, submits_once=True)]
    async with serve(routes, submissions=submissions) as running, running.http() as http:
        first = asyncio.create_task(http.post("/v1/once", headers=running.signed(), content=b"{}"))
        await gate.reached()
        again = running.signed(**{"x-stainless-retry-count": "1"})
        retry = asyncio.create_task(http.post("/v1/once", headers=again, content=b"{}"))
        await submissions.retried.wait(5)
        gate.open()
        assert (await first).status_code == (await retry).status_code == 200
    assert seen == ["attempt 0", "attempt 1"]


async def test_what_became_of_the_first_response_is_told_to_the_retry() -> None:
    seen: list[SubmissionKey] = []

    async def note(services: Services, request: Request) -> Response | Refused:
        assert request.submission is not None
        seen.append(request.submission)
        if request.body == b"bad":
            return Refused("invalid", "invalid_request_error", "No.")
        return Response(200, b"{}")

    routes = [post("/v1/once", note, submits_once=True)]
    async with serve(routes) as running:
        for retry, body in ((0, b"{}"), (1, b"{}"), (0, b"bad"), (1, b"bad")):
            async with running.http() as http:
                headers = running.signed(**{"x-stainless-retry-count": str(retry)})
                await http.post("/v1/once", headers=headers, content=body)
        async with running.http() as http:
            for retry in (0, 1):
                headers = running.signed(**{"x-stainless-retry-count": str(retry)})
                await http.post("/v1/once", headers=headers, content=b"[]")
    known = [key.known for key in seen]
    assert known[0] is known[2] is known[3] is known[4] is None
    assert known[1] is not None and not known[1].connection_reused
    assert known[5] is not None and known[5].connection_reused


@pytest.mark.rule("MA-E1.1", "MA-E1.2")
async def test_a_failure_of_ours_leaves_the_request_to_its_retry() -> None:
    """Nothing was stored: the retry must not be taken for one of the equal request that was answered before."""
    seen: list[SubmissionKey] = []

    async def fail_second(services: Services, request: Request) -> Response | Refused:
        assert request.submission is not None
        seen.append(request.submission)
        if len(seen) == 2:
            raise KeyError("a bug")
        return Response(200, b"{}")

    async with serve([post("/v1/once", fail_second, submits_once=True)]) as running:
        for retry, status in ((0, 200), (0, 500), (1, 200)):
            async with running.http() as http:
                headers = running.signed(**{"x-stainless-retry-count": str(retry)})
                assert (await http.post("/v1/once", headers=headers, content=b"{}")).status_code == status
    known = seen[2].known
    assert known is not None and known.connection_reused and known.request_id == seen[0].request_id


@pytest.mark.rule("MA-E1.3")
async def test_a_client_that_goes_takes_its_request_back() -> None:
    """Its retry, here or at another process, need not wait for it, and is the only one that is admitted."""
    gate, cancelled, seen = Gate(), Signal("the handler was cancelled"), list[int]()

    async def wait(services: Services, request: Request) -> Response | Refused:
        assert request.submission is not None
        seen.append(request.submission.attempt)
        if request.submission.attempt == 0:
            try:
                await gate.pass_through()
            except asyncio.CancelledError:
                cancelled.set()
                raise
        return Response(200, b"{}")

    async with serve([post("/v1/once", wait, submits_once=True)]) as running:
        async with running.http() as http:
            first = asyncio.create_task(http.post("/v1/once", headers=running.signed(), content=b"{}"))
            await gate.reached()
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
        await cancelled.wait(5)
        async with running.http() as http:
            headers = running.signed(**{"x-stainless-retry-count": "1"})
            assert (await http.post("/v1/once", headers=headers, content=b"{}")).status_code == 200
    assert seen == [0, 1]


@pytest.mark.rule("MA-E1.4")
async def test_an_idempotency_key_of_the_wrong_length_is_named() -> None:
    async with serve([post("/v1/once", echo, submits_once=True)]) as running, running.http() as http:
        headers = running.signed(**{"idempotency-key": "x" * 300})
        answer = await http.post("/v1/once", headers=headers, content=b"{}")
    assert answer.status_code == 400 and "Idempotency-Key" in answer.json()["error"]["message"]


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
async def test_a_compressed_body_is_refused_and_stores_nothing(serving: Serving, coding: str) -> None:
    plain = b'{"name":"n","model":"m"}'
    packed = gzip.compress(plain) if coding == "gzip" else zlib.compress(plain)
    async with serving.http() as http:
        headers = serving.signed(**{"content-encoding": coding})
        answer = await http.post("/v1/agents", headers=headers, content=packed)
    assert answer.status_code == 400 and answer.json()["error"]["message"].startswith("body: must be ")
    assert "create_agent" not in serving.catalog.calls


async def test_a_query_of_a_thousand_fields_is_refused(serving: Serving) -> None:
    async with serving.http() as http:
        answer = await http.get("/v1/agents?" + "&".join("a=1" for _ in range(1_001)), headers=serving.signed())
    assert answer.status_code == 400


async def test_both_headers_of_the_sdk_are_never_needed_on_paths_of_one_face(serving: Serving) -> None:
    async with serving.http() as http:
        bare = {"x-api-key": serving.key.secret}
        assert (await http.get("/v1/environments", headers=bare)).status_code == 200
        assert (await http.get("/v1/agents", headers=bare)).status_code == 400
        assert (await http.get("/v1/agents", headers=bare | VERSION)).status_code == 200
