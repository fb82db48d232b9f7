"""What a session showed: its events as they were read from a stream or a list, short forms of them, and the grammar they obey."""

import json
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, NamedTuple, TypeAlias

import httpx2

Json: TypeAlias = dict[str, Any]


class Mark(NamedTuple):
    """One event in short: its type, and what tells it from others of its type."""

    type: str
    short: str = ""

    def __repr__(self) -> str:
        return f"{self.type}:{self.short}" if self.short else self.type


Trail: TypeAlias = list[Mark]

STATUS: Final = "session.status_"
CLIENT: Final = ("user.", "system.")
SPANS: Final = ("span.model_request_start", "span.model_request_end")

RUNNING: Final[Trail] = [Mark("session.status_running"), Mark("session.thread_status_running")]
RESCHEDULED: Final[Trail] = [Mark("session.status_rescheduled"), Mark("session.thread_status_rescheduled")]
TERMINATED: Final[Trail] = [Mark("session.thread_status_terminated"), Mark("session.status_terminated")]


def idle(reason: str = "end_turn") -> Trail:
    """The three events of coming to rest."""
    return [Mark("session.thread_status_idle", reason), Mark("session.usage"), Mark("session.status_idle", reason)]


def call(*shown: Mark, failed: bool = False) -> Trail:
    """A model call and what its reply showed while it was open."""
    end = Mark("span.model_request_end", "error" if failed else "")
    return [Mark("span.model_request_start"), *shown, end]


def says(text: str) -> Mark:
    """An `agent.message`."""
    return Mark("agent.message", text)


def said(text: str) -> Mark:
    """A `user.message`."""
    return Mark("user.message", text)


def text_of(event: Json) -> str:
    """The text blocks of an event, joined."""
    return "".join(str(b.get("text", "")) for b in event.get("content") or ())


def mark_of(event: Json) -> Mark:
    """The short form of one event."""
    kind = str(event["type"])
    match kind:
        case "user.message" | "system.message" | "agent.message":
            return Mark(kind, text_of(event))
        case "agent.tool_use":
            return Mark(kind, f"{event['name']} {event['evaluated_permission']}")
        case "agent.custom_tool_use":
            return Mark(kind, str(event["name"]))
        case "agent.tool_result" | "user.custom_tool_result":
            return Mark(kind, "error" if event.get("is_error") else "")
        case "user.tool_confirmation":
            return Mark(kind, str(event["result"]))
        case "span.model_request_end":
            return Mark(kind, "error" if event.get("is_error") else "")
        case "session.status_idle" | "session.thread_status_idle":
            return Mark(kind, str(event["stop_reason"]["type"]))
        case "session.error":
            return Mark(kind, f"{event['error']['type']} {event['error']['retry_status']['type']}")
        case _:
            return Mark(kind)


def trail_of(events: Iterable[Json]) -> Trail:
    """The short forms, in order."""
    return [mark_of(e) for e in events]


def kinds_of(events: Iterable[Json]) -> list[str]:
    """The types, in order."""
    return [str(e["type"]) for e in events]


def statuses_of(events: Iterable[Json]) -> list[str]:
    """The session's statuses, in order, without their prefix."""
    return [str(e["type"])[len(STATUS) :] for e in events if str(e["type"]).startswith(STATUS)]


def only(events: Iterable[Json], *kinds: str) -> list[Json]:
    """The events of these types."""
    return [e for e in events if e["type"] in kinds]


def last_idle(events: Sequence[Json]) -> Json:
    """The latest `session.status_idle`."""
    return only(events, "session.status_idle")[-1]


# ------------------------------------------------------------------------------------------------------------------ frames


@dataclass(frozen=True)
class Frame:
    """One frame of a stream. `id` is its cursor, empty for previews."""

    name: str
    id: str
    data: Json


async def frames_of(response: httpx2.Response) -> AsyncGenerator[Frame, None]:
    """The frames of an open stream, as they come; comments are left out."""
    fields: dict[str, str] = {}
    async for line in _lines_of(response):
        if line:
            name, _, value = line.partition(":")
            if name:
                fields[name] = value.removeprefix(" ")
        elif fields:
            yield Frame(fields["event"], fields.get("id", ""), json.loads(fields["data"]))
            fields = {}


async def _lines_of(response: httpx2.Response) -> AsyncGenerator[str, None]:
    """Lines as streams know them: ended by a line feed alone, whatever else Unicode ends lines with."""
    rest = b""
    async for chunk in response.aiter_bytes():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line.decode()


def merged(events: Sequence[Json], more: Iterable[Json]) -> list[Json]:
    """The documented way to follow a session: list and stream together, each id once, in its first place, with its latest body."""
    found = {str(e["id"]): e for e in events}
    for event in more:
        if "id" in event:
            found[str(event["id"])] = event
    return list(found.values())


# ----------------------------------------------------------------------------------------------------------------- grammar


def broken_rules(events: Sequence[Json], *, ended: bool) -> list[str]:
    """What is wrong with a whole list of events, whatever the session did; `ended` when nothing of it is at work any more."""
    faults = [f"{e['id']} is listed twice" for n, e in enumerate(events) if e["id"] in {x["id"] for x in events[:n]}]
    faults += _spans(events, ended=ended)
    faults += _tools(events, ended=ended)
    faults += _statuses(events)
    return faults


def _spans(events: Sequence[Json], *, ended: bool) -> list[str]:
    starts = [e["id"] for e in only(events, "span.model_request_start")]
    ends = [e["model_request_start_id"] for e in only(events, "span.model_request_end")]
    faults = [f"span {s} has {ends.count(s)} ends" for s in starts if ends.count(s) > 1 or (ended and s not in ends)]
    order = [e["id"] if e["type"] == SPANS[0] else e["model_request_start_id"] for e in only(events, *SPANS)]
    faults += [f"span {e} ends before it starts" for e in ends if e not in starts or order.index(e) == len(order) - 1]
    return faults


def _tools(events: Sequence[Json], *, ended: bool) -> list[str]:
    faults: list[str] = []
    open_ids: set[str] = set()
    idles = only(events, "session.status_idle")
    waiting: list[str] = idles[-1]["stop_reason"].get("event_ids", []) if idles else []
    for event in events:
        if event["type"] == "agent.tool_use":
            open_ids.add(str(event["id"]))
        elif event["type"] == "agent.tool_result":
            if event["tool_use_id"] not in open_ids:
                faults.append(f"{event['id']} is a result for nothing open")
            open_ids.discard(str(event["tool_use_id"]))
    if ended:
        faults += [f"{i} has no result" for i in sorted(open_ids.difference(waiting))]
    return faults


def _statuses(events: Sequence[Json]) -> list[str]:
    faults: list[str] = []
    for number, event in enumerate(events):
        if event["type"] == "session.status_idle":
            before = kinds_of(events[max(0, number - 2) : number])
            if before != ["session.thread_status_idle", "session.usage"]:
                faults.append(f"idle {event['id']} follows {before}")
            elif events[number - 2]["stop_reason"] != event["stop_reason"]:
                faults.append(f"idle {event['id']} has another reason than its thread")
        if event["type"] == "session.status_running":
            after = kinds_of(events[number + 1 : number + 2])
            if after != ["session.thread_status_running"]:
                faults.append(f"running {event['id']} is followed by {after}")
    return faults + [f"{b} follows {a}" for a, b in pairwise(statuses_of(events)) if a == b == "running"]
