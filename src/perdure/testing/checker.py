"""The checker: what must hold of a real database, and of the world around it, after whatever happened to the processes.

It reads the tables themselves, not what a server says of them, and replays each session's rows through the small model. Nothing in it
knows how the rows came about.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, TypeVar
from uuid import UUID

import msgspec

from perdure.domain.barrier import Action
from perdure.domain.control import Control
from perdure.domain.event import Event
from perdure.domain.mailbox import Input
from perdure.domain.session import Session, Thread
from perdure.domain.step import Step
from perdure.domain.transcript import TranscriptEntry
from perdure.domain.turn import Turn
from perdure.domain.wakeup import Wakeup
from perdure.http.claude.event_codec import to_wire
from perdure.http.claude.wire import EVENT, to_wire_id
from perdure.ports.ledger import SeenEvent
from perdure.postgres.pool import ReadPool
from perdure.postgres.tables import BY_KIND, CHILDREN, read_row
from perdure.testing.model_server import RecordedRequest
from perdure.testing.small_model import Trace, check_trace

R = TypeVar("R", bound=msgspec.Struct)

SIGHTINGS_MAX: Final = 2
"""A stream shows an input when it is received and when it is processed; everything else once."""

IDLE_TRANSACTION_S: Final = 1


class Rows(msgspec.Struct, frozen=True, kw_only=True):
    """One session, as the tables have it."""

    trace: Trace
    wakeups: Sequence[Wakeup]
    controls: Sequence[Control]


class Effects(msgspec.Struct, frozen=True):
    """What tools did outside: how often each marked call ran, from the files that they append to."""

    runs: Mapping[str, int]


def read_effects(files: Iterable[Path]) -> Effects:
    """Each line of these files is one run of the call that it names."""
    lines: Counter[str] = Counter()
    for path in files:
        if path.exists():
            lines.update(path.read_text("utf-8").split())
    return Effects(lines)


async def _rows(pool: ReadPool, kind: type[R], session_id: UUID, order: str) -> list[R]:
    table = BY_KIND[kind]  # pyright: ignore[reportArgumentType]
    found = await pool.fetch(
        f"select {', '.join(table.names)} from {table.name} where {table.session_column} = $1 order by {order}",
        session_id,
    )
    return [read_row(kind, r) for r in found]


async def read_rows_of(pool: ReadPool, session_id: UUID) -> Rows | None:
    """A session's rows; None for one that is not there or was deleted."""
    sessions = await _rows(pool, Session, session_id, "id")
    if not sessions or sessions[0].state in ("deleting", "deleted"):
        return None
    return Rows(
        trace=Trace(
            session=sessions[0],
            threads=await _rows(pool, Thread, session_id, "id"),
            inputs=await _rows(pool, Input, session_id, "seq"),
            turns=await _rows(pool, Turn, session_id, "gen"),
            steps=await _rows(pool, Step, session_id, "ordinal, position, try_no"),
            actions=await _rows(pool, Action, session_id, "round, position"),
            events=await _rows(pool, Event, session_id, "seq"),
            transcript=await _rows(pool, TranscriptEntry, session_id, "causal_pos, position"),
        ),
        wakeups=await _rows(pool, Wakeup, session_id, "thread_id"),
        controls=await _rows(pool, Control, session_id, "seq"),
    )


class Checker:
    """Collects what tests know for certain, and holds the database to it."""

    def __init__(self, url: str) -> None:
        self._pool = ReadPool(url, application_name="checker")
        self.acknowledged: dict[UUID, list[str]] = {}
        """By session, the ids of the inputs whose admission was answered."""
        self.unsure: dict[UUID, int] = {}
        """By session, how many inputs were sent without an answer: each may be there once."""

    async def close(self) -> None:
        """Close its connections."""
        await self._pool.close()

    def acknowledge(self, session_id: UUID, event_id: str) -> None:
        """The server said that it has this input."""
        self.acknowledged.setdefault(session_id, []).append(event_id)

    def doubt(self, session_id: UUID) -> None:
        """An input was sent and no answer came."""
        self.unsure[session_id] = self.unsure.get(session_id, 0) + 1

    async def sessions(self) -> list[UUID]:
        """Every session that is there."""
        rows = await self._pool.fetch("select id from session where state not in ('deleting', 'deleted') order by id")
        return [r["id"] for r in rows]

    async def busy(self) -> list[UUID]:
        """Sessions that have something left to do, other than to wait for a client."""
        rows = await self._pool.fetch(
            """select s.id from session s
                where s.state = 'deleting'
                   or exists (select from outbox o where o.session_id = s.id)
                   or exists (select from turn t where t.session_id = s.id and t.state <> 'settled'
                                 and not (t.state = 'waiting' and t.wait = 'action'))
                order by s.id"""
        )
        return [r["id"] for r in rows]

    async def faults(self, only: Iterable[UUID] | None = None, *, quiet: bool = True) -> list[str]:
        """Everything that is wrong now. `only` looks at these sessions. `quiet`: nothing is running and nothing should be left to do."""
        faults = [*await self._idle_transactions(), *await self._leftovers()]
        for session_id in await self.sessions() if only is None else only:
            rows = await read_rows_of(self._pool, session_id)
            if rows is None:
                continue
            faults += check_trace(rows.trace)
            faults += [f"session {session_id}: {f}" for f in self._of_session(rows)]
            faults += [f"session {session_id}: {f}" for f in await self._ownership(rows, quiet=quiet)]
        return faults

    def _of_session(self, rows: Rows) -> list[str]:
        trace = rows.trace
        faults = _counts(trace)
        known = {to_wire_id(EVENT, i.id) for i in trace.inputs} | {
            to_wire_id(EVENT, e.id) for e in trace.events if e.type == "input.received"
        }
        said = self.acknowledged.get(trace.session.id, [])
        faults += [f"acknowledged input {i} is lost" for i in said if i not in known]
        received = sum(e.type == "input.received" for e in trace.events)
        most = len(said) + self.unsure.get(trace.session.id, 0)
        if trace.session.id in self.acknowledged and not len(said) <= received <= most:
            faults.append(f"{received} inputs are there; {len(said)} were acknowledged, {most} sent")
        faults += _public(trace)
        return faults

    async def _ownership(self, rows: Rows, *, quiet: bool) -> list[str]:
        """A session that says it runs has somebody who runs it, or a wakeup that brings somebody."""
        trace = rows.trace
        active = [t for t in trace.turns if t.state == "active"]
        waking = bool(rows.wakeups)
        faults: list[str] = []
        for turn in active:
            alive = await self._pool.fetchval(
                "select true from worker where id = $1 and dead_at is null", turn.worker_id
            )
            if not alive and not waking:
                faults.append(f"turn {turn.id} has a dead worker and no wakeup")
        if trace.session.status == "running" and not active and not waking:
            faults.append("runs without an owner and without a wakeup")
        if not quiet:
            return faults
        faults += [
            f"turn {t.id} is still {t.state} ({t.wait})"
            for t in trace.turns
            if t.state != "settled" and t.wait != "action"
        ]
        parked = any(t.wait == "action" for t in trace.turns)
        if not parked:
            faults += [f"input {i.seq} is still {i.state}" for i in trace.inputs if i.settled_at is None]
        faults += [f"control {c.seq} is still open" for c in rows.controls if c.state == "open"]
        faults += [f"wakeup of thread {w.thread_id} is left" for w in rows.wakeups]
        if trace.session.status in ("running", "rescheduling"):
            faults.append(f"is still {trace.session.status}")
        return faults

    async def _idle_transactions(self) -> list[str]:
        rows = await self._pool.fetch(
            """select pid, application_name, query from pg_stat_activity
                where datname = current_database() and state like 'idle in transaction%'
                  and state_change < clock_timestamp() - $1::interval""",
            timedelta(seconds=IDLE_TRANSACTION_S),
        )
        return [f"backend {r['pid']} of {r['application_name']} idles in a transaction: {r['query']}" for r in rows]

    async def _leftovers(self) -> list[str]:
        """Rows of sessions that are gone."""
        faults: list[str] = []
        for table in CHILDREN:
            if table.name == "submission":
                continue
            count: Any = await self._pool.fetchval(
                f"""select count(*) from {table.name} c
                     where not exists (select from session s where s.id = c.{table.session_column} and s.state <> 'deleted')"""
            )
            if count:
                faults.append(f"{count} rows of {table.name} belong to no session")
        return faults

    async def check_effects(self, effects: Effects, only: Iterable[UUID] | None = None) -> list[str]:
        """No call ran twice. One whose result is known ran; one that is ambiguous may have."""
        faults = [f"call {name!r} ran {count} times" for name, count in effects.runs.items() if count > 1]
        for session_id in await self.sessions() if only is None else only:
            rows = await read_rows_of(self._pool, session_id)
            if rows is not None:
                faults += _effects_of(rows.trace, effects)
        return faults


def _counts(trace: Trace) -> list[str]:
    """One `turn.ended` a turn, and each input in one turn or in a terminal custody with its reason."""
    faults: list[str] = []
    ended = Counter(e.turn_id for e in trace.events if e.type == "turn.ended")
    for turn in trace.turns:
        wanted = 1 if turn.state == "settled" else 0
        if ended[turn.id] != wanted:
            faults.append(f"turn {turn.id} is {turn.state} and ended {ended[turn.id]} times")
    applied = Counter(e.ref_seq for e in trace.events if e.type == "input.applied")
    for entry in trace.inputs:
        if applied[entry.seq] > 1:
            faults.append(f"input {entry.seq} was applied {applied[entry.seq]} times")
        if entry.settled_at is not None and not applied[entry.seq] and not entry.reason:
            faults.append(f"input {entry.seq} ended as {entry.state} without a turn and without a reason")
    return faults


def _public(trace: Trace) -> list[str]:
    """Every public event has an id of its own, and the stream says the same as the list."""
    by_seq = {e.seq: e for e in trace.events}
    streamed: dict[str, list[Any]] = {}
    listed: dict[str, Any] = {}
    faults: list[str] = []
    for event in trace.events:
        seen = SeenEvent(event, by_seq.get(event.ref_seq or 0))
        for wire in to_wire(seen, sighting="stream", agent_name="agent"):
            streamed.setdefault(wire.id, []).append(msgspec.json.decode(wire.data))
        if event.type == "input.settled":
            continue
        for wire in to_wire(seen, sighting="list", agent_name="agent"):
            if wire.id in listed:
                faults.append(f"public event {wire.id} ({wire.type}) is listed twice")
            listed[wire.id] = msgspec.json.decode(wire.data)
    for identity, sightings in streamed.items():
        most = SIGHTINGS_MAX if sightings[0]["type"].startswith(("user.", "system.")) else 1
        if len(sightings) > most:
            faults.append(f"public event {identity} ({sightings[0]['type']}) is streamed {len(sightings)} times")
        if listed.get(identity) != sightings[-1]:
            faults.append(f"public event {identity}: the list says {listed.get(identity)}, the stream {sightings[-1]}")
    if listed.keys() != streamed.keys():
        faults.append(f"listed and streamed events differ: {sorted(listed.keys() ^ streamed.keys())}")
    return faults


def _effects_of(trace: Trace, effects: Effects) -> list[str]:
    """Calls are marked by the last word of their command, `CMD >> file` apart: see `mark_of`."""
    faults: list[str] = []
    calls = {e.item_id: e for e in trace.events if e.type in ("item.opened", "item.held") and e.body is not None}
    results = {e.item_id: e for e in trace.events if e.type == "item.closed"}
    for step in trace.steps:
        call = calls.get(step.item_id)
        if step.kind != "tool" or call is None:
            continue
        mark = mark_of(msgspec.json.decode(call.body or b"{}"))
        if mark is None:
            continue
        runs = effects.runs.get(mark, 0)
        if step.state == "done" and runs != 1 and step.item_id in results:
            body: Any = msgspec.json.decode(results[step.item_id].body or b"{}")
            if not body.get("is_error"):
                faults.append(f"call {mark!r} is done and ran {runs} times")
        if step.dispatched_at is None and runs:
            faults.append(f"call {mark!r} ran without being dispatched")
    return faults


def mark_of(call: Mapping[str, Any]) -> str | None:
    """The name that a call leaves in the effects file: of `echo NAME >> effects`."""
    words = str(call.get("input", {}).get("command", "")).split()
    return words[1] if len(words) > 1 and words[0] == "echo" else None


def check_requests(requests: Sequence[RecordedRequest]) -> list[str]:
    """The provider took every request that it was sent."""
    return [f"request {r.order} was refused: {r.refused}" for r in requests if r.refused is not None]
