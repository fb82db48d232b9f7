"""A server killed at each named place: after a restart everything goes on, nothing acknowledged is lost, nothing happens twice."""

import asyncio
import signal
from pathlib import Path

import pytest
from tests.process.world import SEEDS, Names, World

from perdure.testing.crashpoints import CRASH_POINTS, CrashPoint
from perdure.testing.model_server import Gate

CLIENTS = 3
ROUND_CLIENTS_MAX = 12
DEATH_S = 30.0


class Rounds:
    """One chain of servers, each killed at another place and followed by the next, over one database that only grows."""

    def __init__(self, world: World, seed: int, folder: Path) -> None:
        self.world = world
        self.names = Names(seed)
        self.folder = folder
        self.round = 0

    def arming(self) -> Path:
        """The file that arms the present server."""
        return self.folder / f"crash-{self.round}"

    async def begin(self) -> None:
        """The next server, not armed yet."""
        self.round += 1
        await self.world.serve("up", crash_at=f"@{self.arming()}")

    def arm(self, point: CrashPoint) -> None:
        """From now on it dies there, at the first passage or a later one."""
        last = CLIENTS if point.plan in ("talk", "tool", "park") and not point.name.startswith("after_sweep") else 1
        draft = self.arming().with_suffix(".tmp")
        draft.write_text(f"{point.name}:{self.names.random.randint(1, last)}")
        draft.rename(self.arming())

    async def die(self, point: CrashPoint) -> None:
        """Clients work until the server is gone, then on against the next one; after that everything is checked."""
        world = self.world
        assert world.server is not None
        server = world.server
        async with asyncio.TaskGroup() as clients:
            death = clients.create_task(server.wait(DEATH_S))
            work = await self._work(point, clients, death)
            assert await death == -signal.SIGKILL, server.errors()[-2000:]
            world.gone()
            killed = await world.active_turns()
            await self.begin()
            assert world.server is not None
            await world.recovered(point.name, killed, world.server.ready_at)
            await asyncio.gather(*work)
        await world.check(everything=False)

    async def _work(
        self, point: CrashPoint, clients: asyncio.TaskGroup, death: "asyncio.Task[int]"
    ) -> list["asyncio.Task[None]"]:
        """Clients by the handful until the point was met."""
        kind = {"drain": "talk", "none": "talk"}.get(point.plan, point.plan)
        work: list[asyncio.Task[None]] = []
        server = self.world.server
        assert server is not None
        if point.plan == "drain":
            name, gate = self.names.next(), Gate()
            self.world.script.gates[name] = gate
            work.append(clients.create_task(self.world.drive(kind, name)))
            await gate.reached(DEATH_S)
            self.arm(point)
            server.send(signal.SIGTERM)
            await asyncio.wait({death})
            gate.open()
            return work
        await self.world.agent()
        self.arm(point)
        while not death.done() and len(work) < ROUND_CLIENTS_MAX:
            fresh = [clients.create_task(self.world.drive(kind, self.names.next())) for _ in range(CLIENTS)]
            work += fresh
            await asyncio.wait({death, asyncio.ensure_future(asyncio.wait(fresh))}, return_when=asyncio.FIRST_COMPLETED)
        return work


@pytest.mark.rule("MA-C2.1", "MA-C15.1")
@pytest.mark.parametrize("seed", SEEDS)
async def test_server_killed_at_every_point_goes_on_and_loses_nothing(world: World, tmp_path: Path, seed: int) -> None:
    points = [p for p in CRASH_POINTS if p.plan != "none"]
    rounds = Rounds(world, seed, tmp_path)
    rounds.names.random.shuffle(points)
    await rounds.begin()
    for point in points:
        try:
            await rounds.die(point)
        except Exception as error:
            assert world.server is not None
            error.add_note(f"at {point.name}, which leaves {point.leaves}\n{world.server.errors()[-3000:]}")
            raise
    await world.check()
