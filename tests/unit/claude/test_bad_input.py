"""Bad requests: each is 400, names the place and the rule, and stores nothing."""

import base64
from typing import Any
from uuid import UUID

import msgspec
import pytest
from tests.unit.claude.face import Face

from perdure.domain.errors import Refused
from perdure.domain.ids import primary_thread, token
from perdure.domain.shape import Misfit
from perdure.http.claude.arrivals import EVENTS_MAX, read_arrivals
from perdure.http.claude.blocks import IMAGE_BYTES_MAX
from perdure.http.json_body import DEPTH_MAX, VALUES_MAX, decode_body

SESSION = UUID(int=1)
CALL = "sevt_" + token(UUID(int=9))
OK = {"type": "text", "text": "ok"}
PIXEL = base64.b64encode(b"\x89PNG....").decode()


@pytest.mark.rule("MA-A0.13", "MA-A0.14")
@pytest.mark.parametrize(
    ("body", "place", "rule"),
    [
        (b"", "body", "empty"),
        (b"  ", "body", "empty"),
        (b"[]", "body", "object"),
        (b'"x"', "body", "object"),
        (b"null", "body", "object"),
        (b"{", "body", "line 1"),
        (b'{"a":1}x', "body", "Extra data"),
        (b'{"a":1,}', "body", "JSON"),
        (b"\xff{}", "body", "UTF-8"),
        (b'{"a":"\xed\xa0\x80"}', "body", "UTF-8"),
        ("﻿{}".encode(), "body", "JSON"),
        ("{}".encode("utf-16"), "body", "UTF-8"),
        (b'{"a":"\x01"}', "body", "control"),
        (b'{"a":["x","\\u0000"]}', "a.1", "U+0000"),
        (b'{"a":{"b\\u0000":1}}', "a", "U+0000"),
        (b'{"a":"\\ud83d"}', "a", "surrogate"),
        (b'{"a":"\\udc00\\ud800"}', "a", "surrogate"),
        (b'{"\\ud800":1}', "body", "surrogate"),
        (b'{"a":NaN}', "body", "NaN"),
        (b'{"a":-Infinity}', "body", "Infinity"),
        (b'{"a":1e400}', "a", "64 bits"),
        (b'{"a":18446744073709551616}', "a", "64 bits"),
        (b'{"a":-9223372036854775809}', "a", "64 bits"),
        (b'{"a":' + b"9" * 100_000 + b"}", "a", "64 bits"),
        (b'{"a":{"b":1,"c":2,"b":3}}', "a.b", "twice"),
        (b'{"a":' + b"[" * DEPTH_MAX + b"]" * DEPTH_MAX + b"}", "body", "deeper"),
        (b'{"a":' + b"[" * 90_000, "body", "deeper"),
        (b'{"a":' * 90_000, "body", "deeper"),
        (b'{"a":[' + b"{}," * VALUES_MAX + b"{}]}", "body", "at most 100,000"),
        (b'{"a":[' + b'"",' * VALUES_MAX + b'""]}', "body", "at most 100,000"),
    ],
)
def test_bodies_that_two_readers_could_read_differently(body: bytes, place: str, rule: str) -> None:
    refused = decode_body(body)
    assert isinstance(refused, Refused)
    assert refused.kind == "invalid"
    assert refused.message.startswith(place + ": ")
    assert rule in refused.message
    assert refused.param == (None if place == "body" else place)


def test_bodies_at_the_limits_are_read() -> None:
    deepest = b'{"a":' + b"[" * (DEPTH_MAX - 1) + b"]" * (DEPTH_MAX - 1) + b"}"
    assert isinstance(decode_body(deepest), dict)
    assert decode_body(b'{"a":18446744073709551615,"b":-9223372036854775808,"c":"\\ud83d\\ude00"}') == {
        "a": 2**64 - 1,
        "b": -(2**63),
        "c": "😀",
    }
    prose = 'commas, "quoted"; {braces}, [brackets] and \\\\, ' * 50_000
    assert decode_body(msgspec.json.encode({"a": prose})) == {"a": prose}
    assert isinstance(decode_body(b'{"a":[' + b"1," * (VALUES_MAX - 10) + b"1]}"), dict)


def message(*blocks: Any) -> dict[str, Any]:
    return {"type": "user.message", "content": list(blocks)}


def image(**source: Any) -> dict[str, Any]:
    return {"type": "image", "source": source}


def document(**source: Any) -> dict[str, Any]:
    return {"type": "document", "source": source}


def result(*blocks: Any) -> dict[str, Any]:
    return {"type": "user.custom_tool_result", "custom_tool_use_id": CALL, "content": list(blocks)}


SEARCH = {"type": "search_result", "source": "s", "title": "t", "citations": {"enabled": True}, "content": [OK]}
SYSTEM = {"type": "system.message", "content": [OK]}
CONFIRM = {"type": "user.tool_confirmation", "tool_use_id": CALL, "result": "allow"}


@pytest.mark.rule(
    "MA-A0.9", "MA-A0.10", "MA-A0.11", "MA-A2.4", "MA-A2.5", "MA-B1.1", "MA-B1.5", "MA-B1.8", "MA-B1.9", "MA-B1.12",
    "MA-B1.13",
)  # fmt: skip
@pytest.mark.parametrize(
    ("events", "place", "rule"),
    [
        (None, "events", "array"),
        ([], "events", "empty"),
        ([message(OK)] * (EVENTS_MAX + 1), "events", "at most 1,000"),
        ([1], "events.0", "object"),
        ([None], "events.0", "null"),
        ([{}], "events.0.type", "required"),
        ([{"type": 1}], "events.0.type", "string"),
        ([{"type": "user.shout"}], "events.0.type", "no event type"),
        ([{"type": "agent.message", "content": [OK]}], "events.0.type", "server only"),
        ([{"type": "session.status_idle"}], "events.0.type", "server only"),
        ([{"type": "session.deleted"}], "events.0.type", "no event type"),
        ([{"type": "user.define_outcome", "description": "d"}], "events.0.type", "not built"),
        ([{"type": "user.tool_result", "tool_use_id": CALL}], "events.0.type", "user.custom_tool_result"),
        ([message(OK), message(OK) | {"id": "sevt_1"}], "events.1.id", "not a known field"),
        ([message(OK) | {"processed_at": None}], "events.0.processed_at", "not a known field"),
        ([{"type": "user.message"}], "events.0.content", "required"),
        ([{"type": "user.message", "content": None}], "events.0.content", "null"),
        ([{"type": "user.message", "content": "hi"}], "events.0.content", "array"),
        ([message()], "events.0.content", "empty"),
        ([message("hi")], "events.0.content.0", "object"),
        ([message({"type": "text"})], "events.0.content.0.text", "required"),
        ([message(OK, {"type": "text", "text": " \n\u200b"})], "events.0.content.1.text", "blank"),
        ([message({"type": "text", "text": None})], "events.0.content.0.text", "null"),
        ([message(OK | {"cache_control": {}})], "events.0.content.0.cache_control", "not a known field"),
        ([message({"type": "redacted"})], "events.0.content.0.type", "server only"),
        ([message({"type": "video"})], "events.0.content.0.type", "must be one of"),
        ([message(SEARCH)], "events.0.content.0.type", "must be one of text, image, document"),
        ([message({"type": "image"})], "events.0.content.0.source", "required"),
        ([message(image(type="file", file_id="file_1"))], "events.0.content.0.source", "not built"),
        ([message(document(type="file", file_id="file_1"))], "events.0.content.0.source", "not built"),
        ([message(image(type="url", url="ftp://x/y"))], "events.0.content.0.source.url", "http"),
        ([message(image(type="url", url="https://"))], "events.0.content.0.source.url", "http"),
        ([message(image(type="url", url="https://[x"))], "events.0.content.0.source.url", "http"),
        ([message(image(type="url", url="https://a b"))], "events.0.content.0.source.url", "http"),
        (
            [message(image(type="base64", media_type="image/tiff", data=PIXEL))],
            "events.0.content.0.source.media_type",
            "image/png",
        ),
        (
            [message(image(type="base64", media_type="image/png", data="a b="))],
            "events.0.content.0.source.data",
            "base64",
        ),
        (
            [message(image(type="base64", media_type="image/png", data="abc"))],
            "events.0.content.0.source.data",
            "base64",
        ),
        ([message(image(type="base64", media_type="image/png", data=""))], "events.0.content.0.source.data", "empty"),
        ([message(image(type="base64", media_type="image/png", data="é"))], "events.0.content.0.source.data", "base64"),
        (
            [message(document(type="base64", media_type="text/plain", data=PIXEL))],
            "events.0.content.0.source.media_type",
            "application/pdf",
        ),
        (
            [message(document(type="text", media_type="text/html", data="x"))],
            "events.0.content.0.source.media_type",
            "text/plain",
        ),
        ([message(document(type="text", media_type="text/plain", data=" "))], "events.0.content.0.source.data", "blank"),
        (
            [message(document(type="url", url="https://a/b") | {"title": "x" * 501})],
            "events.0.content.0.title",
            "at most 500",
        ),
        ([SYSTEM | {"content": [image(type="url", url="https://a/b")]}], "events.0.content.0.type", "one of text"),
        ([SYSTEM | {"content": [OK] * 1001}], "events.0.content", "at most 1,000"),
        ([SYSTEM | {"content": []}], "events.0.content", "empty"),
        ([message(OK), SYSTEM, message(OK), SYSTEM], "events.3", "once"),
        ([{"type": "user.interrupt", "reason": "x"}], "events.0.reason", "not a known field"),
        ([{"type": "user.interrupt", "session_thread_id": 1}], "events.0.session_thread_id", "string"),
        ([CONFIRM | {"deny_message": "x"}], "events.0.deny_message", "deny"),
        ([CONFIRM | {"result": "maybe"}], "events.0.result", "allow"),
        ([CONFIRM | {"tool_use_id": None}], "events.0.tool_use_id", "null"),
        ([{"type": "user.tool_confirmation", "result": "allow"}], "events.0.tool_use_id", "required"),
        ([CONFIRM | {"tool_use_id": "toolu_1"}], "events.0.tool_use_id", "No required action"),
        ([result() | {"content": None}], "events.0.content", "null"),
        ([result() | {"is_error": "yes"}], "events.0.is_error", "true or false"),
        ([result(SEARCH | {"citations": {}})], "events.0.content.0.citations.enabled", "required"),
        ([result(SEARCH | {"content": []})], "events.0.content.0.content", "empty"),
    ],
)  # fmt: skip
def test_bad_events(events: Any, place: str, rule: str) -> None:
    with pytest.raises(Misfit) as raised:
        read_arrivals(events, SESSION)
    refused = raised.value.refused
    assert refused.message.startswith(place + ": ")
    assert rule in refused.message
    assert (refused.kind in ("invalid", "unsupported"), refused.param) == (True, place)


def test_an_image_over_its_limit_is_refused_by_its_decoded_size() -> None:
    fits = base64.b64encode(b"x" * IMAGE_BYTES_MAX).decode()
    read_arrivals([message(image(type="base64", media_type="image/png", data=fits))], SESSION)
    for size in (IMAGE_BYTES_MAX + 1, IMAGE_BYTES_MAX * 2):
        over = base64.b64encode(b"x" * size).decode()
        with pytest.raises(Misfit, match="at most 5,242,880 bytes"):
            read_arrivals([message(image(type="base64", media_type="image/png", data=over))], SESSION)


@pytest.mark.rule("MA-B1.1", "MA-B1.7", "MA-B1.9", "MA-B1.11")
def test_good_events_come_out_in_canonical_form() -> None:
    blocks = [
        OK,
        image(type="base64", media_type="image/png", data=PIXEL),
        image(type="url", url="https://a/b.png?c=d"),
        document(type="text", media_type="text/plain", data="x") | {"title": "t", "context": None},
        document(type="base64", media_type="application/pdf", data=PIXEL),
        document(type="url", url="http://a/b.pdf"),
    ]
    thread = "sthr_" + token(primary_thread(SESSION))
    arrivals = read_arrivals(
        [
            {"type": "user.interrupt", "session_thread_id": thread},
            message(*blocks),
            CONFIRM | {"result": "deny", "deny_message": "no", "session_thread_id": thread},
            result(SEARCH, {"type": "text", "text": ""}) | {"is_error": None},
            {"type": "user.custom_tool_result", "custom_tool_use_id": CALL},
            SYSTEM,
        ],
        SESSION,
    )
    assert [a.kind for a in arrivals] == [
        "interrupt",
        "message",
        "confirmation",
        "custom_result",
        "custom_result",
        "system",
    ]
    assert arrivals[0].body == f'{{"session_thread_id":"{thread}"}}'.encode()
    assert b'"title":"t"' in arrivals[1].body
    assert b"context" not in arrivals[1].body
    assert (arrivals[2].body, arrivals[2].answer) == (b'{"result":"deny","deny_message":"no"}', "deny")
    assert (arrivals[2].action_id, arrivals[2].reference) == (UUID(int=9), CALL)
    assert arrivals[4].body == b'{"content":[],"is_error":false}'
    assert [a.param for a in arrivals][3:] == ["events.3.custom_tool_use_id", "events.4.custom_tool_use_id", "events.5"]


@pytest.mark.rule("MA-A0.11", "MA-A0.10", "MA-A1.13", "MA-F4")
@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"colour": 1}, "colour"),
        ({"agent": 1}, "agent"),
        ({"agent": None}, "agent"),
        ({"agent": {"type": "agent"}}, "agent.id"),
        ({"agent": {"type": "robot", "id": "agent_1"}}, "agent.type"),
        ({"agent": {"type": "agent", "id": "agent_1", "version": 0}}, "agent.version"),
        ({"agent": {"type": "agent", "id": "agent_1", "system": "s"}}, "agent.system"),
        ({"agent": {"type": "agent_with_overrides", "id": "agent_1", "name": "n"}}, "agent.name"),
        ({"environment_id": None}, "environment_id"),
        ({"title": 1}, "title"),
        ({"title": "x" * 501}, "title"),
        ({"metadata": None}, "metadata"),
        ({"metadata": []}, "metadata"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {"a": "x" * 513}}, "metadata.a"),
        ({"metadata": {"k" * 65: "v"}}, "metadata"),
        ({"metadata": {str(i): "v" for i in range(17)}}, "metadata"),
        ({"initial_events": None}, "initial_events"),
    ],
)
async def test_bad_creates(face: Face, fields: dict[str, Any], place: str) -> None:
    body = {"agent": "agent_1", "environment_id": "env_1", **fields}
    error = await face.refused("POST", "/v1/sessions", body)
    assert (error["status"], error["type"]) == (400, "invalid_request_error")
    assert error["message"].startswith(place + ": ")
    assert error["details"]["param"] == place


@pytest.mark.rule("MA-A0.13")
async def test_bodies_are_read_strictly_on_each_route_that_has_one(face: Face) -> None:
    session = await face.session()
    for target in ("/v1/sessions", f"/v1/sessions/{session}", f"/v1/sessions/{session}/events"):
        for body in (b"", b"[]", b'{"a":1,"a":2}', b"\xff"):
            assert (await face.refused("POST", target, body))["status"] == 400
    assert (await face.call("POST", f"/v1/sessions/{session}/archive", b"\xff not read"))[0] == 200
    assert (await face.call("DELETE", f"/v1/sessions/{session}", b"not read"))[0] == 200
