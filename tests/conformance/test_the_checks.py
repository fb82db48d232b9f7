"""What checks every session of this folder sees planted faults, and the proxy does what it says."""

import asyncio
from typing import Any

import httpx2
import pytest

from perdure.testing.model_server import Reply, Text
from perdure.testing.proxy import Proxy
from perdure.testing.serving import Served
from perdure.testing.trail import broken_rules, only
from perdure.testing.wire_check import WireCheck


async def a_turn(served: Served) -> list[dict[str, Any]]:
    told = await served.make_session()
    return await told.turn("m", Reply(Text("r")))


async def test_the_types_of_the_sdk_are_looked_at(served: Served, wire_check: WireCheck) -> None:
    listed = await a_turn(served)
    assert wire_check.faults_of_events(listed) == []
    (spoken,), (stop,) = only(listed, "agent.message"), only(listed, "session.status_idle")
    planted: list[dict[str, Any]] = [
        {**spoken, "surprise": 1},
        {k: v for k, v in spoken.items() if k != "content"},
        {**spoken, "content": [{"type": "text"}]},
        {**spoken, "content": None},
        {**stop, "stop_reason": {"type": "tired"}},
        {**stop, "stop_reason": {"type": "requires_action"}},
        {**spoken, "type": "agent.shout"},
    ]
    for event in planted:
        assert wire_check.faults_of_events([event]) != [], event


async def test_the_grammar_of_a_list_is_looked_at(served: Served) -> None:
    listed = await a_turn(served)
    assert broken_rules(listed, ended=True) == []
    needed = {
        "session.thread_status_running",
        "span.model_request_start",
        "span.model_request_end",
        "session.thread_status_idle",
        "session.usage",
    }
    for number, event in enumerate(listed):
        without = [*listed[:number], *listed[number + 1 :]]
        assert (broken_rules(without, ended=True) != []) == (event["type"] in needed), event["type"]
        assert broken_rules([*listed, event], ended=True) != []
    swapped = [*listed[:-2], listed[-1], listed[-2]]
    assert broken_rules(swapped, ended=True) != []
    orphan = {"id": "sevt_x", "type": "agent.tool_result", "tool_use_id": "sevt_y"}
    assert broken_rules([*listed, orphan], ended=True) != []


async def test_the_proxy_loses_one_answer_and_stalls(served: Served) -> None:
    async with Proxy(served.url) as proxy, httpx2.AsyncClient(base_url=proxy.url, timeout=5) as client:
        assert (await client.get("/healthz")).status_code == 200
        proxy.lose_answer(lambda data: b'"ok"' in data)
        with pytest.raises(httpx2.RemoteProtocolError):
            await client.get("/healthz")
        assert proxy.lost.is_set()
        assert (await client.get("/healthz")).status_code == 200
        proxy.stall()
        asked = asyncio.ensure_future(client.get("/healthz"))
        done, _ = await asyncio.wait({asked}, timeout=0.05)
        assert not done
        proxy.resume()
        assert (await asked).status_code == 200
        proxy.stall()
        asked = asyncio.ensure_future(client.get("/healthz"))
        await asyncio.wait({asked}, timeout=0.02)
        proxy.cut()
        with pytest.raises(httpx2.HTTPError):
            await asked
        proxy.resume()
    assert proxy.connections == 2
