"""Text on its way to the model: bounded while it is collected, cleaned once at the border."""

import re
from typing import Final

# What a shell command may leave in memory, and what the model could read of it at most.
OUTPUT_BYTES_MAX: Final = 100 * 1024
# About 25,000 tokens; more goes to a file and the model gets a preview.
RESULT_CHARACTERS_MAX: Final = 100_000
# Enough to see what it is and how it ended.
PREVIEW_HEAD_CHARACTERS: Final = 4_000
PREVIEW_TAIL_CHARACTERS: Final = 4_000

NO_OUTPUT: Final = "(no output)"

_ESCAPES: Final = re.compile(
    r"\x1b(?:"
    r"\[[0-?]*[ -/]*[@-~]"  # control sequences: colours, cursor
    r"|\][^\x07\x1b\n]*(?:\x07|\x1b\\)?"  # operating system commands: titles, links
    r"|[PX^_][^\x1b\n]*(?:\x1b\\)?"  # device control and other strings
    r"|[ -/]*[0-~]"  # two-byte escapes
    r")"
)
# PostgreSQL's text holds neither, and JSON readers choke on the second.
_UNSTORABLE: Final = re.compile("[\x00\ud800-\udfff]")


class Tail:
    """Keeps the last `bytes_max` bytes of a stream and counts what it let go."""

    def __init__(self, bytes_max: int = OUTPUT_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._kept = bytearray()
        self._dropped_bytes = 0

    def feed(self, chunk: bytes) -> None:
        """Take one more chunk."""
        self._kept += chunk
        # Trimmed only when twice too long, so that a flood of small chunks is not copied each time.
        if len(self._kept) > 2 * self._bytes_max:
            self._trim()

    def take(self) -> tuple[bytes, int]:
        """Hand out what is kept and the count of dropped bytes, and begin anew."""
        self._trim()
        taken = bytes(self._kept), self._dropped_bytes
        self._kept.clear()
        self._dropped_bytes = 0
        return taken

    def _trim(self) -> None:
        excess = len(self._kept) - self._bytes_max
        if excess > 0:
            del self._kept[:excess]
            self._dropped_bytes += excess


def clean_text(text: str) -> str:
    """Replace what can't be stored (U+0000 and lone surrogates) by U+FFFD."""
    return _UNSTORABLE.sub("\ufffd", text)


def render_output(kept: bytes, dropped_bytes: int) -> str:
    """Terminal output as plain text: escapes stripped, invalid bytes replaced, a note where the start is cut off."""
    if dropped_bytes:
        # The cut may have gone through a character; what is left of it is no invalid input of the command's.
        kept = kept[_leading_continuation_bytes(kept) :]
    text = clean_text(_ESCAPES.sub("", kept.decode("utf-8", errors="replace"))).rstrip("\n")
    if dropped_bytes:
        text = f"[the first {dropped_bytes} bytes of output were dropped, the last {OUTPUT_BYTES_MAX} follow]\n{text}"
    return text


def render_preview(text: str, path: str, advice: str) -> str:
    """What the model gets instead of an over-long text that stands in a file."""
    left_out = len(text) - PREVIEW_HEAD_CHARACTERS - PREVIEW_TAIL_CHARACTERS
    return (
        f"[{len(text)} characters are too many to show; all of them are in {path}. {advice}]\n"
        f"{text[:PREVIEW_HEAD_CHARACTERS]}\n"
        f"[... {left_out} characters left out ...]\n"
        f"{text[-PREVIEW_TAIL_CHARACTERS:]}"
    )


def _leading_continuation_bytes(data: bytes) -> int:
    count = 0
    while count < min(3, len(data)) and data[count] & 0xC0 == 0x80:
        count += 1
    return count
