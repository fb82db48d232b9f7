"""Workers that are frozen or slow, not dead: another takes over, and what the first one still tries is fenced off."""

import asyncio
import signal
import time

import pytest
from tests.process.test_kills import exists
from tests.process.world import World

from perdure.domain.lease import LEASE_MS
from perdure.testing.model_server import Gate
from perdure.testing.processes import Child, until

NOTICED_S_MAX = 20.0
"""Fifteen seconds are promised for a host or network that is lost; the rest is the machine's."""


async def bury_all_but(world: World, survivor: Child) -> None:
    """What their lapsed leases would do in ten seconds: every other worker counts as dead."""
    await world.pool.execute(
        "update worker set dead_at = clock_timestamp() where pid <> $1 and dead_at is null", survivor.pid
    )


async def seated(world: World, pid: int) -> bool:
    return bool(await world.pool.fetchval("select true from worker where pid = $1 and dead_at is null", pid))


@pytest.mark.case("B019")
@pytest.mark.rule("MA-C15.5")
async def test_frozen_worker_that_wakes_up_after_a_takeover_writes_nothing(world: World) -> None:
    """Frozen inside a tool and inside a model call; the other goes on; then both run at once."""
    await world.serve("serve")
    first = await world.child("worker").start()
    gate = Gate()
    world.script.gates["model"] = gate
    talk, tool = await world.session(), await world.session()
    await world.say(talk, "talk", "model")
    await world.say(tool, "slowtool", "counted")
    effects = world.data / "workspaces" / world.token_of(tool) / "effects"
    await until(lambda: exists(effects), 20)
    await gate.reached(20)
    held = await world.active_turns()
    first.send(signal.SIGSTOP)
    second = await world.child("worker").start()
    await bury_all_but(world, second)
    await world.recovered("frozen worker", held, time.monotonic())
    assert await world.at_rest(tool) == "end_turn"
    assert await world.at_rest(talk) == "end_turn"
    orphaned = [line for line in second.errors().splitlines() if "turn_orphaned" in line]
    assert all(any(world.token_of(s) in line for line in orphaned) for s in (talk, tool)), "by the id that clients know"
    before = [await world.listed(s) for s in (talk, tool)]
    first.send(signal.SIGCONT)
    gate.open()
    # It finds itself dead, drops what it had, and takes a new seat.
    await until(lambda: seated(world, first.pid), 20)
    assert [await world.listed(s) for s in (talk, tool)] == before
    assert effects.read_text().split() == ["counted"]
    results = [e for e in before[1] if e["type"] == "agent.tool_result"]
    assert [r["is_error"] for r in results] == [True]
    assert await second.terminate() == 0
    await world.say(talk, "talk", "again")
    assert await world.at_rest(talk) == "end_turn", "under its new name it works again"
    await world.check()


@pytest.mark.case("B021")
async def test_stalled_main_loop_and_long_tool_keep_their_lease(world: World) -> None:
    """The loop is blocked for longer than a renewal's time, and the tool runs longer than a lease: both belong to a living worker."""
    await world.serve("serve")
    armed = world.folder / "armed"
    await world.child("worker", crash_at=f"@{armed}").start()
    session = await world.session()
    armed.write_text(f"before_call.tool:1:stall={LEASE_MS // 2}")
    await world.say(session, "longtool", "once")
    # A second worker that has nothing to do but to look for the dead.
    await world.child("worker").start()
    assert await world.at_rest(session) == "end_turn"
    effects = world.data / "workspaces" / world.token_of(session) / "effects"
    assert effects.read_text().split() == ["once"]
    turns = await world.pool.fetch("select attempt_no, charge from turn")
    assert [t["attempt_no"] for t in turns] == [1]
    results = [e for e in await world.listed(session) if e["type"] == "agent.tool_result"]
    assert [r["is_error"] for r in results] == [False]
    await world.check()


@pytest.mark.long
@pytest.mark.timeout(120)
@pytest.mark.rule("MA-C15.1")
async def test_worker_of_a_lost_host_is_followed_within_fifteen_seconds(world: World) -> None:
    """Frozen, with its connections open and its process there: only time tells."""
    await world.serve("serve")
    first = await world.child("worker").start()
    second = await world.child("worker").start()
    gate = Gate()
    world.script.gates["a"] = gate
    session = await world.session()
    await world.say(session, "talk", "a")
    await gate.reached(20)
    held = await world.active_turns()
    owner = await world.pool.fetchval(
        "select w.pid from turn t join worker w on w.id = t.worker_id where t.state = 'active'"
    )
    frozen = first if first.pid == owner else second
    # PostgreSQL has been up for long enough by now that a lapsed lease counts.
    frozen.send(signal.SIGSTOP)
    since = time.monotonic()
    gate.open()
    took_s = await world.taken_over("lost host", held, since, NOTICED_S_MAX)
    assert took_s > 5, "a lease that was just renewed is not dead yet"
    assert await world.at_rest(session) == "end_turn"
    frozen.send(signal.SIGCONT)
    await until(lambda: seated(world, frozen.pid), 20)
    await world.check()


@pytest.mark.rule("MA-C3.2")
async def test_two_workers_share_one_mailbox_without_ever_running_it_twice(world: World) -> None:
    """Many sessions with several messages each, two workers that both hear of everything."""
    await world.serve("serve")
    await asyncio.gather(world.child("worker").start(), world.child("worker").start())
    sessions = [await world.session() for _ in range(4)]
    await asyncio.gather(*(world.say(s, "twotools", f"s{i}m{j}") for i, s in enumerate(sessions) for j in range(3)))
    for session in sessions:
        assert await world.at_rest(session) == "end_turn"
    assert {n: c for n, c in world.script.calls.items() if c > 1} == {}
    await world.check()
