"""The strict scripted provider: what it refuses, and how its scripts play."""

import asyncio
import base64
import copy
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx2
import pytest

from perdure.testing.messages_rules import BODY_BYTES_MAX, IMAGE_BYTES_MAX
from perdure.testing.model_server import (
    Call,
    Failure,
    Gate,
    ModelServer,
    ModelServerThread,
    Redacted,
    Reply,
    Text,
    Thinking,
)

Json = dict[str, Any]

HEADERS = {"x-api-key": "k", "anthropic-version": "2023-06-01", "content-type": "application/json"}


@pytest.fixture
async def client(server: ModelServer) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(base_url=server.base_url, headers=HEADERS, trust_env=False) as opened:
        yield opened


def good() -> Json:
    """A request with a bit of everything that is accepted."""
    pixel = base64.b64encode(b"pixel").decode()
    return {
        "model": "claude-test",
        "max_tokens": 100,
        "system": [{"type": "text", "text": "Be brief."}],
        "tools": [
            {"name": "bash", "description": "Runs.", "input_schema": {"type": "object"}},
            {"type": "web_search_20250305", "name": "web_search"},
        ],
        "messages": [
            {"role": "user", "content": "Look."},
            {
                "role": "user",
                "content": [
                    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": pixel}},
                    {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x"}},
                ],
            },
            {
                "role": "assistant",
                "content": [
                    {"type": "text", "text": "Two."},
                    {"type": "tool_use", "id": "c1", "name": "bash", "input": {}},
                    {"type": "tool_use", "id": "c2", "name": "bash", "input": {"command": "ls"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1"},
                    {"type": "tool_result", "tool_use_id": "c2", "content": [{"type": "text", "text": "a"}]},
                ],
            },
            {"role": "user", "content": [{"type": "text", "text": "Go on."}]},
        ],
    }


def changed(change: Callable[[Json], object]) -> Json:
    body = copy.deepcopy(good())
    change(body)
    return body


def assign(*path: Any) -> Callable[[Json], object]:
    """A change that sets the place at all but the last of `path` to its last."""

    def change(body: Json) -> None:
        node: Any = body
        for key in path[:-2]:
            node = node[key]
        node[path[-2]] = path[-1]

    return change


def only(*messages: Json) -> Callable[[Json], object]:
    return assign("messages", list(messages))


def user(*blocks: Json | str) -> Json:
    return {"role": "user", "content": [{"type": "text", "text": b} if isinstance(b, str) else b for b in blocks]}


def assistant(*blocks: Json | str) -> Json:
    return {**user(*blocks), "role": "assistant"}


def use(identity: str = "c1", **fields: Any) -> Json:
    return {"type": "tool_use", "id": identity, "name": "bash", "input": {}, **fields}


def result(identity: str = "c1", **fields: Any) -> Json:
    return {"type": "tool_result", "tool_use_id": identity, **fields}


def image(data: bytes, media_type: str = "image/png") -> Json:
    encoded = base64.b64encode(data).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": media_type, "data": encoded}}


REFUSALS: dict[str, tuple[Callable[[Json], object], str]] = {
    "no model": (lambda b: b.pop("model"), "model: Field required"),
    "model of another type": (assign("model", 7), "model: Input should be a valid string"),
    "empty model": (assign("model", ""), "model: String should have"),
    "no max_tokens": (lambda b: b.pop("max_tokens"), "max_tokens: Field required"),
    "max_tokens zero": (assign("max_tokens", 0), "max_tokens: Input should be greater"),
    "max_tokens as text": (assign("max_tokens", "5"), "max_tokens: Input should be a valid integer"),
    "max_tokens as boolean": (assign("max_tokens", True), "max_tokens: Input should be a valid integer"),
    "unknown field": (assign("prompt", "x"), "prompt: Extra inputs"),
    "stream as text": (assign("stream", "yes"), "stream: Input should be a valid boolean"),
    "blank system": (assign("system", " "), "system: text content blocks"),
    "blank system block": (assign("system", 0, "text", "\n"), "system.0: text content blocks"),
    "no messages": (lambda b: b.pop("messages"), "messages: Field required"),
    "messages of another type": (assign("messages", "hi"), "messages: Input should be a valid list"),
    "empty messages": (assign("messages", []), "at least one message"),
    "system role": (assign("messages", 0, "role", "system"), 'Unexpected role "system"'),
    "no role": (lambda b: b["messages"][0].pop("role"), "Unexpected role"),
    "extra field in a message": (assign("messages", 0, "id", "m1"), "messages.0.id: Extra inputs"),
    "assistant first": (only(assistant("hi"), user("hi")), "first message must use the user role"),
    "empty content": (only(user()), "non-empty content"),
    "no content": (only({"role": "user"}), "messages.0.content: Field required"),
    "empty text": (only(user("")), "text content blocks must be non-empty"),
    "empty string": (only({"role": "user", "content": ""}), "text content blocks must be non-empty"),
    "blank text": (only(user(" \n\t\u00a0\u2003")), "must contain non-whitespace"),
    "blank assistant text": (only(user("a"), assistant(" "), user("b")), "must contain non-whitespace"),
    "unknown block": (only(user({"type": "video"})), "Input tag 'video'"),
    "tool_use by the user": (only(user(use())), "Input tag 'tool_use'"),
    "tool_result by the assistant": (only(user("a"), assistant(result())), "Input tag 'tool_result'"),
    "extra field in a block": (only(user({"type": "text", "text": "a", "id": "b1"})), "text.id: Extra inputs"),
    "call never answered": (only(user("a"), assistant(use())), "without `tool_result` blocks immediately after: c1"),
    "call answered by text": (only(user("a"), assistant(use()), user("b")), "without `tool_result` blocks"),
    "call answered too late": (
        only(user("a"), assistant(use()), user("b"), assistant("c"), user(result())),
        "without `tool_result` blocks",
    ),
    "one of two calls answered": (
        only(user("a"), assistant(use("c1"), use("c2")), user(result("c1"))),
        "without `tool_result` blocks immediately after: c2",
    ),
    "result without call": (only(user(result("c9"))), "unexpected `tool_use_id`"),
    "result not first": (only(user("a"), assistant(use()), user("b", result())), "must come first"),
    "result in a later merged message": (
        only(user("a"), assistant(use()), user("b"), user(result())),
        "must come first",
    ),
    "call id twice in one message": (
        only(user("a"), assistant(use(), use()), user(result())),
        "`tool_use` ids must be unique",
    ),
    "call id twice in the history": (
        only(user("a"), assistant(use()), user(result()), assistant(use()), user(result())),
        "`tool_use` ids must be unique",
    ),
    "two results for one call": (only(user("a"), assistant(use()), user(result(), result())), "single result"),
    "call id with a dot": (only(user("a"), assistant(use("c.1")), user(result("c.1"))), "tool_use.id: String"),
    "call without name": (only(user("a"), assistant(use(name="")), user(result())), "tool_use.name: String"),
    "input as list": (only(user("a"), assistant(use(input=[])), user(result())), "input: Input should be an object"),
    "input as text": (only(user("a"), assistant(use(input="{}")), user(result())), "Input should be an object"),
    "blank text in a result": (
        only(user("a"), assistant(use()), user(result(content=[{"type": "text", "text": " "}]))),
        "must contain non-whitespace",
    ),
    "image in an error result": (
        only(user("a"), assistant(use()), user(result(content=[image(b"x")], is_error=True))),
        "all content must be type text",
    ),
    "thinking without signature": (
        only(user("a"), assistant({"type": "thinking", "thinking": "hm"}, "b"), user("c")),
        "thinking.signature: Field required",
    ),
    "thinking never sent": (
        only(user("a"), assistant({"type": "thinking", "thinking": "hm", "signature": "s"}, "b"), user("c")),
        "Invalid `signature`",
    ),
    "redacted thinking never sent": (
        only(user("a"), assistant({"type": "redacted_thinking", "data": "d"}, "b"), user("c")),
        "Invalid `signature`",
    ),
    "trailing white space": (only(user("a"), assistant("so far ")), "trailing whitespace"),
    "image too large": (only(user(image(b"\0" * (IMAGE_BYTES_MAX + 1)))), "image exceeds 5 MB"),
    "image of another type": (only(user(image(b"x", "image/tiff"))), "media_type: Input should be one of"),
    "image that is not base64": (
        assign("messages", 1, "content", 0, "source", "data", "a*b"),
        "invalid base64",
    ),
    "image without source": (only(user({"type": "image"})), "source: Field required"),
    "tool without name": (lambda b: b["tools"][0].pop("name"), "tools.0.name: String should match"),
    "tool name with a dot": (assign("tools", 0, "name", "a.b"), "tools.0.name: String should match"),
    "tool name too long": (assign("tools", 0, "name", "a" * 129), "tools.0.name: String should match"),
    "tool name twice": (assign("tools", 1, {"name": "bash", "input_schema": {"type": "object"}}), "must be unique"),
    "tool without schema": (lambda b: b["tools"][0].pop("input_schema"), "input_schema: Field required"),
    "schema of another type": (
        assign("tools", 0, "input_schema", {"type": "string"}),
        "input_schema.type: Input should be 'object'",
    ),
    "extra field in a tool": (assign("tools", 0, "permission", "ask"), "permission: Extra inputs"),
    "U+0000": (only(user("a\x00b")), "U+0000"),
    "U+0000 in a key": (assign("metadata", {"a\x00": 1}), "U+0000"),
    "lone surrogate": (only(user("a\ud800b")), "surrogate"),
    "too many cache marks": (
        assign("system", [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}] * 5),
        "maximum of 4 blocks with cache_control",
    ),
}


@pytest.mark.parametrize("name", list(REFUSALS))
async def test_a_request_the_provider_would_refuse_is_refused(
    server: ModelServer, client: httpx2.AsyncClient, name: str
) -> None:
    change, reason = REFUSALS[name]
    response = await client.post("/v1/messages", content=json.dumps(changed(change)))
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    assert reason in error["message"]
    assert server.requests[0].refused == error["message"]


async def test_a_request_within_the_rules_is_answered(server: ModelServer, client: httpx2.AsyncClient) -> None:
    server.enqueue(Reply(Text("Yes."), Call("bash", {"a": 1}, id="t1")))
    response = await client.post("/v1/messages", json=good())
    assert response.status_code == 200, response.text
    message = response.json()
    assert message["content"] == [
        {"type": "text", "text": "Yes."},
        {"type": "tool_use", "id": "t1", "name": "bash", "input": {"a": 1}},
    ]
    assert message["stop_reason"] == "tool_use"
    recorded = server.requests[0]
    assert recorded.refused is None and not recorded.cancelled
    assert recorded.body == good()
    assert json.loads(recorded.raw) == good()


async def test_results_in_order_of_their_own_and_merged_messages_are_fine(
    server: ModelServer, client: httpx2.AsyncClient
) -> None:
    server.enqueue(Reply(Text("ok")))
    body = changed(
        only(
            user("a"),
            assistant(use("c1")),
            assistant(use("c2")),
            user(result("c2", content="x")),
            user(result("c1", is_error=True, content="y")),
            user("now"),
        )
    )
    response = await client.post("/v1/messages", json=body)
    assert response.status_code == 200, response.text


async def test_an_unknown_model_is_not_found(server: ModelServer, client: httpx2.AsyncClient) -> None:
    response = await client.post("/v1/messages", json={**good(), "model": "anthropic/claude-test"})
    assert (response.status_code, response.json()["error"]["type"]) == (404, "not_found_error")
    assert server.requests[0].refused == "model: anthropic/claude-test"


@pytest.mark.parametrize(
    ("name", "value", "status", "kind"),
    [
        ("x-api-key", "", 401, "authentication_error"),
        ("anthropic-version", "", 400, "invalid_request_error"),
        ("anthropic-version", "latest", 400, "invalid_request_error"),
        ("content-type", "text/plain", 400, "invalid_request_error"),
    ],
)
async def test_bad_headers_are_refused(
    server: ModelServer, client: httpx2.AsyncClient, name: str, value: str, status: int, kind: str
) -> None:
    response = await client.post("/v1/messages", content=json.dumps(good()), headers={name: value})
    assert (response.status_code, response.json()["error"]["type"]) == (status, kind)
    assert server.requests[0].refused


async def test_a_bearer_token_is_as_good_as_a_key(server: ModelServer, client: httpx2.AsyncClient) -> None:
    server.enqueue(Reply(Text("x")))
    headers = {"x-api-key": "", "authorization": "Bearer t"}
    assert (await client.post("/v1/messages", json=good(), headers=headers)).status_code == 200


@pytest.mark.parametrize(
    "raw", [b"\xff\xfe", b"{", b"[]", b'"x"', b"", b'{"a": NaN}', b'{"model": "\xed\xa0\x80"}', b"[" * 100_000]
)
async def test_a_body_that_is_not_a_json_object_is_refused(
    server: ModelServer, client: httpx2.AsyncClient, raw: bytes
) -> None:
    response = await client.post("/v1/messages", content=raw)
    assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")
    assert server.requests[0].raw == raw


async def test_a_body_over_the_limit_is_too_large(server: ModelServer, client: httpx2.AsyncClient) -> None:
    response = await client.post("/v1/messages", content=b" " * (BODY_BYTES_MAX + 1))
    assert (response.status_code, response.json()["error"]["type"]) == (413, "request_too_large")
    assert server.requests[0].refused


async def test_thinking_may_come_back_byte_for_byte_only(server: ModelServer, client: httpx2.AsyncClient) -> None:
    server.enqueue(Reply(Thinking("hm"), Redacted("d"), Text("a")), Reply(Text("b")))
    sent = (await client.post("/v1/messages", json=changed(only(user("q"))))).json()["content"]
    again = changed(only(user("q"), assistant(*sent), user("r")))
    assert (await client.post("/v1/messages", json=again)).status_code == 200
    for key in ("thinking", "signature"):
        other = copy.deepcopy(again)
        other["messages"][1]["content"][0][key] += "."
        response = await client.post("/v1/messages", json=other)
        assert "Invalid `signature`" in response.json()["error"]["message"]


async def test_a_thought_must_not_be_the_end_of_the_history(server: ModelServer, client: httpx2.AsyncClient) -> None:
    server.sent_thinking.add("hm", "s")
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    response = await client.post("/v1/messages", json=changed(only(user("q"), assistant(thought))))
    assert "final block" in response.json()["error"]["message"]


async def test_tokens_are_counted_without_max_tokens(server: ModelServer, client: httpx2.AsyncClient) -> None:
    body = good()
    del body["max_tokens"]
    response = await client.post("/v1/messages/count_tokens?beta=true", json=body)
    assert response.json()["input_tokens"] > 1
    refused = await client.post("/v1/messages/count_tokens", json={**body, "messages": []})
    assert refused.status_code == 400
    assert len(server.token_counts) == 2 and not server.requests


async def test_a_refusal_uses_up_no_answer(server: ModelServer, client: httpx2.AsyncClient) -> None:
    server.enqueue(Reply(Text("kept")))
    assert (await client.post("/v1/messages", json={})).status_code == 400
    assert (await client.post("/v1/messages", json=good())).json()["content"][0]["text"] == "kept"


async def test_the_responder_answers_what_finds_nothing_enqueued(
    server: ModelServer, client: httpx2.AsyncClient
) -> None:
    server.respond_with(lambda request: Reply(Text(f"number {request.order}")))
    server.enqueue(Failure(529, "overloaded_error", "later", retry_after=7))
    first = await client.post("/v1/messages", json=good())
    assert (first.status_code, first.headers["retry-after"]) == (529, "7")
    assert (await client.post("/v1/messages", json=good())).json()["content"][0]["text"] == "number 1"


async def test_a_used_up_script_says_so(server: ModelServer, client: httpx2.AsyncClient) -> None:
    response = await client.post("/v1/messages", json=good())
    assert "used up" in response.json()["error"]["message"]
    assert server.requests[0].refused is None


async def test_a_gate_between_blocks_holds_the_stream(server: ModelServer, client: httpx2.AsyncClient) -> None:
    gate = Gate()
    server.enqueue(Reply(Text("one"), Text("two"), gate_after_blocks={1: gate}))
    async with client.stream("POST", "/v1/messages", json={**good(), "stream": True}) as response:
        await gate.reached()
        lines = response.aiter_lines()
        seen: list[str] = []
        while not (seen and "content_block_stop" in seen[-1]):
            seen.append(await anext(lines))
        assert "two" not in "".join(seen)
        gate.open()
        rest = [line async for line in lines]
    assert any("two" in line for line in rest)
    assert any("message_stop" in line for line in rest)


async def test_waiting_for_requests_that_never_come_ends_at_its_deadline(server: ModelServer) -> None:
    with pytest.raises(TimeoutError):
        await server.wait_for_requests(1, deadline_s=0.01)


async def test_a_client_that_hangs_up_is_recorded(server: ModelServer) -> None:
    gate = Gate()
    server.enqueue(Reply(Text("x"), gate=gate))
    async with httpx2.AsyncClient(base_url=server.base_url, headers=HEADERS, trust_env=False) as client:
        calling = asyncio.create_task(client.post("/v1/messages", json=good()))
        await gate.reached()
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
    (request,) = await server.wait_for_requests(1)
    await request.ended.wait(5)
    assert request.cancelled


async def test_other_routes_and_methods_are_refused(client: httpx2.AsyncClient) -> None:
    assert (await client.post("/v1/complete", json={})).status_code == 404
    assert (await client.get("/v1/messages")).status_code == 405


def test_the_server_runs_in_a_thread_of_its_own() -> None:
    gate = Gate()
    with ModelServerThread() as own:
        own.server.enqueue(Reply(Text("from the thread"), gate=gate))
        answers: list[httpx2.Response] = []
        import threading

        def call() -> None:
            with httpx2.Client(base_url=own.base_url, headers=HEADERS, trust_env=False) as client:
                answers.append(client.post("/v1/messages", json=good()))

        caller = threading.Thread(target=call)
        caller.start()
        gate.reached_blocking()
        assert len(own.server.wait_for_requests_blocking(1)) == 1
        gate.open()
        caller.join(5)
        assert answers[0].json()["content"][0]["text"] == "from the thread"
