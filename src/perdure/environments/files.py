"""What the file tools do: read, write, edit, glob, grep. Each raises `ToolRefused` with the text for the model."""

import asyncio
import base64
import contextlib
import errno
import os
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

import msgspec

from perdure.environments import search
from perdure.environments.processes import in_thread, settle
from perdure.environments.workspace import NotRegular, PathRefused, Workspace

# A model reads no more at once; larger files are read in ranges.
TEXT_BYTES_MAX: Final = 256 * 1024
# Providers bound an image by its base64 form: 4 characters for 3 bytes.
IMAGE_BASE64_BYTES_MAX: Final = 5 * 1024 * 1024
IMAGE_BYTES_MAX: Final = IMAGE_BASE64_BYTES_MAX // 4 * 3
# Leaves room for the rest of a request after base64.
PDF_BYTES_MAX: Final = 20 * 1024 * 1024
# A file that a tool call writes comes in one message; this is far above any model's output.
CONTENT_BYTES_MAX: Final = 16 * 1024 * 1024
PDF_HEADER_SEARCH_BYTES: Final = 1_024
# Searches are other processes that use the disk and a core each.
SEARCHES_MAX: Final = 4
SEARCH_WAIT_MS_MAX: Final = 30_000

_IMAGE_SUFFIXES: Final = frozenset({".png", ".jpg", ".jpeg", ".gif", ".webp"})
_REASONS: Final = {
    errno.ENOENT: "no such file or directory",
    errno.ENOTDIR: "a part of the path is not a directory",
    errno.EISDIR: "is a directory",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.EROFS: "read-only file system",
    errno.ELOOP: "too many levels of symbolic links",
    errno.ENAMETOOLONG: "a part of the path is too long",
    errno.ENOSPC: "no space left on the disk",
    errno.EDQUOT: "disk quota exceeded",
    errno.EFBIG: "file too large",
}


class ToolRefused(Exception):
    """The call fails; the message is the error result."""


class _Answer(msgspec.Struct):
    text: str | None = None
    error: str | None = None


def read_file(workspace: Workspace, path: str, view_range: list[int] | None) -> list[dict[str, Any]]:
    """The content of a file as one block: text, image or document. Blocks; call it in a thread."""
    with _explained("read", path), workspace.open_file(path) as (descriptor, facts):
        suffix = Path(path).suffix.lower()
        if suffix in _IMAGE_SUFFIXES or suffix == ".pdf":
            if view_range is not None:
                raise ToolRefused("read: view_range: not supported for images and PDF documents")
            return [_read_media(descriptor, path, facts.st_size, is_pdf=suffix == ".pdf")]
        if view_range is not None:
            data = _read_lines(descriptor, path, view_range)
        elif facts.st_size > TEXT_BYTES_MAX:
            raise ToolRefused(
                f"read: {path} has {facts.st_size} bytes, more than the {TEXT_BYTES_MAX} that can be read at once;"
                " read a part with view_range, for example [1, 500]"
            )
        else:
            # Not up to its end: the file may grow while we read.
            data = _read_at_most(descriptor, TEXT_BYTES_MAX)
    return [{"type": "text", "text": _decode("read", path, data)}]


def write_file(workspace: Workspace, path: str, content: str) -> str:
    """Replace a whole file. Blocks; call it in a thread."""
    data = content.encode()
    if len(data) > CONTENT_BYTES_MAX:
        raise ToolRefused(f"write: content: has {len(data)} bytes, more than the {CONTENT_BYTES_MAX} allowed")
    with _explained("write", path):
        workspace.write_file(path, data)
    return f"wrote {len(data)} bytes to {path}"


def edit_file(workspace: Workspace, path: str, *, old: str, new: str, replace_all: bool) -> str:
    """Replace exact text in a file. Blocks; call it in a thread."""
    if not old:
        raise ToolRefused("edit: old_string: must not be empty; use write to make a file")
    if old == new:
        raise ToolRefused("edit: new_string: must differ from old_string")
    with _explained("edit", path):
        with workspace.open_file(path) as (descriptor, facts):
            if facts.st_size > TEXT_BYTES_MAX:
                raise ToolRefused(
                    f"edit: {path} has {facts.st_size} bytes, more than the {TEXT_BYTES_MAX} that can be edited;"
                    " change it with a command"
                )
            # One more than allowed: a file that has grown must not lose its end.
            data = _read_at_most(descriptor, TEXT_BYTES_MAX + 1)
        if len(data) > TEXT_BYTES_MAX:
            raise ToolRefused(f"edit: {path} is growing; try again when nothing writes to it")
        text = _decode("edit", path, data)
        count = text.count(old)
        if count == 0:
            raise ToolRefused(f"edit: old_string: not found in {path}")
        if count > 1 and not replace_all:
            raise ToolRefused(
                f"edit: old_string: appears {count} times in {path}; add lines around it to make it unique,"
                " or set replace_all"
            )
        workspace.write_file(path, text.replace(old, new).encode())
    return f"edited {path} ({count} replacement{'s' if count > 1 else ''})"


class Searcher:
    """Runs glob and grep, each in a process that can be killed."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(SEARCHES_MAX)

    async def glob(self, workspace: Workspace, pattern: str, path: str) -> str:
        """Paths below `path` that match, newest first."""
        if pattern.startswith("/"):
            prefix = "/workspace/"
            if not pattern.startswith(prefix) or path != ".":
                raise ToolRefused("glob: pattern: must be relative; name the folder in `path`")
            pattern = pattern[len(prefix) :]
        return await self._search(workspace, "glob", pattern, path)

    async def grep(self, workspace: Workspace, pattern: str, path: str) -> str:
        """Lines below `path` that match a regular expression."""
        return await self._search(workspace, "grep", pattern, path)

    async def _search(self, workspace: Workspace, kind: str, pattern: str, path: str) -> str:
        with _explained(kind, path), contextlib.ExitStack() as stack:
            folder_fd, base, only = await in_thread(lambda: stack.enter_context(workspace.open_folder(path)))
            if kind == "glob" and only is not None:
                raise ToolRefused(f"glob: path: {path} is not a directory")
            question = {"kind": kind, "folder_fd": folder_fd, "base": base, "pattern": pattern, "only": only}
            async with self._places:
                printed = await _run_search(msgspec.json.encode(question), folder_fd)
        if printed is None:
            raise ToolRefused(
                f"{kind}: pattern: took longer than {SEARCH_WAIT_MS_MAX} ms; simplify it or give a narrower `path`"
            )
        answer = msgspec.json.decode(printed, type=_Answer)
        if answer.text is None:
            raise ToolRefused(f"{kind}: {answer.error}")
        return answer.text


async def _run_search(question: bytes, folder_fd: int) -> bytes | None:
    """The search's answer; None when it was killed because of its time. Cancelling kills it before it returns."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-I",
        "-S",
        "-X",
        "utf8",
        search.__file__,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        pass_fds=[folder_fd],
        env={},
        start_new_session=True,
    )
    talk = asyncio.ensure_future(process.communicate(question))
    try:
        async with asyncio.timeout(SEARCH_WAIT_MS_MAX / 1_000):
            printed, _ = await asyncio.shield(talk)
    except TimeoutError:
        return None
    finally:
        if not talk.done():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await settle(talk)
    # A negative code is the kernel's bound on its processor time.
    return printed if process.returncode == 0 else None


@contextlib.contextmanager
def _explained(tool: str, path: str) -> Generator[None, None, None]:
    """Turn what the file system says into what the model reads, without the host's paths."""
    try:
        yield
    except PathRefused as error:
        raise ToolRefused(f"{tool}: path {path!r} {error}") from error
    except NotRegular as error:
        raise ToolRefused(f"{tool}: {path}: not a regular file") from error
    except OSError as error:
        reason = _REASONS.get(error.errno or 0) or os.strerror(error.errno or errno.EIO).lower()
        raise ToolRefused(f"{tool}: {path}: {reason}") from error


def _read_media(descriptor: int, path: str, size_bytes: int, *, is_pdf: bool) -> dict[str, Any]:
    """An image or document block. What the bytes are decides, not the name: a provider refuses a block that lies."""
    bytes_max = PDF_BYTES_MAX if is_pdf else IMAGE_BYTES_MAX
    if size_bytes > bytes_max:
        kind = "a PDF document" if is_pdf else "an image"
        raise ToolRefused(f"read: {path} has {size_bytes} bytes, more than the {bytes_max} allowed for {kind}")
    data = _read_at_most(descriptor, bytes_max)
    if is_pdf:
        media_type = "application/pdf" if b"%PDF-" in data[:PDF_HEADER_SEARCH_BYTES] else None
    else:
        media_type = _recognise_image(data)
    if media_type is None:
        raise ToolRefused(f"read: {path}: its content is no {'PDF document' if is_pdf else 'PNG, JPEG, GIF or WebP'}")
    source = {"type": "base64", "media_type": media_type, "data": base64.b64encode(data).decode()}
    return {"type": "document" if is_pdf else "image", "source": source}


def _recognise_image(data: bytes) -> str | None:
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    if data.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "image/gif"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return None


def _read_lines(descriptor: int, path: str, view_range: list[int]) -> bytes:
    """The lines first to last, both included and counted from 1; a last of 0 or less means the end of the file."""
    first, last = max(1, view_range[0]), view_range[1]
    if 0 < last < first:
        raise ToolRefused("read: view_range: the last line must not come before the first")
    number, unended = 1, False
    collected = bytearray()
    with open(descriptor, "rb", closefd=False) as file:
        # A part of a line at a time: a line may be as long as the file.
        while (last <= 0 or number <= last) and (part := file.readline(TEXT_BYTES_MAX)):
            if number >= first:
                collected += part
            if len(collected) > TEXT_BYTES_MAX:
                raise ToolRefused(
                    f"read: view_range: [{view_range[0]}, {view_range[1]}] of {path} has more than"
                    f" {TEXT_BYTES_MAX} bytes; narrow it"
                )
            unended = not part.endswith(b"\n")
            number += not unended
    if first > 1 and not collected:
        raise ToolRefused(f"read: view_range: starts at line {first}, but {path} has {number - 1 + unended} lines")
    # The newline that ends the last line of the range is not part of it.
    return bytes(collected.removesuffix(b"\n"))


def _read_at_most(descriptor: int, bytes_max: int) -> bytes:
    with open(descriptor, "rb", closefd=False) as file:
        return file.read(bytes_max)


def _decode(tool: str, path: str, data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ToolRefused(
            f"{tool}: {path}: is no UTF-8 text; only PNG, JPEG, GIF, WebP and PDF files can be read otherwise"
        ) from error
