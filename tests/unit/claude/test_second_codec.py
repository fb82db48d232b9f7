"""A stub of another face, projected from the very rows that this one reads.

It numbers a turn's outputs, folds items, and says when turns begin and end: all of it must stand in the rows, none of it in this face.
"""

import json
from typing import Any

from tests.unit.claude.face import Face, call_plan, rows_of

from perdure.domain.ids import token
from perdure.ports.ledger import SeenEvent

STATUS = {"active": "in_progress", "wait_action": "requires_action", "idle": "idle", "terminated": "failed"}


class OtherFace:
    """`item.added` and `item.done` with places, `turn.*` with usage, and a status that is said only when it changes."""

    def __init__(self) -> None:
        self.status = ""

    def show(self, seen: SeenEvent) -> list[dict[str, Any]]:
        event, snap = seen.event, json.loads(seen.event.snap)
        turn = None if event.turn_id is None else "turn_" + token(event.turn_id)
        item = None if event.item_id is None else "item_" + token(event.item_id)
        match event.type:
            case "turn.created" | "turn.started" | "turn.ended":
                name = {"turn.started": "turn.in_progress", "turn.ended": f"turn.{snap.get('outcome')}"}
                return [{"type": name.get(event.type, event.type), "turn": turn, "usage": snap.get("usage")}]
            case "input.applied":
                content = json.loads((seen.referred.body if seen.referred else None) or b"{}").get("content")
                return [{"type": "item.added", "turn": turn, "role": "user", "content": content, "output_index": None}]
            case "item.opened" if event.kind != "tool":
                body = seen.referred.body if event.body is None and seen.referred else event.body
                call = json.loads(body or b"{}")
                return [
                    {
                        "type": "item.added",
                        "turn": turn,
                        "item": item,
                        "kind": {"custom": "function_call"}.get(event.kind, event.kind),
                        "name": call.get("name"),
                        "output_index": event.out_index,
                    }
                ]
            case "item.closed" if event.kind == "message":
                text = "".join(b["text"] for b in json.loads(event.body or b"{}")["content"])
                return [{"type": "item.done", "item": item, "text": text, "status": snap["state"]}]
            case "action.opened":
                return [{"type": "required_action", "item": item}]
            case "session.phase":
                status = STATUS[event.kind]
                changed, self.status = status != self.status, status
                return [{"type": f"session.{status}"}] if changed else []
            case _:
                return []


async def projected(face: Face, session: str) -> list[dict[str, Any]]:
    other = OtherFace()
    return [shown for seen in rows_of(face, session) for shown in other.show(seen)]


async def test_a_plain_turn_on_another_face(face: Face) -> None:
    session = await face.session()
    await face.say(session, "hi")
    await face.reply(session, await face.begin(session), "hello", thinking=True)
    shown = await projected(face, session)
    assert [e["type"] for e in shown] == [
        "session.in_progress",
        "turn.created",
        "turn.in_progress",
        "item.added",
        "item.added",
        "item.added",
        "item.done",
        "turn.completed",
        "session.idle",
    ]
    assert shown[3]["content"] == [{"type": "text", "text": "hi"}]
    assert [e["output_index"] for e in shown if e["type"] == "item.added"] == [None, 0, 1]
    assert (shown[6]["text"], shown[6]["status"], shown[6]["item"]) == ("hello", "completed", shown[5]["item"])
    assert shown[7]["usage"]["output_tokens"] == 5
    assert len({e["turn"] for e in shown if e.get("turn")}) == 1


async def test_a_parked_turn_is_one_turn_with_one_end(face: Face) -> None:
    session = await face.session()
    await face.say(session, "hi")
    plans = [call_plan(0, "custom", "look"), call_plan(1, "custom", "ask")]
    await face.reply(session, await face.begin(session), calls=plans)
    events = await face.events(session)
    calls = [e["id"] for e in events if e["type"] == "agent.custom_tool_use"]
    for call in calls:
        answer = {"type": "user.custom_tool_result", "custom_tool_use_id": call}
        await face.ok("POST", f"/v1/sessions/{session}/events", {"events": [answer]})
    await face.reply(session, await face.begin(session), "done")
    shown = await projected(face, session)
    functions = [e for e in shown if e.get("kind") == "function_call"]
    assert [(e["name"], e["output_index"]) for e in functions] == [("look", 0), ("ask", 1)]
    assert [e["item"].removeprefix("item_") for e in functions] == [c.removeprefix("sevt_") for c in calls]
    assert [e["item"] for e in shown if e["type"] == "required_action"] == [e["item"] for e in functions]
    kinds = [e["type"] for e in shown if e["type"].startswith(("turn.", "session."))]
    assert kinds == [
        "session.in_progress",
        "turn.created",
        "turn.in_progress",
        "session.requires_action",
        "session.in_progress",
        "turn.completed",
        "session.idle",
    ], "a partial answer repeats the idle on the first face and nothing on this one"
    places = [e["output_index"] for e in shown if e.get("output_index") is not None]
    assert places == list(range(len(places)))


async def test_a_failed_turn_says_so_with_its_own_outcome(face: Face) -> None:
    session = await face.session()
    await face.say(session, "hi")
    await face.fail(session, await face.begin(session), retryable=False)
    shown = await projected(face, session)
    assert [e["type"] for e in shown][-2:] == ["turn.failed", "session.failed"]
