"""The adapter of the Messages API, against the strict scripted provider over a real socket."""

import asyncio
import json
import subprocess
import sys
from contextlib import aclosing
from email.utils import formatdate
from typing import Any

import pytest

from perdure.models.anthropic import AnthropicModel
from perdure.models.anthropic_errors import BrokenStream, retry_after_ms
from perdure.models.anthropic_stream import ReplyReader
from perdure.models.strictness import TextFlow, clean_text, parse_arguments
from perdure.ports.model import (
    BlockClosed,
    BlockDelta,
    BlockOpened,
    CallBlock,
    Ended,
    ModelBlock,
    ModelEvent,
    ModelFailed,
    ModelRequest,
    OpaqueBlock,
    Progress,
    TextBlock,
    ThinkingBlock,
    Usage,
)
from perdure.testing.model_server import Call, Failure, Gate, ModelServer, Opaque, Redacted, Reply, Text, Thinking


def ask(text: str = "Hello", **changes: Any) -> ModelRequest:
    fields: dict[str, Any] = {
        "model": "claude-test",
        "system": None,
        "messages": [{"role": "user", "content": [{"type": "text", "text": text}]}],
        "tools": [],
        "max_tokens": 1024,
    }
    return ModelRequest(**{**fields, **changes})


async def collect(model: AnthropicModel, request: ModelRequest | None = None) -> list[ModelEvent]:
    async with asyncio.timeout(10):
        return [event async for event in model.stream(request or ask())]


async def fails(model: AnthropicModel, request: ModelRequest | None = None) -> ModelFailed:
    with pytest.raises(ModelFailed) as caught:
        await collect(model, request)
    return caught.value


def blocks(events: list[ModelEvent]) -> list[ModelBlock]:
    return [event.block for event in events if isinstance(event, BlockClosed)]


def shown(events: list[ModelEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, BlockDelta))


def ended(events: list[ModelEvent]) -> Ended:
    last = events[-1]
    assert isinstance(last, Ended)
    return last


async def test_text_arrives_in_pieces_and_whole(server: ModelServer, model: AnthropicModel) -> None:
    usage = Usage(
        input_tokens=7,
        output_tokens=5,
        cache_read_input_tokens=3,
        cache_creation_5m_input_tokens=2,
        cache_creation_1h_input_tokens=1,
    )
    server.enqueue(Reply(Text("Paris is the capital. ☂"), chunk_chars=4, usage=usage))
    events = await collect(model, ask(system="Be brief."))
    assert isinstance(events[0], Progress) and events[0].usage is not None and events[0].usage.input_tokens == 7
    assert BlockOpened(0, "text") in events
    assert shown(events) == "Paris is the capital. ☂"
    assert blocks(events) == [TextBlock("Paris is the capital. ☂")]
    assert ended(events) == Ended(stop_reason="end_turn", usage=usage)
    body = server.requests[0].body
    assert body["stream"] is True
    assert body["system"] == "Be brief."
    assert "tools" not in body


async def test_a_text_block_without_content_closes_as_empty_text(server: ModelServer, model: AnthropicModel) -> None:
    server.enqueue(Reply(Text("")))
    assert blocks(await collect(model)) == [TextBlock("")]


async def test_signed_and_redacted_thinking_can_be_sent_back(server: ModelServer, model: AnthropicModel) -> None:
    server.enqueue(Reply(Thinking("Let me see."), Redacted("b64=="), Call("bash", {"command": "ls"}, id="toolu_1")))
    got = blocks(await collect(model))
    thinking, redacted, call = got
    assert isinstance(thinking, ThinkingBlock) and thinking.signed
    assert isinstance(redacted, ThinkingBlock) and redacted.signed
    assert call == CallBlock("toolu_1", "bash", {"command": "ls"})
    server.enqueue(Reply(Text("Done.")))
    history = [
        *ask().messages,
        {
            "role": "assistant",
            "content": [
                thinking.native,
                redacted.native,
                {"type": "tool_use", "id": "toolu_1", "name": "bash", "input": {"command": "ls"}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "a.txt"}]},
    ]
    assert blocks(await collect(model, ask(messages=history))) == [TextBlock("Done.")]


async def test_thinking_without_signature_is_marked_unsigned(server: ModelServer, model: AnthropicModel) -> None:
    server.enqueue(Reply(Thinking("Hm.", signature=""), Text("Yes.")))
    thinking = blocks(await collect(model))[0]
    assert isinstance(thinking, ThinkingBlock)
    assert not thinking.signed
    assert thinking.native["thinking"] == "Hm."


async def test_thinking_that_had_to_be_cleaned_is_no_longer_signed(server: ModelServer, model: AnthropicModel) -> None:
    server.enqueue(Reply(Thinking("a\x00b", signature="sig")))
    thinking = blocks(await collect(model))[0]
    assert thinking == ThinkingBlock({"type": "thinking", "thinking": "a\ufffdb", "signature": "sig"}, signed=False)


async def test_thinking_deltas_are_bare_signs_of_progress(server: ModelServer, model: AnthropicModel) -> None:
    server.enqueue(Reply(Thinking("a long thought that nobody is shown")))
    events = await collect(model)
    assert shown(events) == ""
    assert sum(isinstance(event, BlockDelta) for event in events) >= 2


async def test_parallel_calls_keep_their_order(server: ModelServer, model: AnthropicModel) -> None:
    server.enqueue(Reply(Text("Two."), Call("read", {"path": "a"}, id="c1"), Call("read", {"path": "b"}, id="c2")))
    events = await collect(model, ask(tools=[{"name": "read", "input_schema": {"type": "object"}}]))
    assert blocks(events) == [
        TextBlock("Two."),
        CallBlock("c1", "read", {"path": "a"}),
        CallBlock("c2", "read", {"path": "b"}),
    ]
    assert ended(events).stop_reason == "tool_use"


@pytest.mark.parametrize(
    "text",
    [
        '{"command": "l',
        '{"command": }',
        "[1]",
        '"ls"',
        "null",
        '{"n": NaN}',
        '{"n": -Infinity}',
        '{"n": 1e999}',
        '{"a": ' + "[" * 64 + "]" * 64 + "}",
        '{"a": ' + "[" * 20_000 + "]" * 20_000 + "}",
        '{"a": 1} {"b": 2}',
    ],
)
async def test_arguments_that_are_not_one_bounded_object_are_none(
    server: ModelServer, model: AnthropicModel, text: str
) -> None:
    server.enqueue(Reply(Call("bash", text, id="c1"), stop_reason="max_tokens", chunk_chars=5_000))
    events = await collect(model)
    assert blocks(events) == [CallBlock("c1", "bash", None)]
    assert ended(events).stop_reason == "max_tokens"


def test_arguments_at_the_edge_of_the_rules_are_kept() -> None:
    deep = '{"a": ' + "[" * 63 + "]" * 63 + "}"
    assert parse_arguments(deep) == json.loads(deep)
    assert parse_arguments("") == {}
    assert parse_arguments('{"a\\u0000": "\\ud800", "b": ["\\ud83d\\ude00"]}') == {"a\ufffd": "\ufffd", "b": ["😀"]}


async def test_unstorable_characters_are_replaced_in_text(server: ModelServer, model: AnthropicModel) -> None:
    server.enqueue(Reply(Text("a\x00b\ud800c\ude00\ud83d\ud83d\ude00"), chunk_chars=1))
    events = await collect(model)
    assert blocks(events) == [TextBlock("a\ufffdb\ufffdc\ufffd\ufffd😀")]
    assert shown(events) == "a\ufffdb\ufffdc\ufffd\ufffd😀"


def test_half_a_pair_at_the_end_of_a_text_becomes_a_replacement_character() -> None:
    flow = TextFlow()
    assert flow.feed("x\ud83d") == "x"
    assert flow.finish() == "\ufffd"
    assert flow.whole() == "x\ufffd"
    assert clean_text("plain ☂ 😀") == "plain ☂ 😀"


async def test_blocks_of_other_kinds_come_as_they_are(server: ModelServer, model: AnthropicModel) -> None:
    native = {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "x"}}
    found: dict[str, Any] = {
        "type": "web_search_tool_result",
        "tool_use_id": "srvtoolu_1",
        "content": [],
        "from_tomorrow": {"a": 1},
    }
    server.enqueue(Reply(Opaque(native), Opaque(found), stop_reason="pause_turn"))
    events = await collect(model)
    assert blocks(events) == [OpaqueBlock(native), OpaqueBlock(found)]
    assert ended(events).stop_reason == "pause_turn"


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ("end_turn", "end_turn"),
        ("stop_sequence", "end_turn"),
        ("tool_use", "tool_use"),
        ("max_tokens", "max_tokens"),
        ("pause_turn", "pause_turn"),
        ("refusal", "refusal"),
        ("model_context_window_exceeded", "context_exceeded"),
    ],
)
async def test_each_stop_reason_has_its_word(
    server: ModelServer, model: AnthropicModel, sent: str, expected: str
) -> None:
    server.enqueue(Reply(Text("x"), stop_reason=sent))
    assert ended(await collect(model)).stop_reason == expected


async def test_a_refusal_brings_its_details(server: ModelServer, model: AnthropicModel) -> None:
    details = {"type": "refusal", "category": "bio", "explanation": None}
    server.enqueue(Reply(stop_reason="refusal", stop_details=details))
    assert ended(await collect(model)).stop_details == details


async def test_an_unknown_stop_reason_fails_without_retry(server: ModelServer, model: AnthropicModel) -> None:
    server.enqueue(Reply(Text("x"), stop_reason="bored"))
    failed = await fails(model)
    assert (failed.code, failed.retryable) == ("request_failed", False)
    assert "bored" in failed.message


@pytest.mark.parametrize("cut_after", [0, 1, 3])
async def test_a_cut_stream_fails_as_retryable_and_keeps_the_usage(
    server: ModelServer, model: AnthropicModel, cut_after: int
) -> None:
    server.enqueue(
        Reply(Text("a text of some length"), chunk_chars=7, cut_after=cut_after, usage=Usage(input_tokens=9))
    )
    failed = await fails(model)
    assert (failed.code, failed.retryable) == ("request_failed", True)
    assert failed.usage is not None
    assert failed.usage.input_tokens == 9


@pytest.mark.parametrize(
    ("status", "kind", "code", "retryable"),
    [
        (400, "invalid_request_error", "request_failed", False),
        (400, "billing_error", "billing", False),
        (401, "authentication_error", "authentication", False),
        (402, "billing_error", "billing", False),
        (403, "permission_error", "authentication", False),
        (404, "not_found_error", "request_failed", False),
        (408, "timeout_error", "request_failed", True),
        (409, "conflict_error", "request_failed", True),
        (413, "request_too_large", "request_too_large", False),
        (418, "teapot", "request_failed", False),
        (422, "invalid_request_error", "request_failed", False),
        (429, "rate_limit_error", "rate_limited", True),
        (500, "api_error", "request_failed", True),
        (502, "api_error", "request_failed", True),
        (504, "timeout_error", "request_failed", True),
        (529, "overloaded_error", "overloaded", True),
    ],
)
async def test_each_status_has_its_failure(
    server: ModelServer, model: AnthropicModel, status: int, kind: str, code: str, retryable: bool
) -> None:
    server.enqueue(Failure(status, kind, "the reason"))
    failed = await fails(model)
    assert (failed.code, failed.retryable, failed.retry_after_ms) == (code, retryable, None)
    assert "the reason" in failed.message and str(status) in failed.message
    assert len(server.requests) == 1, "the adapter never retries"


@pytest.mark.parametrize(
    ("kind", "code", "retryable"),
    [
        ("overloaded_error", "overloaded", True),
        ("rate_limit_error", "rate_limited", True),
        ("api_error", "request_failed", True),
        ("timeout_error", "request_failed", True),
        ("billing_error", "billing", False),
        ("authentication_error", "authentication", False),
        ("invalid_request_error", "request_failed", False),
        ("request_too_large", "request_too_large", False),
        ("brand_new_error", "request_failed", True),
    ],
)
async def test_an_error_event_in_the_stream_maps_by_its_type(
    server: ModelServer, model: AnthropicModel, kind: str, code: str, retryable: bool
) -> None:
    server.enqueue(Reply(Text("so far"), error=Failure(200, kind, "the reason"), usage=Usage(input_tokens=4)))
    failed = await fails(model)
    assert (failed.code, failed.retryable) == (code, retryable)
    assert failed.usage is not None and failed.usage.input_tokens == 4


async def test_retry_after_in_seconds_is_passed_on(server: ModelServer, model: AnthropicModel) -> None:
    server.enqueue(Failure(429, "rate_limit_error", "slow down", retry_after="1.5"))
    assert (await fails(model)).retry_after_ms == 1500


async def test_x_should_retry_false_is_obeyed(server: ModelServer, model: AnthropicModel) -> None:
    server.enqueue(Failure(429, "rate_limit_error", "spent", retry_after=3, headers={"x-should-retry": "false"}))
    failed = await fails(model)
    assert (failed.retryable, failed.retry_after_ms) == (False, None)


def test_retry_after_reads_dates_and_survives_nonsense() -> None:
    now_s = 1_800_000_000.0
    assert retry_after_ms({"retry-after": formatdate(now_s + 90, usegmt=True)}, now_s=now_s) == 90_000
    for no_wish in (formatdate(now_s - 90, usegmt=True), "0", "-3", "nan"):
        assert retry_after_ms({"retry-after": no_wish}, now_s=now_s) is None
    assert retry_after_ms({"retry-after": "1e300"}, now_s=now_s) == 24 * 60 * 60 * 1000
    for nonsense in ("nan", "soon", "", "Mon, 99 Foo 2026"):
        assert retry_after_ms({"retry-after": nonsense}, now_s=now_s) is None
    assert retry_after_ms({}, now_s=now_s) is None


async def test_a_provider_that_is_not_there_fails_as_retryable() -> None:
    gone = await ModelServer.start()
    await gone.close()
    model = AnthropicModel("sk-test", gone.base_url)
    failed = await fails(model)
    assert (failed.code, failed.retryable) == ("request_failed", True)
    await model.close()


async def test_a_request_that_cannot_be_written_fails_without_retry(model: AnthropicModel) -> None:
    failed = await fails(model, ask("\ud800"))
    assert (failed.code, failed.retryable) == ("request_failed", False)


async def test_closing_the_iterator_hangs_up(server: ModelServer, model: AnthropicModel) -> None:
    server.enqueue(Reply(Text("word " * 20), stall_after=3))
    async with aclosing(model.stream(ask())) as events:
        async for event in events:
            if isinstance(event, BlockDelta):
                break
    await server.requests[0].ended.wait(5)
    assert server.requests[0].cancelled


async def test_cancelling_while_the_provider_thinks_hangs_up(server: ModelServer, model: AnthropicModel) -> None:
    gate = Gate()
    server.enqueue(Reply(Text("late"), gate=gate))
    calling = asyncio.create_task(collect(model))
    await gate.reached(10)
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    await server.requests[0].ended.wait(5)
    assert server.requests[0].cancelled


async def test_effort_and_speed_reach_the_provider(server: ModelServer, model: AnthropicModel) -> None:
    server.enqueue(Reply(Text("x")), Reply(Text("y")))
    await collect(model, ask(effort="high", speed="fast"))
    await collect(model, ask(effort="enormous", speed="standard"))
    first, second = server.requests
    assert first.body["output_config"] == {"effort": "high"}
    assert first.body["speed"] == "fast"
    assert first.headers["anthropic-beta"] == "fast-mode-2026-02-01"
    assert "output_config" not in second.body and "speed" not in second.body


async def test_the_environment_does_not_redirect_the_adapter(
    server: ModelServer, model: AnthropicModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANTHROPIC_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-from-the-environment")
    server.enqueue(Reply(Text("x")))
    await collect(model)
    headers = server.requests[0].headers
    assert "sk-test" in (headers.get("x-api-key"), headers.get("authorization", "").removeprefix("Bearer "))
    assert AnthropicModel("sk-test").base_url == "https://api.anthropic.com"


def test_importing_the_adapter_does_not_import_the_sdk() -> None:
    check = "import sys, perdure.models.anthropic, perdure.models.router; print('anthropic' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True, timeout=60)
    assert answer.stdout.strip() == "False"


@pytest.mark.parametrize(
    "events",
    [
        [{"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "x"}}],
        [{"type": "content_block_stop", "index": 3}],
        [{"type": "content_block_start", "index": [], "content_block": {"type": "text", "text": ""}}],
        [{"type": "content_block_start", "index": 0}],
        [{"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}] * 2,
        [{"type": "message_stop"}],
        [
            {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
            {"type": "message_delta", "delta": {"stop_reason": "end_turn"}},
            {"type": "message_stop"},
        ],
        [
            {"type": "content_block_start", "index": 0, "content_block": {"type": "tool_use", "input": {}}},
            {"type": "content_block_stop", "index": 0},
        ],
    ],
)
def test_a_stream_against_the_protocol_is_broken(events: list[dict[str, Any]]) -> None:
    reader = ReplyReader()
    with pytest.raises(BrokenStream):
        [out for event in events for out in reader.read(event)]


def test_arguments_sent_with_the_start_of_the_block_follow_the_same_rules() -> None:
    def close(given: Any) -> ModelEvent:
        block = {"type": "tool_use", "id": "c", "name": "n", "input": given}
        reader = ReplyReader()
        list(reader.read({"type": "content_block_start", "index": 0, "content_block": block}))
        return next(reader.read({"type": "content_block_stop", "index": 0}))

    assert close({"a": "\x00"}) == BlockClosed(0, CallBlock("c", "n", {"a": "\ufffd"}))
    assert close([1]) == BlockClosed(0, CallBlock("c", "n", None))
    assert close({"a": float("nan")}) == BlockClosed(0, CallBlock("c", "n", None))


def test_cache_writes_without_a_split_count_as_five_minutes() -> None:
    reader = ReplyReader()
    list(reader.read({"type": "message_start", "message": {"usage": {"input_tokens": 3, "output_tokens": 1}}}))
    delta = {"type": "message_delta", "delta": {}, "usage": {"cache_creation_input_tokens": 8, "output_tokens": 6}}
    list(reader.read(delta))
    assert reader.usage == Usage(input_tokens=3, output_tokens=6, cache_creation_5m_input_tokens=8)
