"""The shortest form of a history that fails, found by leaving moves out."""

from collections.abc import Callable, Generator, Sequence

from perdure.testing.histories import Failed, Play, Shape, play_all, step_seeds


def shrink(seeds: Sequence[int]) -> Generator[list[int], bool, list[int]]:
    """Propose shorter histories and be told which still fail; returns the shortest found.

    Halves, quarters and so on are left out as long as that keeps the failure.
    """
    kept = list(seeds)
    width = max(1, len(kept) // 2)
    while True:
        start = 0
        while start < len(kept):
            fewer = kept[:start] + kept[start + width :]
            if (yield fewer):
                kept = fewer
            else:
                start += width
        if width == 1:
            return kept
        width = max(1, width // 2)


def shortest(seeds: Sequence[int], fails: Callable[[Sequence[int]], bool]) -> list[int]:
    """The shortest failing form of a history that `shrink` finds."""
    search = shrink(seeds)
    try:
        fewer = next(search)
        while True:
            fewer = search.send(fails(fewer))
    except StopIteration as done:
        return done.value


def fails_on_oracle(seeds: Sequence[int]) -> bool:
    """Whether a history breaks a rule, or the code under it, on the oracle alone."""
    try:
        play_all(seeds)
    except Exception:  # noqa: BLE001  whatever it is, it is what the shrinking looks for
        return True
    return False


def hunt(seed: int, length: int, shape: Shape | None = None) -> Play:
    """Play one history; when it fails, say the shortest form of it that does."""
    seeds = step_seeds(seed, length)
    try:
        return play_all(seeds, shape)
    except Exception as error:
        short = shortest(seeds, fails_on_oracle)
        raise Failed(f"history {seed} of {length} fails; play_all({short}) shows it: {error}") from error
