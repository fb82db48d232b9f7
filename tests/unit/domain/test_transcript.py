"""The model's history as a provider takes it."""

from typing import Any

import msgspec
import pytest
from tests.unit.domain.rows import an_entry

from perdure.domain.transcript import (
    AMBIGUOUS_TEXT,
    OMITTED_TEXT,
    STOPPED_TEXT,
    build_messages,
    is_blank_text,
    running_text,
    text_result,
    tool_result,
    unanswered_text,
    unstarted_text,
)
from perdure.testing.small_model import check_messages


def said(text: str) -> bytes:
    return msgspec.json.encode({"content": [{"type": "text", "text": text}]})


def reply(*blocks: dict[str, Any]) -> bytes:
    return msgspec.json.encode(list(blocks))


TEXT = {"type": "text", "text": "hi"}
THINKING = {"type": "thinking", "thinking": "hm", "signature": "0xAB/+="}


def call(identity: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": identity, "name": "bash", "input": {}}


def test_an_exchange() -> None:
    entries = [an_entry(1, "input", ref_body=said("one")), an_entry(2, "model", body=reply(TEXT))]
    assert build_messages(entries) == [
        {"role": "user", "content": [{"type": "text", "text": "one"}]},
        {"role": "assistant", "content": [TEXT]},
    ]


@pytest.mark.rule("MA-C5.1")
def test_results_open_the_message_behind_their_calls() -> None:
    messages = build_messages(
        [
            an_entry(1, "input", ref_body=said("one")),
            an_entry(2, "model", body=reply(TEXT, call("a"), call("b"))),
            an_entry(2, "result", position=1, body=text_result("a", "done", is_error=False)),
            an_entry(2, "result", position=2, body=text_result("b", "lost", is_error=True)),
            an_entry(3, "system", ref_body=said("be brief")),
            an_entry(4, "input", ref_body=said("two")),
        ]
    )
    assert check_messages(messages) == []
    assert [b["type"] for b in messages[2]["content"]] == ["tool_result", "tool_result", "text", "text"]
    assert messages[2]["content"][1]["is_error"] is True


@pytest.mark.rule("MA-C5.5")
def test_answers_and_results_stand_in_call_order() -> None:
    entries = [
        an_entry(1, "input", ref_body=said("one")),
        an_entry(2, "model", body=reply(call("a"), call("b"), call("c"))),
        an_entry(2, "denial", position=1, body=b'"a"', ref_body=b'{"result":"deny","deny_message":"no"}'),
        an_entry(2, "answer", position=2, body=b'"b"', ref_body=said("42")),
        an_entry(2, "result", position=3, body=text_result("c", "ok", is_error=False)),
    ]
    blocks = build_messages(entries)[2]["content"]
    assert [b["tool_use_id"] for b in blocks] == ["a", "b", "c"]


@pytest.mark.rule("MA-D2.4")
@pytest.mark.parametrize(
    ("message", "words"), [("too risky", "The user denied this call: too risky"), (None, "The user denied this call.")]
)
def test_a_denial_says_why(message: str | None, words: str) -> None:
    body = msgspec.json.encode({"result": "deny", "deny_message": message})
    entries = [
        an_entry(1, "input", ref_body=said("one")),
        an_entry(2, "model", body=reply(call("a"))),
        an_entry(2, "denial", position=1, body=b'"a"', ref_body=body),
    ]
    result = build_messages(entries)[2]["content"][0]
    assert result["is_error"] is True
    assert result["content"] == [{"type": "text", "text": words}]


@pytest.mark.rule("MA-C5.3")
def test_what_the_provider_signed_goes_back_unchanged() -> None:
    entries = [an_entry(1, "input", ref_body=said("one")), an_entry(2, "model", body=reply(THINKING, TEXT))]
    assert build_messages(entries)[1]["content"] == [THINKING, TEXT]


@pytest.mark.rule("MA-C5.2")
def test_neighbours_of_one_role_are_one_message() -> None:
    entries = [
        an_entry(1, "input", ref_body=said("one")),
        an_entry(2, "input", ref_body=said("two")),
        an_entry(3, "model", body=reply(TEXT)),
        an_entry(4, "model", body=reply(TEXT)),
        an_entry(5, "note", body=b'"go on"'),
    ]
    assert [(m["role"], len(m["content"])) for m in build_messages(entries)] == [
        ("user", 2),
        ("assistant", 2),
        ("user", 1),
    ]


def test_a_history_begins_with_the_user() -> None:
    entries = [an_entry(1, "model", body=reply(TEXT)), an_entry(2, "input", ref_body=said("one"))]
    assert [m["role"] for m in build_messages(entries)] == ["user"]


@pytest.mark.parametrize("text", ["", " ", "\n\t", "\u200b", " \ufeff\u2060"])
def test_a_blank_message_is_said_to_be_one(text: str) -> None:
    assert is_blank_text(text)
    blocks = build_messages([an_entry(1, "input", ref_body=said(text))])[0]["content"]
    assert blocks == [{"type": "text", "text": OMITTED_TEXT}]


def test_blank_results_are_left_out() -> None:
    assert b"content" not in tool_result("a", [{"type": "text", "text": " "}], is_error=False)
    assert not is_blank_text(" x ")


def test_system_messages_are_marked_as_such() -> None:
    entries = [an_entry(1, "input", ref_body=said("one")), an_entry(2, "system", ref_body=said("be brief"))]
    assert "<system-message>\nbe brief\n</system-message>" in build_messages(entries)[0]["content"][1]["text"]


@pytest.mark.rule("MA-C8.5")
@pytest.mark.parametrize(
    ("ending", "cause"),
    [
        ("interrupted", "The user interrupted"),
        ("archived", "The session was archived"),
        ("deleted", "The session was deleted"),
        ("failed", "The turn ended with an error"),
        ("cancelled", "The turn was cancelled"),
        ("completed", "The turn ended"),
        ("refused", "The turn ended"),
    ],
)
def test_a_call_that_is_closed_with_its_turn_names_what_ended_it(ending: Any, cause: str) -> None:
    texts = [unstarted_text(ending), unanswered_text(ending, answered=False), unanswered_text(ending, answered=True)]
    assert all(text.startswith(cause) for text in texts)
    assert len(set(texts)) == len(texts)
    assert running_text(ending) == (STOPPED_TEXT if ending == "interrupted" else AMBIGUOUS_TEXT)
