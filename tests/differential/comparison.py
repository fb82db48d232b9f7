"""One history on both ledgers, compared after each move."""

from collections.abc import Sequence

from tests.differential.postgres_side import (
    PostgresSide,
    comparable_answer,
    differences,
    oracle_snapshot,
)

from perdure.testing.histories import Failed, Move, Play, Shape, shrink, step_seeds


class Comparison:
    """Plays the same moves on PostgreSQL and on the oracle."""

    def __init__(self, url: str, shape: Shape | None = None) -> None:
        self.play = Play(shape)
        self.side = PostgresSide(url, self.play.oracle.clock, self.play.history.workspace)

    async def run(self, seeds: Sequence[int]) -> None:
        """A whole history. Raises `Failed` at the first difference or broken rule."""
        async with self.side:
            for seed in seeds:
                await self._move(self.play.choose(seed))
            await self._compare_rows("at the end", set(self.play.history.sessions))

    async def _move(self, move: Move) -> None:
        self.play.prepare(move)
        if move.buried is not None:
            await self.side.bury(move.buried)
        between_first, between, answers = await self.side.play(move)
        expected_between, expected = self.play.apply(move, between_first=between_first)
        pairs = [(move.between, expected_between, between), *zip(move.commands, expected, answers, strict=True)]
        for command, wanted, given in pairs:
            if comparable_answer(wanted) != comparable_answer(given):
                raise Failed(f"the oracle answers {wanted}\nPostgreSQL answers {given}\nto {command}")
        touched = {c.session_id for c in (*move.commands, *((move.between,) if move.between else ()))}
        await self._compare_rows(f"after {[type(c).__name__ for c in move.commands]}", touched)
        self.play.learn(move, expected_between, expected)

    async def _compare_rows(self, when: str, session_ids: set[object]) -> None:
        found = differences(oracle_snapshot(self.play.oracle, session_ids), await self.side.snapshot(session_ids))
        if found:
            raise Failed(f"{when}: " + "\n".join(found))


async def compare(url: str, seed: int, length: int, shape: Shape | None = None) -> Comparison:
    """One history from one integer; when it fails, the shortest form of it that still does is said."""
    seeds = step_seeds(seed, length)
    comparison = Comparison(url, shape)
    try:
        await comparison.run(seeds)
    except Exception as error:
        short = await _shrunk(url, seeds, shape)
        raise Failed(f"history {seed} of {length} fails, {short} is its shortest form: {error}") from error
    return comparison


async def _shrunk(url: str, seeds: Sequence[int], shape: Shape | None) -> list[int]:
    search = shrink(seeds)
    fewer = next(search)
    while True:
        try:
            await Comparison(url, shape).run(fewer)
            failed = False
        except Exception:  # noqa: BLE001  whatever it is, it is what the shrinking looks for
            failed = True
        try:
            fewer = search.send(failed)
        except StopIteration as done:
            return done.value
