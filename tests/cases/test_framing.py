"""A provider's stream cut at any byte: inside a character, between CR and LF, inside an event."""

import pytest
from tests.cases.driving import Site, message

from perdure.testing.model_server import Reply, Text

CUTTING_LINE = True


@pytest.mark.case("B039")
@pytest.mark.parametrize("chunk_chars", [1, 16])
async def test_a_stream_cut_inside_characters_and_line_ends(site: Site, chunk_chars: int) -> None:
    """Elsewhere such a cut truncated an event or broke a character; here stream, deltas and list have the text exactly."""
    text = "a\u2028b\u0085c\rd\r\ne\n\nf 😀 é \u2029 \v\f\x1c end\r\n"
    session = await site.open(deltas=True)
    site.script(Reply(Text(text), chunk_chars=chunk_chars))
    await session.send(message("a\u2028b\u0085c\rd\r\ne"))
    assert await session.idle(1) == "end_turn"
    assert await session.texts() == [text]
    [spoken] = session.seen("agent.message")
    assert spoken["content"] == [{"type": "text", "text": text}]
    deltas = [d["delta"]["content"]["text"] for d in session.seen("event_delta")]
    assert "".join(deltas) == text
    [sent] = await session.listed("user.message")
    assert sent["content"][0]["text"] == "a\u2028b\u0085c\rd\r\ne"
    assert site.requests[0].body["messages"][0]["content"][0]["text"] == "a\u2028b\u0085c\rd\r\ne"
    [span] = session.seen("span.model_request_end")
    assert span["model_usage"]["output_tokens"] > 0
    await session.go_on(idles=2)
