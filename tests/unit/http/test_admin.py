"""The custody of inputs, and taking one back, over a socket."""

from uuid import UUID, uuid4

import pytest
from tests.unit.http.serving import Serving

from perdure.domain import ids
from perdure.domain.event import encode
from perdure.domain.session import SessionConfig
from perdure.ports.ledger import Accept, Arrival, Created, CreateSession


async def session_with_inputs(serving: Serving, *texts: str, workspace_id: UUID | None = None) -> UUID:
    session_id, workspace = uuid4(), workspace_id or serving.workspace_id
    created = await serving.ledger.create(
        CreateSession(
            session_id=session_id,
            workspace_id=workspace,
            profile="managed_agents",
            agent_id=None,
            agent_version=1,
            environment_id=None,
            model="m",
            config=SessionConfig(session_id=session_id, title=None, metadata=b"{}", agent=b"{}", environment=b"{}"),
        )
    )
    assert isinstance(created, Created)
    for text in texts:
        body = encode({"content": [{"type": "text", "text": text}]})
        await serving.ledger.accept(
            Accept(session_id=session_id, workspace_id=workspace, arrivals=(Arrival(kind="message", body=body),))
        )
    return session_id


def path(session_id: UUID) -> str:
    return f"/perdure/v1/sessions/sesn_{ids.token(session_id)}/inputs"


async def test_inputs_show_their_custody_newest_first(serving: Serving) -> None:
    session_id = await session_with_inputs(serving, "one", "two")
    async with serving.http() as http:
        answer = await http.get(path(session_id), headers=serving.signed())
    rows = answer.json()["data"]
    assert [(row["kind"], row["state"], row["reason"], row["turn_id"]) for row in rows] == [
        ("message", "waiting", None, None)
    ] * 2
    assert rows[0]["receipt_seq"] > rows[1]["receipt_seq"]
    assert rows[0]["received_at"].endswith("Z") and rows[0]["settled_at"] is None
    assert all(row["id"].startswith("sevt_") for row in rows)


async def test_a_waiting_input_is_taken_back_once(serving: Serving) -> None:
    session_id = await session_with_inputs(serving, "one", "two")
    async with serving.http() as http:
        rows = (await http.get(path(session_id), headers=serving.signed())).json()["data"]
        withdraw = f"{path(session_id)}/{rows[0]['id']}/withdraw"
        taken = await http.post(withdraw, headers=serving.signed())
        assert (taken.status_code, taken.json()) == (200, {"id": rows[0]["id"], "type": "input_withdrawn"})
        after = (await http.get(path(session_id), headers=serving.signed())).json()["data"]
    assert [row["state"] for row in after] == ["cancelled", "waiting"]


@pytest.mark.parametrize("query", ["limit=0", "limit=1001", "order=asc"])
async def test_a_bad_query_is_refused_by_name(serving: Serving, query: str) -> None:
    session_id = await session_with_inputs(serving)
    async with serving.http() as http:
        answer = await http.get(f"{path(session_id)}?{query}", headers=serving.signed())
    assert answer.status_code == 400 and query.partition("=")[0] in answer.json()["error"]["message"]


async def test_sessions_of_others_and_missing_ones_answer_alike(serving: Serving) -> None:
    foreign = await session_with_inputs(serving, "one", workspace_id=uuid4())
    own = await session_with_inputs(serving, "one")
    async with serving.http() as http:
        bodies: set[str] = set()
        for target in (path(foreign), path(uuid4()), "/perdure/v1/sessions/x/inputs"):
            answers = [
                await http.get(target, headers=serving.signed()),
                await http.post(f"{target}/sevt_{ids.token(uuid4())}/withdraw", headers=serving.signed()),
            ]
            for answer in answers:
                assert answer.status_code == 404
                bodies.add(answer.text.replace(answer.headers["request-id"], ""))
        assert len(bodies) == 1
        for name, status in (("x", 404), ("sevt_" + ids.token(uuid4()), 400)):
            assert (await http.post(f"{path(own)}/{name}/withdraw", headers=serving.signed())).status_code == status
        assert (await http.get(path(own))).status_code == 401
