"""The way out in order: a drain lets tools finish, gives turns back at once, and a second signal does not wait."""

import asyncio
import signal
import time

import pytest
from tests.process.test_kills import exists
from tests.process.world import World

from perdure.testing.model_server import Gate
from perdure.testing.processes import until


async def test_drain_lets_a_running_tool_finish_and_records_what_it_did(world: World) -> None:
    server = await world.serve()
    session = await world.session()
    await world.say(session, "slowtool", "a")
    effects = world.data / "workspaces" / world.token_of(session) / "effects"
    await until(lambda: exists(effects), 20)
    assert await world.terminate() == 0
    steps = await world.pool.fetch("select state from step where kind = 'tool'")
    assert [s["state"] for s in steps] == ["done"]
    turns = await world.pool.fetch("select state, wait, charge from turn")
    assert [(t["state"], t["wait"], t["charge"]) for t in turns] == [("waiting", "capacity", 0)]
    assert await world.pool.fetchval("select bool_and(written_at is not null) from submission"), "the last one too"
    workers = await world.pool.fetch("select dead_at from worker")
    assert all(w["dead_at"] is not None for w in workers), "it said that it left"
    assert "runner_failed" not in server.errors()
    await world.serve()
    assert await world.at_rest(session) == "end_turn"
    results = [e for e in await world.listed(session) if e["type"] == "agent.tool_result"]
    assert [r["is_error"] for r in results] == [False]
    await world.check()


async def test_drain_gives_a_turn_in_a_model_call_back_at_once_and_without_charge(world: World) -> None:
    server = await world.serve()
    session = await world.session()
    gate = Gate()
    world.script.gates["a"] = gate
    await world.say(session, "talk", "a")
    await gate.reached(20)
    asked_at = time.monotonic()
    assert await world.terminate() == 0
    assert time.monotonic() - asked_at < 10, "a drain does not wait for a model"
    turns = await world.pool.fetch("select state, wait, charge from turn")
    assert [(t["state"], t["wait"], t["charge"]) for t in turns] == [("waiting", "capacity", 0)]
    assert "runner_failed" not in server.errors()
    gate.open()
    await world.serve()
    assert await world.at_rest(session) == "end_turn"
    await world.check()


async def test_drain_hands_turns_to_a_worker_that_stays(world: World) -> None:
    await world.serve("serve")
    leaving = await world.child("worker").start()
    session = await world.session()
    gate = Gate()
    world.script.gates["a"] = gate
    await world.say(session, "talk", "a")
    await gate.reached(20)
    await world.child("worker").start()
    assert await leaving.terminate() == 0
    gate.open()
    assert await world.at_rest(session) == "end_turn"
    await world.check()


async def test_second_signal_leaves_at_once_and_the_next_start_recovers(world: World) -> None:
    server = await world.serve()
    session = await world.session()
    await world.say(session, "longtool", "a")
    effects = world.data / "workspaces" / world.token_of(session) / "effects"
    await until(lambda: exists(effects), 20)
    killed = await world.active_turns()
    world.gone()
    server.send(signal.SIGTERM)

    async def is_draining() -> bool:
        return "draining" in server.errors()

    await until(is_draining, 10)
    server.send(signal.SIGTERM)
    assert await server.wait(5) == 1
    server = await world.serve()
    await world.recovered("second signal", killed, server.ready_at)
    assert await world.at_rest(session) == "end_turn"
    results = [e for e in await world.listed(session) if e["type"] == "agent.tool_result"]
    assert [r["is_error"] for r in results] == [True], "its outcome is unknown, and it was not run again"
    await world.check()


async def test_drain_under_load_loses_nothing(world: World) -> None:
    """Clients go on while the server is stopped and started again."""
    await world.serve()
    work = asyncio.gather(*(world.drive("twotools", f"n{i}") for i in range(6)))
    for _ in range(2):
        seen = len(world.provider.server.requests)
        more = asyncio.ensure_future(world.provider.server.wait_for_requests(seen + 2, 20))
        # A quick machine may have done all the work before the server is back: then there is nothing left to wait for.
        await asyncio.wait({more, work}, return_when=asyncio.FIRST_COMPLETED)
        more.cancel()
        assert await world.terminate() == 0
        await world.serve()
    await work
    ambiguous = await world.pool.fetchval("select count(*) from step where state = 'ambiguous'")
    assert ambiguous == 0, "a drain in order leaves nothing in doubt"
    await world.check()


@pytest.mark.case("B026")
async def test_open_approval_survives_a_restart_with_its_id_and_takes_one_answer(world: World) -> None:
    await world.serve()
    session = await world.session(policy="always_ask")
    await world.say(session, "tool", "a")
    assert await world.at_rest(session) == "requires_action"
    asked = (await world.listed(session))[-1]["stop_reason"]["event_ids"]
    assert len(asked) == 1
    world.gone()
    assert world.server is not None
    await world.server.kill()
    await world.serve()
    assert await world.at_rest(session) == "requires_action"
    assert (await world.listed(session))[-1]["stop_reason"]["event_ids"] == asked
    press = {"type": "user.tool_confirmation", "tool_use_id": asked[0], "result": "allow"}
    await world.send(session, press)
    assert await world.at_rest(session) == "end_turn"
    for result in ("allow", "deny"):
        again = {"events": [{**press, "result": result}]}
        answer = await world.request("POST", f"/v1/sessions/{session}/events", again)
        assert answer.status == 400, answer.body
        assert answer.body["error"]["details"]["error_code"] == "already_resolved"
    results = [e for e in await world.listed(session) if e["type"] == "agent.tool_result"]
    assert [r["is_error"] for r in results] == [False]
    await world.check()
