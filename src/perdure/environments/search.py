"""The walk behind glob and grep. Runs as a program of its own, so that a pattern that never ends can be killed.

Nothing but the standard library may be imported here: it is started without the installed packages. It gets the
open folder as a descriptor and the question as JSON on standard input, and answers with JSON on standard output. It
opens nothing but what lies below that folder, and no symbolic link.
"""

import contextlib
import fnmatch
import json
import os
import re
import resource
import stat
import sys
from collections.abc import Generator
from typing import Any, Final

# A walk reads at most this many names: enough for a large repository, little enough to end.
ENTRIES_MAX: Final = 50_000
GLOB_RESULTS_MAX: Final = 200
OUTPUT_BYTES_MAX: Final = 100 * 1024
# Patterns that go back and forth grow with the line; minified files would be all there is to see.
LINE_CHARACTERS_MAX: Final = 2_000
LINE_BYTES_MAX: Final = 4 * LINE_CHARACTERS_MAX
BINARY_SNIFF_BYTES: Final = 512
# A pattern that needs more has gone wrong; the server kills at the wall clock, this also works when the server is gone.
CPU_SECONDS_MAX: Final = 30
ADDRESS_SPACE_BYTES_MAX: Final = 1024**3
# Braces multiply.
ALTERNATIVES_MAX: Final = 64

_FOLDERS_NOT_SEARCHED: Final = frozenset({".git", "node_modules"})
_OWN_FOLDER: Final = ".perdure"
_FOLDER_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class PatternRefused(Exception):
    """The pattern can't be used. The message says why."""


class EntryBudget:
    """Counts the names that a walk has read."""

    def __init__(self) -> None:
        self.left = ENTRIES_MAX
        self.exceeded = False

    def spend(self) -> bool:
        """Whether one more name may be read."""
        if self.left == 0:
            self.exceeded = True
            return False
        self.left -= 1
        return True


def list_folder(root_fd: int, folder: tuple[str, ...], budget: EntryBudget) -> list[tuple[str, os.stat_result]]:
    """Names and facts in one folder below `root_fd`, in name order; empty when it is gone or was replaced by a link."""
    entries: list[tuple[str, os.stat_result]] = []
    with contextlib.suppress(OSError), opened(root_fd, folder) as descriptor:
        for name in os.listdir(descriptor):
            if not budget.spend():
                break
            with contextlib.suppress(OSError):
                entries.append((name, os.lstat(name, dir_fd=descriptor)))
    entries.sort(key=lambda entry: entry[0])
    return entries


@contextlib.contextmanager
def opened(root_fd: int, folder: tuple[str, ...]) -> Generator[int, None, None]:
    """A descriptor of a folder below `root_fd`, walked to without following a link."""
    here = os.open(".", _FOLDER_FLAGS, dir_fd=root_fd)
    try:
        for name in folder:
            entered = os.open(name, _FOLDER_FLAGS, dir_fd=here)
            os.close(here)
            here = entered
        yield here
    finally:
        os.close(here)


def expand_braces(pattern: str) -> list[str]:
    """`a.{b,c}` is `a.b` and `a.c`; braces may stand in braces."""
    pending, done = [pattern], list[str]()
    while pending:
        if len(pending) + len(done) > ALTERNATIVES_MAX:
            raise PatternRefused(f"its braces make more than {ALTERNATIVES_MAX} alternatives")
        current = pending.pop()
        inner = re.search(r"\{([^{}]*,[^{}]*)\}", current)
        if inner is None:
            done.append(current)
            continue
        before, after = current[: inner.start()], current[inner.end() :]
        pending += [f"{before}{choice}{after}" for choice in inner[1].split(",")]
    return done


class Doublestar:
    """One alternative of a glob pattern as an automaton over path components: dead folders are not walked."""

    def __init__(self, pattern: str) -> None:
        parts = [part for part in pattern.split("/") if part not in {"", "."}]
        if ".." in parts:
            raise PatternRefused("'..' is not permitted in it")
        if parts and parts[-1] == "**":
            parts.append("*")
        self._parts = [None if part == "**" else re.compile(fnmatch.translate(part)) for part in parts]

    def start(self) -> frozenset[int]:
        return self._close({0})

    def step(self, states: frozenset[int], name: str) -> frozenset[int]:
        """The states after one more component; empty when nothing below can match."""
        following: set[int] = set()
        for state in states:
            if state == len(self._parts):
                continue
            part = self._parts[state]
            if part is None:
                following.add(state)
            elif part.match(name):
                following.add(state + 1)
        return self._close(following)

    def accepts(self, states: frozenset[int]) -> bool:
        return len(self._parts) in states

    def _close(self, states: set[int]) -> frozenset[int]:
        """`**` may also stand for nothing."""
        closed: set[int] = set()
        for state in states:
            closed.add(state)
            while state < len(self._parts) and self._parts[state] is None:
                state += 1
                closed.add(state)
        return frozenset(closed)


def glob(root_fd: int, base: str, pattern: str) -> str:
    """Paths that match, newest first."""
    automata = [Doublestar(alternative) for alternative in expand_braces(pattern)]
    budget = EntryBudget()
    found: list[tuple[int, str]] = []
    folders: list[tuple[tuple[str, ...], list[frozenset[int]]]] = [((), [automaton.start() for automaton in automata])]
    while folders and not budget.exceeded:
        folder, states = folders.pop()
        for name, facts in list_folder(root_fd, folder, budget):
            if name == _OWN_FOLDER and not folder:
                continue
            after = [automaton.step(state, name) for automaton, state in zip(automata, states, strict=True)]
            path = (*folder, name)
            if any(automaton.accepts(state) for automaton, state in zip(automata, after, strict=True)):
                found.append((-facts.st_mtime_ns, "/".join((base, *path))))
            if stat.S_ISDIR(facts.st_mode) and any(after):
                folders.append((path, after))
    return render_glob(found, budget)


def render_glob(found: list[tuple[int, str]], budget: EntryBudget) -> str:
    found.sort()
    left, lines = OUTPUT_BYTES_MAX, list[str]()
    for _, path in found[:GLOB_RESULTS_MAX]:
        left -= _printed_bytes(path)
        if left < 0:
            break
        lines.append(path)
    if len(found) > len(lines):
        lines.append(f"[the newest {len(lines)} of {len(found)} matches; narrow the pattern to see others]")
    lines = lines or ["no matches"]
    if budget.exceeded:
        lines.append(f"[stopped after {ENTRIES_MAX} entries; give a narrower `path`]")
    return "\n".join(lines)


def _printed_bytes(line: str) -> int:
    """With its newline. A name that is no UTF-8 has lone surrogates here."""
    return len(line.encode(errors="replace")) + 1


class Hits:
    """Matching lines up to a size."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.left = OUTPUT_BYTES_MAX
        self.full = False
        self.long_lines = 0

    def add(self, line: str) -> None:
        self.left -= _printed_bytes(line)
        if self.left < 0:
            self.full = True
        else:
            self.lines.append(line)

    def render(self, budget: EntryBudget) -> str:
        lines = self.lines or ["no matches"]
        if self.full:
            lines.append(f"[output cut at {OUTPUT_BYTES_MAX} bytes; narrow the pattern or give a `path`]")
        if self.long_lines:
            lines.append(f"[{self.long_lines} lines longer than {LINE_CHARACTERS_MAX} characters were not searched]")
        if budget.exceeded:
            lines.append(f"[stopped after {ENTRIES_MAX} entries; give a narrower `path`]")
        return "\n".join(lines)


def grep(root_fd: int, base: str, pattern: str, only: str | None) -> str:
    """Lines that match a regular expression, as path:number:line."""
    try:
        expression = re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise PatternRefused(f"not a valid regular expression: {error}") from error
    budget, hits = EntryBudget(), Hits()
    if only is not None:
        search_file(root_fd, (), only, base, expression, hits)
        return hits.render(budget)
    folders: list[tuple[str, ...]] = [()]
    while folders and not budget.exceeded and not hits.full:
        folder = folders.pop()
        below: list[tuple[str, ...]] = []
        for name, facts in list_folder(root_fd, folder, budget):
            if stat.S_ISDIR(facts.st_mode):
                if name not in _FOLDERS_NOT_SEARCHED and (folder or name != _OWN_FOLDER):
                    below.append((*folder, name))
            elif stat.S_ISREG(facts.st_mode) and not hits.full:
                search_file(root_fd, folder, name, base, expression, hits)
        folders += reversed(below)
    return hits.render(budget)


def search_file(
    root_fd: int, folder: tuple[str, ...], name: str, base: str, expression: re.Pattern[str], hits: Hits
) -> None:
    """Search one regular file; binary ones, and those that vanish, are passed over."""
    with contextlib.suppress(OSError), opened(root_fd, folder) as folder_fd:
        descriptor = os.open(name, _FILE_FLAGS, dir_fd=folder_fd)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode) or b"\0" in file.peek()[:BINARY_SNIFF_BYTES]:
                return
            shown = "/".join((base, *folder, name))
            number = 0
            while not hits.full and (raw := file.readline(LINE_BYTES_MAX + 1)):
                number += 1
                too_long = len(raw) > LINE_BYTES_MAX
                while len(raw) > LINE_BYTES_MAX and not raw.endswith(b"\n"):
                    raw = file.readline(LINE_BYTES_MAX + 1)
                line = raw.decode("utf-8", errors="replace").rstrip("\r\n")
                if too_long or len(line) > LINE_CHARACTERS_MAX:
                    hits.long_lines += 1
                elif expression.search(line):
                    hits.add(f"{shown}:{number}:{line}")


def answer(question: dict[str, Any]) -> dict[str, str]:
    """Answer one question: `text`, or `error`."""
    root_fd, base, pattern = question["folder_fd"], question["base"], question["pattern"]
    try:
        if question["kind"] == "glob":
            return {"text": glob(root_fd, base, pattern)}
        return {"text": grep(root_fd, base, pattern, question["only"])}
    except PatternRefused as error:
        return {"error": f"pattern: {error}"}
    except MemoryError:
        return {"error": f"pattern: needs more than {ADDRESS_SPACE_BYTES_MAX} bytes of memory; simplify it"}


def main() -> None:
    """Limit this process, then answer."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS_MAX, CPU_SECONDS_MAX))
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES_MAX, ADDRESS_SPACE_BYTES_MAX))
    result = answer(json.load(sys.stdin))
    # A name that is no UTF-8 has lone surrogates, which strict readers of JSON refuse.
    whole = {k: v.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace") for k, v in result.items()}
    json.dump(whole, sys.stdout)


if __name__ == "__main__":
    main()
