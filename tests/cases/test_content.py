"""Hostile and oversized content, with real tools: refused at the door with its place, or made harmless once at the border."""

import base64
import json
import time

import pytest
from tests.cases.driving import (
    TOOLSET,
    Driven,
    Json,
    Site,
    custom_tool,
    history,
    message,
    result_of,
    results_in,
    text_of,
)

from perdure.testing.model_server import Call, Reply, Text, Thinking

NORMAL_S = 10.0
"""A turn with a big result takes no longer; a small one takes a few hundredths."""


def image(size_bytes: int) -> Json:
    """A block that claims to be a JPEG of so many bytes."""
    data = base64.b64encode(b"\xff\xd8\xff\xe0" + bytes(size_bytes - 4)).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": "image/jpeg", "data": data}}


def bash(command: str) -> Call:
    """A call of the real shell."""
    return Call("bash", {"command": command})


async def run(session: Driven, *calls: Call, idles: int) -> list[str]:
    """One turn that makes these calls and then says so; the results as the model got them."""
    site = session.site
    site.script(Reply(*calls), Reply(Text("ran")))
    await session.send(message("run it"))
    assert await session.idle(idles, 60) == "end_turn"
    answers = site.requests[-1].body["messages"][-1]["content"]
    assert [b["type"] for b in answers] == ["tool_result"] * len(calls)
    shown = [text_of(e) for e in await session.listed("agent.tool_result")][-len(calls) :]
    assert sorted(shown) == sorted(text_of(b) for b in answers)
    return [text_of(b) for b in answers]


@pytest.mark.case("B003")
async def test_an_image_above_the_limit_of_the_provider(site: Site) -> None:
    """Elsewhere an image of 6.2 MB got into the history and every later request was refused; here it is refused at the door."""
    session = await site.open()
    caption = {"type": "text", "text": "what is this?"}
    error = await session.refuse(
        "invalid_request_error", {"type": "user.message", "content": [caption, image(6_200_000)]}
    )
    assert "events.0.content.1.source.data" in error["message"]
    assert "5,242,880" in error["message"]
    assert site.requests == []
    site.script(Reply(Text("hello")), Reply(Text("a photo")))
    await session.send(message("hello"))
    assert await session.idle(1) == "end_turn"
    await session.send({"type": "user.message", "content": [image(200_000)]})
    assert await session.idle(2) == "end_turn"
    await session.go_on(idles=3)


@pytest.mark.case("B003")
async def test_an_image_above_the_limit_as_result_of_a_tool(site: Site) -> None:
    """The same at the other doors: a client's result is refused, a file that is too large is an error result."""
    session = await site.open(TOOLSET, custom_tool("photo"))
    site.script(Reply(Call("photo")))
    await session.send(message("take a photo"))
    [action] = (await session.frame("session.status_idle"))["stop_reason"]["event_ids"]
    large = {"type": "user.custom_tool_result", "custom_tool_use_id": action, "content": [image(6_200_000)]}
    error = await session.refuse("invalid_request_error", large)
    assert "events.0.content.0.source.data" in error["message"]
    make = bash("head -c 6200000 /dev/zero > big.png && printf '\\x89PNG\\r\\n\\x1a\\n' | dd of=big.png conv=notrunc")
    site.script(Reply(make), Reply(Call("read", {"file_path": "big.png"})), Reply(Text("too large")))
    await session.send(result_of(action, "no photo"))
    assert await session.idle(2) == "end_turn"
    assert (await session.listed("agent.tool_result"))[-1]["is_error"]
    await session.go_on(idles=3)


SEPARATORS = "a\u2028b\u0085c\rd\r\ne\n\nf"


@pytest.mark.case("B039")
async def test_line_separators_in_output_of_a_tool(site: Site) -> None:
    """Elsewhere a separator inside the JSON ended the event; here stream and list have the output byte for byte."""
    session = await site.open(TOOLSET)
    [text] = await run(session, bash(r"printf 'a\xe2\x80\xa8b\xc2\x85c\rd\r\ne\n\nf'"), idles=1)
    assert text == SEPARATORS
    [streamed] = session.seen("agent.tool_result")
    assert text_of(streamed) == SEPARATORS
    await session.go_on(idles=2)
    async with site.client() as client:
        page = await client.beta.sessions.events.list(session.id)
        [listed] = [event async for event in page if event.type == "agent.tool_result"]
        assert listed.content is not None
        assert [block.to_dict() for block in listed.content] == [{"type": "text", "text": SEPARATORS}]


@pytest.mark.case("B040")
async def test_nul_in_a_message_and_in_output(site: Site) -> None:
    """Elsewhere U+0000 broke the database inside the turn; here input is refused with its path and output has U+FFFD."""
    session = await site.open(TOOLSET, custom_tool("ask"))
    first = await session.post(message("buy\0milk"), headers={"Idempotency-Key": "nul"})
    again = await session.post(message("buy\0milk"), headers={"Idempotency-Key": "nul", "x-stainless-retry-count": "1"})
    assert (first.status_code, again.status_code) == (400, 400)
    assert first.json()["error"] == again.json()["error"]
    assert "events.0.content.0.text" in first.json()["error"]["message"]
    assert await session.listed() == []
    assert await run(session, bash(r"printf 'a\0b'"), idles=1) == ["a\ufffdb"]
    assert text_of(session.seen("agent.tool_result")[0]) == "a\ufffdb"
    site.script(Reply(Text("say \0 it"), Call("ask", {"a\0b": "c\0d"})))
    await session.send(message("use the client's tool"))
    [asked] = await session.until(lambda _: session.seen("agent.custom_tool_use"))
    assert asked["input"] == {"a\ufffdb": "c\ufffdd"}
    assert (await session.texts())[-1] == "say \ufffd it"
    error = await session.refuse("invalid_request_error", result_of(asked["id"], "x\0"))
    assert "events.0.content.0.text" in error["message"]
    site.script(Reply(Text("ok")))
    await session.send(result_of(asked["id"], "x"))
    assert await session.idle(3) == "end_turn"
    await session.go_on(idles=4)


@pytest.mark.case("B041")
async def test_lone_surrogates_from_tools_and_model(site: Site) -> None:
    """Elsewhere half a character stopped every later save; here it is U+FFFD once, and whole characters stay."""
    session = await site.open(TOOLSET, custom_tool("ask"))
    names = bash("touch \"$(printf 'bad\\xff.txt')\" 'emoji 😀.txt' && ls | cat")
    half, listed = await run(session, bash(r"printf 'ok \xed\xa0\xbd end 😀'"), names, idles=1)
    [globbed] = await run(session, Call("glob", {"pattern": "*.txt"}), idles=2)
    assert half.startswith("ok \ufffd")
    assert half.endswith(" end 😀")
    assert "bad\ufffd.txt" in listed
    assert "emoji 😀.txt" in listed
    assert "emoji 😀.txt" in globbed
    assert "bad\ufffd.txt" in globbed
    thought = Thinking("half \ud83d thought")
    arguments = '{"key \\ud83d": "value \\udc00", "pair": "\\ud83d\\ude00"}'
    site.script(Reply(thought, Text("half \ud83d text 😀"), Call("ask", arguments)))
    await session.send(message("use the client's tool"))
    [asked] = await session.until(lambda _: session.seen("agent.custom_tool_use"))
    assert asked["input"] == {"key \ufffd": "value \ufffd", "pair": "😀"}
    assert (await session.texts())[-1] == "half \ufffd text 😀"
    site.script(Reply(Text("ok")))
    await session.send(result_of(asked["id"], "whole 😀"))
    assert await session.idle(4) == "end_turn"
    await session.go_on(idles=5)
    site.requests[-1].raw.decode()
    assert not [b for b in history(site.requests[-1]) if b["type"] == "thinking"]


@pytest.mark.case("B041")
@pytest.mark.parametrize(
    ("events", "place"),
    [
        (r'[{"type":"user.message","content":[{"type":"text","text":"x \ud83d"}]}]', "events.0.content.0.text"),
        (r'[{"type":"user.message","content":[{"type":"text","text":"x","\udc00":1}]}]', "events.0.content.0"),
    ],
)
async def test_lone_surrogates_from_a_client(site: Site, events: str, place: str) -> None:
    """From a client they are refused with their path, in values and in keys."""
    session = await site.open()
    body = f'{{"events":{events}}}'
    answered = await session.http.post(
        session.path + "/events", content=body, headers={"content-type": "application/json"}
    )
    assert answered.status_code == 400
    assert place in answered.json()["error"]["message"]
    await session.go_on(idles=1)


@pytest.mark.case("B042")
async def test_results_larger_than_any_limit(site: Site) -> None:
    """Elsewhere a big result was retried for ever; here each ends at once, cut or kept in a file, and says so."""
    session = await site.open(TOOLSET)
    idles = 0
    for size in (1_900_000, 2_100_000, 4_200_000, 12_000_000):
        began = time.monotonic()
        idles += 2
        command = f"head -c {size} /dev/zero | tr '\\0' x > big.txt; cat big.txt; echo; echo the end"
        [printed] = await run(session, bash(command), idles=idles - 1)
        [read] = await run(session, Call("read", {"file_path": "big.txt"}), idles=idles)
        assert time.monotonic() - began < NORMAL_S
        assert "bytes of output were dropped" in printed
        assert printed.endswith("the end")
        assert len(printed) < 110_000
        assert "view_range" in read
    await session.go_on(idles=idles + 1)


@pytest.mark.case("B042")
async def test_thirty_big_results_in_one_turn(site: Site) -> None:
    """Thirty results of 400 KB: each is a file and a preview, the turn ends, the request stays small."""
    session = await site.open(TOOLSET)
    began = time.monotonic()
    calls = [bash(f"head -c 400000 /dev/zero | tr '\\0' {chr(ord('a') + n % 26)}") for n in range(30)]
    results = await run(session, *calls, idles=1)
    assert time.monotonic() - began < 2 * NORMAL_S
    assert all("dropped" in result or "left out" in result for result in results)
    assert len(site.requests[-1].raw) < 4_000_000
    await session.go_on(idles=2)


@pytest.mark.case("B042")
async def test_messages_of_ten_and_of_forty_megabytes(site: Site) -> None:
    """What is above the limit of a request is refused before any write; what is below is answered."""
    session = await site.open()
    answered = await session.post(message("x" * 40_000_000))
    assert answered.status_code == 413
    assert await session.listed() == []
    site.script(Reply(Text("long")))
    await session.send(message("x" * 10_000_000))
    assert await session.idle(1, 30) == "end_turn"
    await session.go_on(idles=2)


@pytest.mark.case("B043")
async def test_deep_nesting(site: Site) -> None:
    """Elsewhere depth became a 500 or killed the process; here it is 400 at the door, and an invalid call from the model."""
    session = await site.open(TOOLSET, custom_tool("ask"))
    path = session.path + "/events"
    for body in ("[" * 25_000 + "]" * 25_000, '{"events":' + "[" * 25_000 + "]" * 25_000 + "}", '{"a":' * 25_000):
        answered = await session.http.post(path, content=body, headers={"content-type": "application/json"})
        assert answered.status_code == 400
    site.script(Reply(Call("ask")))
    await session.send(message("ask"))
    [action] = (await session.frame("session.status_idle"))["stop_reason"]["event_ids"]
    deep = '{"type":"search_result","content":[' * 600 + "]}" * 600
    result = f'{{"type":"user.custom_tool_result","custom_tool_use_id":"{action}","content":[{deep}]}}'
    answered = await session.http.post(
        path, content=f'{{"events":[{result}]}}', headers={"content-type": "application/json"}
    )
    assert answered.status_code == 400
    assert "64 levels" in answered.json()["error"]["message"]
    arguments = '{"file_path":"deep.txt","content":' + "[" * 5_000 + "]" * 5_000 + "}"
    site.script(Reply(Call("write", arguments)), Reply(Text("I see")))
    await session.send(result_of(action, "shallow"))
    assert await session.idle(2) == "end_turn"
    [refused] = await session.listed("agent.tool_result")
    assert refused["is_error"]
    assert (await session.http.get("/healthz")).status_code == 200
    other = await site.open()
    await other.go_on(idles=1)
    await session.go_on(idles=3)
    assert len(json.dumps(results_in(site.requests[-1]))) < 10_000
