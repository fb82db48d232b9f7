"""A Messages history as a small chat model can read it: plain text, and no more of it than fits."""

from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeAlias, cast

Json: TypeAlias = dict[str, Any]
Chat: TypeAlias = list[dict[str, str]]
CountTokens: TypeAlias = Callable[[Chat], Awaitable[int]]

# The oldest messages go in steps of this many, so that the start of the prompt, and with it the cached part, stays the
# same for several turns.
DROP_STEP: Final = 8

# Real text has more tokens than one for so many characters. It spares counting what can't fit; where it errs, it drops
# a little more than it had to.
CHARS_PER_TOKEN_MAX: Final = 12

# Instructions written for large models would fill the whole context of a small one.
SYSTEM_CHARS_MAX: Final = 3_000

# Ends every system text. Without it the first word of an answer is a toss-up between languages, whatever the question's.
GUIDANCE: Final = "You answer questions in plain English, briefly and correctly."

NO_TEXT: Final = "(no text)"
SHORTENED: Final = "\n[... shortened ...]\n"


def chat_of(system: str | None, messages: list[Json]) -> Chat:
    """The history as plain text, neighbours of one role joined. What the model can't perceive becomes a note."""
    own = shorten((system or "").strip(), SYSTEM_CHARS_MAX)
    chat: Chat = [{"role": "system", "content": f"{own}\n\n{GUIDANCE}".strip()}]
    for message in messages:
        role, text = str(message.get("role")), _text_of(message.get("content"))
        if not text:
            continue
        if chat and chat[-1]["role"] == role:
            chat[-1]["content"] += "\n\n" + text
        else:
            chat.append({"role": role, "content": text})
    return chat


async def fit(chat: Chat, tokens_max: int, count_tokens: CountTokens) -> tuple[Chat, int]:
    """The newest part of `chat` within `tokens_max`, and its tokens.

    The system text and what begins with the last user message always stay; what is long of it is shortened if it must.
    """
    system = [message for message in chat if message["role"] == "system"]
    talk = chat[len(system) :] or [{"role": "user", "content": NO_TEXT}]
    users = [at for at, message in enumerate(talk) if message["role"] == "user"]
    last = users[-1] if users else len(talk) - 1
    chars_max = tokens_max * CHARS_PER_TOKEN_MAX
    dropped = _surely_too_many(talk, chars_max)
    while True:
        kept = [*system, *talk[min(dropped, last) :]]
        if sum(len(message["content"]) for message in kept) <= chars_max:
            tokens = await count_tokens(kept)
            if tokens <= tokens_max:
                return kept, tokens
        if dropped >= last:
            return await _shorten(kept, tokens_max, count_tokens)
        dropped += DROP_STEP


async def _shorten(chat: Chat, tokens_max: int, count_tokens: CountTokens) -> tuple[Chat, int]:
    """Cut the middle out of every message longer than a bound, which sinks until everything fits."""
    chars = tokens_max * CHARS_PER_TOKEN_MAX
    while True:
        chars = chars * 3 // 4
        shorter = [{**message, "content": shorten(message["content"], chars)} for message in chat]
        tokens = await count_tokens(shorter)
        if tokens <= tokens_max or chars == 0:
            return shorter, tokens


def shorten(text: str, chars_max: int) -> str:
    """The start and the end of `text` when it is longer than `chars_max`."""
    if len(text) <= chars_max:
        return text
    half = chars_max // 2
    return text[:half] + SHORTENED + text[len(text) - half :]


def _surely_too_many(talk: Chat, chars_max: int) -> int:
    """How many of the oldest messages can't fit by their length alone, in whole steps."""
    chars = 0
    for at in range(len(talk) - 1, -1, -1):
        chars += len(talk[at]["content"])
        if chars > chars_max:
            return -(-(at + 1) // DROP_STEP) * DROP_STEP
    return 0


def _text_of(content: object) -> str:
    if isinstance(content, str):
        return content.strip()
    if not isinstance(content, list):
        return ""
    parts = (_block_text(block) for block in cast("list[Json]", content))
    return "\n".join(part for part in parts if part)


def _block_text(block: Json) -> str:
    match block.get("type"):
        case "text":
            return str(block.get("text", "")).strip()
        case "image":
            return "[An image was attached. You can't see it.]"
        case "document":
            title = block.get("title")
            return f"[A document was attached{f': {title}' if title else ''}. You can't read it.]"
        case "tool_use":
            return f"[Called the tool {block.get('name')}.]"
        case "tool_result":
            return f"[Result of a tool: {_text_of(block.get('content')) or 'nothing'}]"
        case _:
            return ""
