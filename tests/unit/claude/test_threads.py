"""The primary thread as a resource."""

import pytest
from anthropic.types.beta.sessions import BetaManagedAgentsSessionThread
from pydantic import TypeAdapter
from tests.unit.claude.face import Face


@pytest.mark.rule("MA-A3.1", "MA-A3.2", "MA-A3.3")
async def test_the_primary_thread_follows_its_session(face: Face) -> None:
    session = await face.session()
    path = f"/v1/sessions/{session}/threads"
    page = await face.ok("GET", path)
    assert page["next_page"] is None
    (thread,) = page["data"]
    TypeAdapter(BetaManagedAgentsSessionThread).validate_python(thread)
    assert (thread["parent_thread_id"], thread["status"]) == (None, "idle")
    assert (thread["usage"], thread["stats"]) == (None, None)
    assert "multiagent" not in thread["agent"]
    await face.say(session, "hi")
    running = await face.ok("GET", f"{path}/{thread['id']}")
    assert (running["status"], running["usage"]) == ("running", None)
    await face.reply(session, await face.begin(session), "done")
    idle = await face.ok("GET", f"{path}/{thread['id']}")
    assert (idle["status"], idle["usage"]["input_tokens"]) == ("idle", 10)
    assert (await face.ok("GET", path + "?statuses[]=running&statuses[]=terminated"))["data"] == []
    assert len((await face.ok("GET", path + "?statuses[]=idle&limit=1"))["data"]) == 1


@pytest.mark.rule("MA-A3.4", "MA-A0.24", "MA-A1.22")
async def test_what_is_no_thread_of_this_session(face: Face) -> None:
    session, other = await face.session(), await face.session()
    thread = (await face.ok("GET", f"/v1/sessions/{other}/threads"))["data"][0]["id"]
    for target in (thread, "sthr_nonsense", "x"):
        for tail in ("", "/events"):
            error = await face.refused("GET", f"/v1/sessions/{session}/threads/{target}{tail}")
            assert (error["status"], error["details"]["error_code"]) == (404, "thread_not_found")
    for query in ("limit=0", "page=x", "statuses[]=busy", "order=asc"):
        assert (await face.refused("GET", f"/v1/sessions/{session}/threads?{query}"))["status"] == 400
