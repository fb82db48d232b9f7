"""Where a process spends its processor time: the stack at each millisecond of it, counted. Cheap enough not to change the answer.

A tracing profiler charges every call the same toll and so blames code for being made of small functions; this one only looks.
"""

import signal
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Final

TICK_S: Final = 0.001
"""Of processor time, not of time: who waits is not sampled."""

DEPTH_MAX: Final = 60


class Sampler:
    """`start`, then `write`. For one process's main thread."""

    def __init__(self) -> None:
        self.stacks: Counter[tuple[str, ...]] = Counter()

    def start(self) -> None:
        """Begin to look."""
        signal.signal(signal.SIGPROF, self._look)
        signal.setitimer(signal.ITIMER_PROF, TICK_S, TICK_S)

    def _look(self, _number: int, frame: FrameType | None) -> None:
        stack: list[str] = []
        while frame is not None and len(stack) < DEPTH_MAX:
            code = frame.f_code
            stack.append(f"{shorten(code.co_filename)}:{code.co_qualname}")
            frame = frame.f_back
        self.stacks[tuple(reversed(stack))] += 1

    def write(self, path: Path) -> None:
        """End, and write a line for each stack: its functions, outermost first, and how often it was seen."""
        signal.setitimer(signal.ITIMER_PROF, 0)
        lines = [f"{';'.join(stack)} {count}" for stack, count in self.stacks.most_common()]
        path.write_text("\n".join(lines) + "\n")


def shorten(path: str) -> str:
    """A file's name from its package on."""
    for mark in ("/site-packages/", "/src/", "/lib/python3"):
        if mark in path:
            return path.rpartition(mark)[2]
    return path


def shares(lines: list[str]) -> list[tuple[str, float, float]]:
    """Each function with its own share and that of all it called, in percent, by the latter."""
    own: Counter[str] = Counter()
    whole: Counter[str] = Counter()
    total = 0
    for line in lines:
        stack, _, count = line.rpartition(" ")
        functions = stack.split(";")
        total += int(count)
        own[functions[-1]] += int(count)
        for function in set(functions):
            whole[function] += int(count)
    return [(f, 100 * own[f] / total, 100 * n / total) for f, n in whole.most_common()]
