"""Content blocks that clients send: each is checked and comes back in the canonical form that the ledger keeps."""

import binascii
from collections.abc import Collection
from typing import Any, Final
from urllib.parse import urlsplit

from perdure.domain.shape import Misfit, join, read_array, read_choice, read_flag, read_object, read_text, unsupported
from perdure.domain.transcript import is_blank_text

IMAGE_BYTES_MAX: Final = 5 * 1024 * 1024
"""Decoded. Providers refuse larger ones, and would do so in the middle of a turn."""

IMAGE_TYPES: Final = ("image/png", "image/jpeg", "image/gif", "image/webp")
PDF_TYPE: Final = "application/pdf"
TEXT_TYPE: Final = "text/plain"
URL_CHARS_MAX: Final = 8_192
DOCUMENT_TITLE_CHARS_MAX: Final = 500
"""The provider's own limit."""

BLOCKS_MAX: Final = 1_000
SYSTEM_ITEMS_MAX: Final = 1_000

MESSAGE_BLOCKS: Final = ("text", "image", "document")
RESULT_BLOCKS: Final = ("text", "image", "document", "search_result")
SYSTEM_BLOCKS: Final = ("text",)

Block = dict[str, Any]


def read_blocks(
    value: Any, path: str, kinds: Collection[str], *, least: int, most: int = BLOCKS_MAX, blank: bool = False
) -> list[Block]:
    """Blocks of the given kinds. With `blank`, text may say nothing (a tool's result may)."""
    rows = read_array(value, path, least=least, most=most)
    return [read_block(row, join(path, index), kinds, blank=blank) for index, row in enumerate(rows)]


def read_block(value: Any, path: str, kinds: Collection[str], *, blank: bool) -> Block:
    """One block."""
    kind = read_text(read_object(value, path, required=("type",))["type"], join(path, "type"))
    if kind == "redacted":
        raise Misfit(join(path, "type"), "redacted blocks are written by the server only.")
    if kind not in kinds:
        raise Misfit(join(path, "type"), f"must be one of {', '.join(kinds)}, not {kind[:64]!r}.")
    match kind:
        case "image":
            return _read_image(value, path)
        case "document":
            return _read_document(value, path)
        case "search_result":
            return _read_search_result(value, path)
        case _:
            return _read_text_block(value, path, blank=blank)


def _read_text_block(value: Any, path: str, *, blank: bool) -> Block:
    given = read_object(value, path, known=("type", "text"), required=("text",))
    text = read_text(given["text"], join(path, "text"))
    if not blank and is_blank_text(text):
        raise Misfit(join(path, "text"), "must not be blank.")
    return {"type": "text", "text": text}


def _read_image(value: Any, path: str) -> Block:
    given = read_object(value, path, known=("type", "source"), required=("source",))
    place = join(path, "source")
    kind = _read_source_kind(given["source"], place, ("base64", "url", "file"))
    if kind == "url":
        return {"type": "image", "source": _read_url_source(given["source"], place)}
    source = read_object(given["source"], place, known=("type", "media_type", "data"), required=("media_type", "data"))
    media_type = read_choice(source["media_type"], join(place, "media_type"), IMAGE_TYPES)
    data = _read_base64(source["data"], join(place, "data"), bytes_max=IMAGE_BYTES_MAX)
    return {"type": "image", "source": {"type": "base64", "media_type": media_type, "data": data}}


def _read_document(value: Any, path: str) -> Block:
    given = read_object(value, path, known=("type", "source", "title", "context"), required=("source",))
    block: Block = {"type": "document", "source": _read_document_source(given["source"], join(path, "source"))}
    if given.get("title") is not None:
        block["title"] = read_text(given["title"], join(path, "title"), least=1, most=DOCUMENT_TITLE_CHARS_MAX)
    if given.get("context") is not None:
        block["context"] = read_text(given["context"], join(path, "context"), least=1)
    return block


def _read_document_source(value: Any, path: str) -> Block:
    kind = _read_source_kind(value, path, ("base64", "text", "url", "file"))
    if kind == "url":
        return _read_url_source(value, path)
    source = read_object(value, path, known=("type", "media_type", "data"), required=("media_type", "data"))
    place = join(path, "data")
    if kind == "text":
        media_type = read_choice(source["media_type"], join(path, "media_type"), (TEXT_TYPE,))
        text = read_text(source["data"], place)
        if is_blank_text(text):
            raise Misfit(place, "must not be blank.")
        return {"type": "text", "media_type": media_type, "data": text}
    media_type = read_choice(source["media_type"], join(path, "media_type"), (PDF_TYPE,))
    return {"type": "base64", "media_type": media_type, "data": _read_base64(source["data"], place, bytes_max=None)}


def _read_source_kind(value: Any, path: str, kinds: Collection[str]) -> str:
    kind = read_choice(read_object(value, path, required=("type",))["type"], join(path, "type"), kinds)
    if kind == "file":
        raise unsupported(path, "a source that refers to a file (file_id)")
    return kind


def _read_url_source(value: Any, path: str) -> Block:
    given = read_object(value, path, known=("type", "url"), required=("url",))
    place = join(path, "url")
    url = read_text(given["url"], place, least=1, most=URL_CHARS_MAX)
    try:
        parts = urlsplit(url)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and not any(c.isspace() for c in url)
    except ValueError:
        sound = False
    if not sound:
        raise Misfit(place, "must be an http or https URL.")
    return {"type": "url", "url": url}


def _read_base64(value: Any, path: str, *, bytes_max: int | None) -> str:
    text = read_text(value, path, least=1)
    if bytes_max is not None and len(text) // 4 * 3 > bytes_max + 2:
        raise Misfit(path, f"must decode to at most {bytes_max:,} bytes.")
    try:
        size = len(binascii.a2b_base64(text.encode("ascii"), strict_mode=True))
    except (binascii.Error, UnicodeEncodeError):
        raise Misfit(path, "must be base64, padded, without line breaks.") from None
    if bytes_max is not None and size > bytes_max:
        raise Misfit(path, f"must decode to at most {bytes_max:,} bytes, not {size:,}.")
    return text


def _read_search_result(value: Any, path: str) -> Block:
    fields = ("source", "title", "citations", "content")
    given = read_object(value, path, known=("type", *fields), required=fields)
    citations = read_object(given["citations"], join(path, "citations"), known=("enabled",), required=("enabled",))
    return {
        "type": "search_result",
        "source": read_text(given["source"], join(path, "source"), least=1),
        "title": read_text(given["title"], join(path, "title"), least=1),
        "citations": {"enabled": read_flag(citations["enabled"], join(path, "citations.enabled"))},
        "content": read_blocks(given["content"], join(path, "content"), SYSTEM_BLOCKS, least=1),
    }
