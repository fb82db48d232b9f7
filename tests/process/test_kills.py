"""Processes killed from outside: the whole server, its worker, its API, its PostgreSQL, alone and together."""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator
from pathlib import Path

import psutil
import pytest
from tests.conftest import DurablePostgres, copy_of
from tests.process.world import LONG, World, a_world

from perdure.domain.turn import CHARGE_MAX
from perdure.postgres.postmaster import read_postmaster
from perdure.testing.model_server import Gate, ModelServerThread
from perdure.testing.processes import until

CLIENTS = 4
KILLS = range(20 if LONG else 2)


async def in_flight(world: World, *names: str) -> list[Gate]:
    """Model calls of these plans, held at the provider."""
    gates = [Gate() for _ in names]
    world.script.gates.update(zip(names, gates, strict=True))
    return gates


async def working(world: World, names: list[str]) -> tuple[list[Gate], list["asyncio.Task[None]"]]:
    """Clients whose turns are in a model call, which is held until the gates are opened."""
    gates = await in_flight(world, *names)
    work = [asyncio.ensure_future(world.drive("tool", name)) for name in names]
    for gate in gates:
        await gate.reached(20)
    return gates, work


@pytest.mark.rule("MA-C15.1")
@pytest.mark.parametrize("seed", KILLS)
async def test_whole_server_killed_in_the_middle_of_calls_goes_on_after_its_restart(world: World, seed: int) -> None:
    server = await world.serve()
    gates, work = await working(world, [f"n{seed}{i}" for i in range(CLIENTS)])
    world.gone()
    await server.kill()
    for gate in gates:
        gate.open()
    killed = await world.active_turns()
    assert len(killed) == CLIENTS
    server = await world.serve()
    await world.recovered("server", killed, server.ready_at)
    await asyncio.gather(*work)
    await world.check()


@pytest.mark.case("B031")
@pytest.mark.rule("MA-C15.1")
async def test_worker_killed_alone_is_followed_by_the_next_while_the_api_stays(world: World) -> None:
    """In a model call and in a tool; two more messages wait behind; nobody touches the API or the rows."""
    await world.serve("serve")
    worker = await world.child("worker").start()
    gates, work = await working(world, ["a", "b"])
    tool = await world.session()
    await world.say(tool, "longtool", "c")
    effects = world.data / "workspaces" / world.token_of(tool) / "effects"
    await until(lambda: exists(effects), 20)
    for name in ("d", "e"):
        await world.say(tool, "talk", name)
    killed = await world.active_turns()
    assert len(killed) == 3
    await worker.kill()
    for gate in gates:
        gate.open()
    follower = await world.child("worker").start()
    await world.recovered("worker", killed, follower.ready_at)
    await asyncio.gather(*work)
    assert await world.at_rest(tool) == "end_turn"
    said = [e["content"][0]["text"] for e in await world.listed(tool) if e["type"] == "agent.message"]
    assert said == ["done c", "done d", "done e"]
    results = [e for e in await world.listed(tool) if e["type"] == "agent.tool_result"]
    assert [r["is_error"] for r in results] == [True], "the lost call is shown as lost"
    await world.check()


@pytest.mark.case("B031")
async def test_interrupt_of_a_turn_whose_worker_is_gone_takes_effect_with_the_next_worker(world: World) -> None:
    await world.serve("serve")
    worker = await world.child("worker").start()
    gates = await in_flight(world, "a")
    session = await world.session()
    await world.say(session, "talk", "a")
    await gates[0].reached(20)
    await worker.kill()
    gates[0].open()
    await world.send(session, {"type": "user.interrupt"})
    await world.say(session, "talk", "b")
    await world.child("worker").start()
    assert await world.at_rest(session) == "end_turn"
    said = [e["content"][0]["text"] for e in await world.listed(session) if e["type"] == "agent.message"]
    assert said == ["done b"]
    await world.check()


async def test_api_killed_alone_leaves_turns_running_and_its_clients_find_the_next(world: World) -> None:
    server = await world.serve("serve")
    await world.child("worker").start()
    gates, work = await working(world, [f"n{i}" for i in range(CLIENTS)])
    running = await world.active_turns()
    world.gone()
    await server.kill()
    for gate in gates:
        gate.open()
    await world.serve("serve")
    await asyncio.gather(*work)
    assert not {turn for turn, attempt in running if attempt > 1}
    assert not world.recoveries_s
    await world.check()


async def test_worker_killed_while_it_takes_over_is_followed_by_yet_another(world: World) -> None:
    """At the place between finding an orphan and waking it."""
    await world.serve("serve")
    worker = await world.child("worker").start()
    gates, work = await working(world, ["a"])
    killed = await world.active_turns()
    await worker.kill()
    gates[0].open()
    doomed = world.child("worker", crash_at="before_wake:1")
    await doomed.launch()
    assert await doomed.wait() == -signal.SIGKILL
    follower = await world.child("worker").start()
    await world.recovered("before_wake", killed, follower.ready_at)
    await asyncio.gather(*work)
    await world.check()


@pytest.mark.rule("MA-C15.2")
@pytest.mark.case("B018")
async def test_turn_that_kills_its_process_each_time_is_given_up_visibly(world: World) -> None:
    """The model call itself is what kills: after three charged attempts the turn fails, and the next message runs."""
    await world.serve("serve")
    session = await world.session()
    await world.say(session, "talk", "poison")
    for _ in range(CHARGE_MAX):
        doomed = world.child("worker", crash_at="before_call.model:1")
        await doomed.launch()
        assert await doomed.wait() == -signal.SIGKILL
    await world.child("worker").start()
    assert await world.at_rest(session) == "retries_exhausted"
    errors = [e["error"] for e in await world.listed(session) if e["type"] == "session.error"]
    assert [e["type"] for e in errors] == ["unknown_error"]
    assert "3 times" in errors[0]["message"]
    await world.say(session, "talk", "fine")
    assert await world.at_rest(session) == "end_turn"
    await world.check()


@pytest.mark.case("B018")
@pytest.mark.rule("MA-C9.4")
async def test_tool_that_kills_its_worker_is_not_run_again_by_the_next(world: World) -> None:
    """The command restarts the host: its line is there once, the model is told that its outcome is unknown, and the turn ends."""
    await world.serve("serve")
    armed = world.folder / "armed"
    worker = await world.child("worker", crash_at=f"@{armed}").start()
    session = await world.session()
    armed.write_text("after_call.tool:1")
    await world.say(session, "tool", "restart")
    assert await worker.wait() == -signal.SIGKILL
    await world.child("worker").start()
    assert await world.at_rest(session) == "end_turn"
    effects = world.data / "workspaces" / world.token_of(session) / "effects"
    assert effects.read_text().split() == ["restart"]
    results = [e for e in await world.listed(session) if e["type"] == "agent.tool_result"]
    assert len(results) == 1 and results[0]["is_error"]
    sent = world.provider.server.requests[-1].body["messages"][-1]["content"]
    assert [b["is_error"] for b in sent if b["type"] == "tool_result"] == [True]
    await world.check()


# ------------------------------------------------------------------------------------------------------------ PostgreSQL


@pytest.fixture
async def embedded_world(cluster: Path, provider: ModelServerThread, tmp_path: Path) -> AsyncGenerator[World]:
    """A server with a PostgreSQL of its own."""
    with copy_of(cluster) as data:
        async with a_world(None, data, provider) as world:
            world.data.mkdir()
            (data / "pg").rename(world.data / "pg")
            yield world
            await stop_postgres(world.data)


def postmaster_pid(data: Path) -> int | None:
    found = read_postmaster(data.resolve() / "pg")
    return None if found is None else found.pid


async def stop_postgres(data: Path) -> None:
    """A killed server leaves its PostgreSQL behind, for the next one to find."""
    pid = postmaster_pid(data)
    if pid is None or not psutil.pid_exists(pid):
        return
    process = psutil.Process(pid)
    os.kill(pid, signal.SIGINT)
    await asyncio.to_thread(psutil.wait_procs, [process], 20)


@pytest.mark.rule("MA-C15.1")
@pytest.mark.parametrize("both", [False, True], ids=["postgres", "postgres and server"])
async def test_embedded_postgres_killed_is_started_again_and_turns_go_on(embedded_world: World, both: bool) -> None:
    world = embedded_world
    server = await world.serve()
    gates, work = await working(world, ["a", "b"])
    charged = await world.active_turns()
    pid = postmaster_pid(world.data)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    if both:
        world.gone()
        await server.kill()
    for gate in gates:
        gate.open()
    if both:
        await world.serve()
    await asyncio.gather(*work)
    if not both:
        # The outage killed no process, so nobody took over, no attempt was added, and no call was made twice.
        turns = await world.pool.fetch("select id, attempt_no, charge from turn")
        assert {(r["id"], r["attempt_no"]) for r in turns} >= charged
        assert [count for name, count in world.script.calls.items() if name in ("a-0", "b-0")] == [1, 1]
    await world.check()
    world.gone()
    assert await world.terminate() == 0


async def kill_and_restart(durable: DurablePostgres) -> None:
    await durable.kill()
    await durable.start()


@pytest.fixture
async def durable_world(
    durable_postgres: DurablePostgres, provider: ModelServerThread, tmp_path: Path
) -> AsyncGenerator[World]:
    async with a_world(durable_postgres.url, tmp_path, provider) as world:
        yield world


@pytest.mark.case("B046")
@pytest.mark.rule("MA-C10.6")
@pytest.mark.parametrize("how", ["cut", "killed", "stopped"])
async def test_database_that_goes_away_during_model_calls_costs_nothing(
    durable_world: World, durable_postgres: DurablePostgres, how: str
) -> None:
    """Every connection cut, or PostgreSQL killed or stopped and started: the answer is committed once, no finished call is made again."""
    world = durable_world
    await world.serve("serve")
    await world.child("worker").start()
    gates, work = await working(world, ["a", "b"])
    running = await world.active_turns()
    if how == "cut":
        await world.pool.fetch(
            "select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
        )
    elif how == "killed":
        await kill_and_restart(durable_postgres)
    else:
        await durable_postgres.stop()
    for gate in gates:
        gate.open()
    if how == "stopped":
        # The calls end while there is nobody to write them down.
        await world.answered("a", "b")
        await durable_postgres.start()
    await asyncio.gather(*work)
    assert {n: c for n, c in world.script.calls.items() if n in ("a-0", "b-0")} == {"a-0": 1, "b-0": 1}
    turns = await world.pool.fetch("select id, attempt_no from turn")
    assert {(r["id"], r["attempt_no"]) for r in turns} >= running, "nobody took over from a living worker"
    assert (await world.request("GET", "/readyz")).status == 200
    for session in world.workspaces.values():
        assert [e for e in await world.listed(session) if e["type"] == "session.error"] == [], "our trouble, not theirs"
    await world.check()


async def test_database_and_worker_killed_together_recover_together(
    durable_world: World, durable_postgres: DurablePostgres
) -> None:
    world = durable_world
    await world.serve("serve")
    worker = await world.child("worker").start()
    gates, work = await working(world, ["a", "b"])
    killed = await world.active_turns()
    await asyncio.gather(worker.kill(), durable_postgres.kill())
    for gate in gates:
        gate.open()
    await durable_postgres.start()
    follower = await world.child("worker").start()
    await world.recovered("database and worker", killed, follower.ready_at)
    await asyncio.gather(*work)
    await world.check()


async def exists(path: Path) -> bool:
    return path.exists()
