"""One history on both ledgers, compared after each move."""

from collections.abc import Sequence
from typing import Any
from uuid import UUID

import msgspec
from tests.differential.postgres_side import (
    PostgresSide,
    comparable_answer,
    differences,
    oracle_snapshot,
)

from perdure.domain.ids import primary_thread
from perdure.ports.ledger import EventQuery, Ledger
from perdure.testing.histories import Failed, Move, Play, Shape, step_seeds
from perdure.testing.oracle import START
from perdure.testing.shrinking import shrink

# Mostly others that commit in between, commits in doubt, and batches.
ROUGH = Shape(fault_chance=0.25, miss_chance=0.25, batch_chance=0.5)


async def _reads(ledger: Ledger, workspace: UUID, session_id: UUID) -> dict[str, Any]:
    thread_id = primary_thread(session_id)
    listed = EventQuery(session_id=session_id, limit=1_000)
    some = EventQuery(
        session_id=session_id,
        types=(("input.received", "message"), ("session.phase", None)),
        after_seq=20,
        descending=True,
        processed_after=START,
        limit=7,
    )
    view = await ledger.read_session(workspace, session_id)
    return {
        "read_session": None
        if view is None
        else (msgspec.structs.replace(view.session, rev=0), view.config, view.thread),
        "read_session of another workspace": await ledger.read_session(session_id, session_id),
        "read_feed": await ledger.read_feed(session_id, 3, 1_000),
        "read_head": await ledger.read_head(session_id),
        "read_events": await ledger.read_events(listed),
        "read_events of some types, newest first": await ledger.read_events(some),
        "read_transcript": await ledger.read_transcript(session_id, thread_id),
        "read_inputs": await ledger.read_inputs(session_id, limit=20),
        "read_actions": await ledger.read_actions(session_id),
    }


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
            await self._compare_reads()

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
        if self.side.claims != self.play.claims:
            raise Failed(f"the oracle claims {self.play.claims}\nPostgreSQL claims {self.side.claims}")
        touched = {c.session_id for c in (*move.commands, *((move.between,) if move.between else ()))}
        await self._compare_rows(f"after {[type(c).__name__ for c in move.commands]}", touched)
        self.play.learn(move, expected_between, expected)

    async def _compare_reads(self) -> None:
        """What readers get, whole and in pages, from either."""
        workspace = self.play.history.workspace
        for session_id in self.play.history.sessions:
            reads = [await _reads(ledger, workspace, session_id) for ledger in (self.play.oracle, self.side.ledger)]
            for name, wanted in reads[0].items():
                if wanted != reads[1][name]:
                    raise Failed(f"{name}: the oracle reads {wanted}\nPostgreSQL reads {reads[1][name]}")

    async def _compare_rows(self, when: str, session_ids: set[UUID]) -> None:
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
