"""The scripted model: every directive, and how it reads its progress from the messages."""

import asyncio
from typing import Any

import pytest

from perdure.models.scripted import ScriptedModel
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
    Progress,
    TextBlock,
    ThinkingBlock,
)

Json = dict[str, Any]


def user(text: str) -> Json:
    return {"role": "user", "content": [{"type": "text", "text": text}]}


def called(*calls: tuple[str, str]) -> Json:
    blocks: list[Json] = [{"type": "tool_use", "id": call, "name": name, "input": {}} for call, name in calls]
    return {"role": "assistant", "content": blocks}


def results(*answers: tuple[str, str, bool]) -> Json:
    blocks = [
        {"type": "tool_result", "tool_use_id": call, "content": [{"type": "text", "text": text}], "is_error": is_error}
        for call, text, is_error in answers
    ]
    return {"role": "user", "content": blocks}


async def play(*messages: Json) -> list[ModelEvent]:
    request = ModelRequest(model="demo", system=None, messages=list(messages), tools=[], max_tokens=100)
    async with asyncio.timeout(10):
        return [event async for event in ScriptedModel().stream(request)]


def blocks(events: list[ModelEvent]) -> list[ModelBlock]:
    return [event.block for event in events if isinstance(event, BlockClosed)]


def stop_of(events: list[ModelEvent]) -> str:
    last = events[-1]
    assert isinstance(last, Ended)
    return last.stop_reason


async def test_without_directives_it_echoes_word_by_word() -> None:
    events = await play(user("hello there"))
    assert events[1] == BlockOpened(0, "text")
    assert [event.text for event in events if isinstance(event, BlockDelta)] == ["You", " said:", " hello", " there"]
    assert blocks(events) == [TextBlock("You said: hello there")]
    assert stop_of(events) == "end_turn"


async def test_a_plain_string_is_read_like_a_text_block() -> None:
    assert blocks(await play({"role": "user", "content": "hi"})) == [TextBlock("You said: hi")]


async def test_the_same_request_gets_the_same_reply() -> None:
    text = user('[[think: a]] [[say: b]] [[call: bash {"c": 1}]]')
    assert await play(text) == await play(text)


async def test_say_think_and_several_calls_make_one_reply() -> None:
    events = await play(
        user(
            "Please\n[[think: let me see]]\n[[say: Looking.]] and "
            '[[call: bash {"command": "ls [[a]]", "deep": [[1]]}]][[call: read {"path": "x"}]]'
        )
    )
    assert blocks(events) == [
        ThinkingBlock({"type": "thinking", "thinking": "let me see"}, signed=False),
        TextBlock("Looking."),
        CallBlock("toolu_scripted_000000", "bash", {"command": "ls [[a]]", "deep": [[1]]}),
        CallBlock("toolu_scripted_000001", "read", {"path": "x"}),
    ]
    assert stop_of(events) == "tool_use"


async def test_slow_text_comes_word_by_word() -> None:
    events = await play(user("[[slow: one two three @ 1ms]]"))
    assert [event.text for event in events if isinstance(event, BlockDelta)] == ["one", " two", " three"]
    assert blocks(events) == [TextBlock("one two three")]


async def test_an_address_in_slow_text_is_not_a_pause() -> None:
    assert blocks(await play(user("[[slow: a@b]]"))) == [TextBlock("a@b")]


async def test_results_are_summed_up_when_nothing_is_left_to_do() -> None:
    events = await play(
        user('[[call: bash {"command": "ls"}]] [[call: read {"path": "x"}]]'),
        called(("c1", "bash"), ("c2", "read")),
        results(("c1", "a.txt\nb.txt", False), ("c2", "no such file", True)),
    )
    assert blocks(events) == [TextBlock("bash answered: a.txt b.txt\nread failed: no such file")]
    assert stop_of(events) == "end_turn"


async def test_long_results_are_shortened_in_the_summary() -> None:
    block = blocks(await play(user("[[call: a {}]]"), called(("c1", "a")), results(("c1", "x" * 999, False))))[0]
    assert isinstance(block, TextBlock)
    assert len(block.text) < 250


async def test_then_divides_a_script_into_rounds() -> None:
    script = user("[[call: a {}]] [[then]] [[call: b {}]] [[then]] [[say: done]]")
    first = [script]
    second = [*first, called(("c1", "a")), results(("c1", "1", False))]
    third = [*second, called(("c2", "b")), results(("c2", "2", False))]
    assert blocks(await play(*first)) == [CallBlock("toolu_scripted_000000", "a", {})]
    assert blocks(await play(*second)) == [CallBlock("toolu_scripted_000001", "b", {})]
    assert blocks(await play(*third)) == [TextBlock("done")]


async def test_what_was_asked_before_an_interrupt_is_not_asked_again() -> None:
    """Both texts are in one message then, since nothing was answered in between; so is what the system said last."""
    texts = ["[[say: old]]", "new", "<system-message>\nbe brief\n</system-message>"]
    message = {"role": "user", "content": [{"type": "text", "text": text} for text in texts]}
    assert blocks(await play(message)) == [TextBlock("You said: new")]


async def test_a_new_text_starts_a_new_script() -> None:
    before = [user("[[call: a {}]]"), called(("c1", "a")), results(("c1", "1", False))]
    assert blocks(await play(*before, user("[[call: b {}]]"))) == [CallBlock("toolu_scripted_000001", "b", {})]
    steered = {"role": "user", "content": [*before[2]["content"], {"type": "text", "text": "[[say: steered]]"}]}
    assert blocks(await play(*before[:2], steered)) == [TextBlock("steered")]


@pytest.mark.parametrize(
    ("directive", "code", "retryable", "retry_after_ms"),
    [
        ("[[fail: overloaded]]", "overloaded", True, None),
        ("[[fail: rate_limited 2s]]", "rate_limited", True, 2000),
        ("[[fail: request_failed]]", "request_failed", True, None),
        ("[[fail: request_too_large]]", "request_too_large", False, None),
        ("[[fail: billing]]", "billing", False, None),
        ("[[fail: authentication]]", "authentication", False, None),
    ],
)
async def test_failures_are_raised_as_asked(
    directive: str, code: str, retryable: bool, retry_after_ms: int | None
) -> None:
    with pytest.raises(ModelFailed) as caught:
        await play(user(f"[[say: so far]] {directive}"))
    failed = caught.value
    assert (failed.code, failed.retryable, failed.retry_after_ms) == (code, retryable, retry_after_ms)
    assert failed.usage is not None and failed.usage.output_tokens == 2


async def test_refuse_and_stop_end_the_reply() -> None:
    assert stop_of(await play(user("[[refuse]] [[say: never]]"))) == "refusal"
    events = await play(user("[[say: cut]] [[stop: max_tokens]]"))
    assert (blocks(events), stop_of(events)) == ([TextBlock("cut")], "max_tokens")


async def test_wait_is_silence_and_then_progress() -> None:
    events = await play(user("[[wait: 5ms]] [[say: later]]"))
    assert events[:2] == [Progress(), Progress()]
    assert blocks(events) == [TextBlock("later")]


async def test_broken_arguments_stay_broken() -> None:
    assert blocks(await play(user('[[call: bash {"command": ]]'))) == [CallBlock("toolu_scripted_000000", "bash", None)]
    assert blocks(await play(user("[[call: bash [1]]]"))) == [CallBlock("toolu_scripted_000000", "bash", None)]
    assert blocks(await play(user("[[call: bash]]"))) == [CallBlock("toolu_scripted_000000", "bash", {})]


@pytest.mark.parametrize("text", ["[[wait: soon]]", "[[fail: badly]]", "[[stop: now]]", "[[call: ]]", "[[say: open"])
async def test_a_directive_that_cannot_be_read_says_so(text: str) -> None:
    block = blocks(await play(user(text)))[0]
    assert isinstance(block, TextBlock)
    assert block.text.startswith("I can't read")


async def test_usage_counts_words() -> None:
    events = await play(user("one two three [[say: four five]]"))
    last = events[-1]
    assert isinstance(last, Ended)
    assert (last.usage.input_tokens, last.usage.output_tokens) == (6, 2)
