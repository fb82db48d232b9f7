"""A second, smaller model of the ledger, written apart from the rules: it replays a session's public trace and knows no decider.

What it reads are rows, as a reader of the ledger sees them; what it knows is what must hold of any trace, whoever made it.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final
from uuid import UUID

import msgspec

from perdure.domain.barrier import Action
from perdure.domain.event import Event
from perdure.domain.mailbox import Input
from perdure.domain.session import Session, Thread
from perdure.domain.step import Step
from perdure.domain.transcript import TranscriptEntry
from perdure.domain.turn import Turn

TERMINAL: Final = frozenset({"consumed", "dropped", "cancelled", "interrupted", "ambiguous"})
_STATUS: Final = {
    "idle": "idle",
    "wait_action": "idle",
    "active": "running",
    "retrying": "rescheduling",
    "terminated": "terminated",
}


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """Everything of one session; events in order."""

    session: Session
    threads: Sequence[Thread]
    inputs: Sequence[Input]
    turns: Sequence[Turn]
    steps: Sequence[Step]
    actions: Sequence[Action]
    events: Sequence[Event]
    transcript: Sequence[TranscriptEntry]


def check_trace(trace: Trace) -> list[str]:
    """What is wrong with a session's history; nothing when all is well."""
    replay = _Replay(trace)
    replay.run()
    faults = [*replay.faults, *_check_custody(trace, replay), *_check_steps(trace), *_check_causal_order(trace)]
    if trace.session.receipt_seq != len(trace.events):
        faults.append(f"{len(trace.events)} events, but the session counts {trace.session.receipt_seq}")
    if trace.session.status != replay.status:
        faults.append(f"status is {trace.session.status}, the last phase says {replay.status}")
    open_turns = [t.id for t in trace.turns if t.state != "settled"]
    if open_turns != ([] if replay.turn is None else [replay.turn]):
        faults.append(f"unsettled turns {open_turns}, the events say {replay.turn}")
    return [f"session {trace.session.id}: {f}" for f in faults]


class _Replay:
    """Plays the rows in order and keeps what a reader would believe."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.faults: list[str] = []
        self.inputs = {i.seq: i for i in trace.inputs}
        self.status = "idle"
        self.mailbox: list[int] = []
        self.turn: UUID | None = None
        self.gen = 0
        self.parked = False
        self.claimed = 0
        """Messages that the open turn took."""
        self.must_interrupt = False
        self.boundary = False
        """An interrupt or a refusal ended the last piece of work: only then may an idle stand before waiting work."""
        self.applied: Counter[int] = Counter()
        self.settled: dict[int, Event] = {}
        self.of_turn: set[int] = set()
        self.interrupts: set[int] = set()
        self.open_actions: list[UUID] = []
        self.answered: list[UUID] = []
        self.items: dict[UUID, str] = {}
        self.held: set[UUID] = set()
        self.spans: set[UUID] = set()
        self.out_index = -1
        self.handlers: dict[str, Callable[[Event], None]] = {
            "input.received": self._received,
            "input.applied": self._applied,
            "input.settled": self._settled,
            "turn.created": self._turn_created,
            "turn.parked": self._turn_parked,
            "turn.resumed": self._turn_resumed,
            "turn.ended": self._turn_ended,
            "session.phase": self._phase,
            "item.held": self._item_held,
            "item.opened": self._item_opened,
            "item.closed": self._item_closed,
            "action.opened": self._action_opened,
            "action.answered": self._action_answered,
            "action.closed": self._action_closed,
            "step.model.started": self._span_started,
            "step.model.ended": self._span_ended,
        }

    def run(self) -> None:
        for place, event in enumerate(self.trace.events, start=1):
            self.expect(event.seq == place, event, f"expected sequence {place}")
            handler = self.handlers.get(event.type)
            if handler is not None:
                handler(event)

    def expect(self, holds: bool, event: Event, rule: str) -> None:
        if not holds:
            self.faults.append(f"event {event.seq} ({event.type} {event.kind}): {rule}")

    # ---------------------------------------------------------------------------------------------------------- inputs

    def _received(self, event: Event) -> None:
        if event.kind == "interrupt":
            self._interrupt(event)
            return
        row = self.inputs.get(event.seq)
        self.expect(row is not None, event, "an accepted input has no row")
        leader = self.inputs.get(row.companion_of) if row is not None and row.companion_of is not None else None
        if event.kind == "message" or (event.kind == "system" and (leader is None or leader.kind == "message")):
            self.mailbox.append(event.seq)

    def _interrupt(self, event: Event) -> None:
        waits_for_client = self.parked and bool(self.open_actions)
        has_target = not waits_for_client if self.turn is not None else bool(self.mailbox)
        at_once = event.processed_seq == event.seq
        self.expect(at_once != has_target, event, "an interrupt has a target exactly while the session is at work")
        if has_target:
            self.interrupts.add(event.seq)
            self.must_interrupt = self.turn is not None

    def _applied(self, event: Event) -> None:
        seq = event.ref_seq or 0
        row = self.inputs.get(seq)
        self.applied[seq] += 1
        self.of_turn.add(seq)
        self.expect(self.applied[seq] == 1, event, "an input is consumed once")
        self.expect(event.turn_id == self.turn, event, "the turn that consumes is the open one")
        if event.kind == "message":
            self.expect(self.mailbox[:1] == [seq], event, "messages are taken in receipt order")
            self.claimed += 1
            self.expect(self.claimed == 1, event, "a turn takes one message")
        elif event.kind == "system" and row is not None:
            self.expect(row.companion_of in self.of_turn, event, "a system message goes with what it follows")
        else:
            self.expect(row is not None and row.action_id in self.answered, event, "an answer belongs to an action")
        if seq in self.mailbox:
            self.mailbox.remove(seq)

    def _settled(self, event: Event) -> None:
        seq = event.ref_seq or 0
        if event.kind == "interrupt":
            self.expect(seq in self.interrupts, event, "an interrupt is processed once")
            self.interrupts.discard(seq)
            return
        self.expect(seq not in self.settled, event, "an input is settled once")
        self.settled[seq] = event
        custody = _snap(event).get("custody")
        self.expect((custody == "consumed") == bool(self.applied[seq]), event, "consumed means read by a turn")
        if seq in self.mailbox:
            if custody == "interrupted":
                row = self.inputs[seq]
                first = self.mailbox[0] == seq or row.companion_of in self.settled
                self.expect(first, event, "an interrupt ends the head of the mailbox")
                self.boundary = True
            self.mailbox.remove(seq)

    # ----------------------------------------------------------------------------------------------------------- turns

    def _turn_created(self, event: Event) -> None:
        self.expect(self.turn is None, event, "a thread has one open turn")
        self.expect(self.status == "running", event, "a turn begins in a running session")
        self.gen += 1
        self.expect(_snap(event).get("gen") == self.gen, event, f"the generation is {self.gen}")
        self.turn, self.parked, self.claimed, self.must_interrupt, self.boundary = event.turn_id, False, 0, False, False
        self.of_turn, self.out_index = set(), -1

    def _turn_parked(self, event: Event) -> None:
        self.expect(self.turn == event.turn_id and not self.parked, event, "the open turn parks once")
        self.parked = True

    def _turn_resumed(self, event: Event) -> None:
        self.expect(self.turn == event.turn_id, event, "the open turn resumes")
        self.expect(not self.open_actions, event, "a turn resumes when no answer is owed")
        self.parked = False

    def _turn_ended(self, event: Event) -> None:
        self.expect(event.turn_id == self.turn is not None, event, "a turn ends once")
        outcome = _snap(event).get("outcome")
        self.expect(
            (outcome == "interrupted") == self.must_interrupt, event, "an interrupt accepted before the end wins"
        )
        self.expect(all(s in self.settled for s in self.of_turn), event, "inputs are settled before their turn ends")
        self.expect(not self.open_actions and not self.answered, event, "no action outlives its turn")
        self.expect(not self.spans, event, "no model span outlives its turn")
        self.expect(not self.interrupts, event, "an interrupt is processed with the turn that it ends")
        open_items = [i for i, state in self.items.items() if state == "open"]
        self.expect(not open_items, event, f"tool items stay open: {open_items}")
        self.turn, self.parked = None, False
        self.boundary = outcome in ("interrupted", "refused")

    def _phase(self, event: Event) -> None:
        before, after = self.status, _STATUS.get(event.kind, "?")
        snap = _snap(event)
        match event.kind:
            case "active":
                self.expect(before in ("idle", "rescheduling"), event, f"running again while {before}")
                self.expect(self.turn is not None or bool(self.mailbox), event, "running without work")
            case "idle":
                self._idle(event, before)
            case "wait_action":
                self.expect(self.parked and self.turn is not None, event, "required actions without a parked turn")
                ids = [UUID(i) for i in snap.get("action_ids", ())]
                self.expect(ids == self.open_actions != [], event, f"owed {ids}, open are {self.open_actions}")
            case "retrying":
                self.expect(before == "running", event, f"rescheduling while {before}")
            case "terminated":
                self.expect(before != "terminated" and self.turn is None, event, "terminated twice or with a turn")
            case _:
                self.expect(False, event, "unknown phase")
        self.status = after

    def _idle(self, event: Event, before: str) -> None:
        self.expect(before in ("running", "rescheduling"), event, f"idle while {before}")
        self.expect(self.turn is None, event, "idle while a turn is open")
        self.expect(not self.mailbox or self.boundary, event, "idle between queued turns")
        self.expect(not self.interrupts, event, "idle before the interrupt was processed")
        unsettled = [s for s in self.applied if s not in self.settled]
        self.expect(not unsettled, event, f"idle before inputs {unsettled} were processed")
        self.boundary = False

    # ----------------------------------------------------------------------------------------------- items and actions

    def _item_held(self, event: Event) -> None:
        if event.item_id is not None:
            self.held.add(event.item_id)

    def _item_opened(self, event: Event) -> None:
        assert event.item_id is not None
        self.expect(event.item_id not in self.items, event, "an item opens once")
        self.expect(event.turn_id == self.turn, event, "an item belongs to the open turn")
        self.expect((event.out_index or 0) > self.out_index, event, "output indexes grow")
        self.out_index = event.out_index or 0
        self.items[event.item_id] = "custom" if event.kind == "custom" else "open"

    def _item_closed(self, event: Event) -> None:
        assert event.item_id is not None
        state = self.items.get(event.item_id)
        self.expect(state in ("open", "custom"), event, f"an item closes once, after it opened; it was {state}")
        self.expect(event.item_id not in self.open_actions, event, "a result before the answer")
        self.items[event.item_id] = "closed"

    def _action_opened(self, event: Event) -> None:
        assert event.item_id is not None
        self.expect(event.item_id in self.items and event.item_id in self.held, event, "an action shows a held call")
        running = [i for i, state in self.items.items() if state == "open" and i not in self.held]
        self.expect(not running, event, "calls of the client are published after the server's ended")
        self.open_actions.append(event.item_id)

    def _action_answered(self, event: Event) -> None:
        assert event.item_id is not None
        self.expect(event.item_id in self.open_actions, event, "an answer needs an open action")
        if event.item_id in self.open_actions:
            self.open_actions.remove(event.item_id)
        self.answered.append(event.item_id)

    def _action_closed(self, event: Event) -> None:
        assert event.item_id is not None
        known = event.item_id in self.open_actions or event.item_id in self.answered
        self.expect(known, event, "an action closes once")
        self.open_actions = [i for i in self.open_actions if i != event.item_id]
        self.answered = [i for i in self.answered if i != event.item_id]

    def _span_started(self, event: Event) -> None:
        assert event.step_id is not None
        self.expect(not self.spans, event, "one model call of a turn at a time")
        self.expect(event.turn_id == self.turn, event, "a span belongs to the open turn")
        self.spans.add(event.step_id)

    def _span_ended(self, event: Event) -> None:
        assert event.step_id is not None
        self.expect(event.step_id in self.spans, event, "a span ends once")
        self.spans.discard(event.step_id)


def _snap(event: Event) -> dict[str, Any]:
    return msgspec.json.decode(event.snap, type=dict[str, Any])


def _check_custody(trace: Trace, replay: _Replay) -> list[str]:
    """Each accepted input is in exactly one custody, and the rows agree with what the events said."""
    faults: list[str] = []
    received = {e.seq: e for e in trace.events if e.type == "input.received" and e.kind != "interrupt"}
    if received.keys() != replay.inputs.keys():
        faults.append(f"accepted {sorted(received)}, accounted for {sorted(replay.inputs)}")
    for row in trace.inputs:
        said = replay.settled.get(row.seq)
        event = received.get(row.seq)
        name = f"input {row.seq} ({row.kind}, {row.state})"
        if (said is None) != (row.settled_at is None):
            faults.append(f"{name}: settled in the row and in the events must agree")
        if said is not None and _snap(said).get("custody") != row.state:
            faults.append(f"{name}: the last event says {_snap(said).get('custody')}")
        if row.state in TERMINAL - {"consumed"} and not row.reason:
            faults.append(f"{name}: ended without a reason")
        if row.state == "consumed" and replay.applied[row.seq] != 1:
            faults.append(f"{name}: consumed, but read {replay.applied[row.seq]} times")
        if row.state == "waiting" and row.seq not in replay.mailbox:
            faults.append(f"{name}: waits outside of the mailbox")
        if event is not None and row.kind != "custom_result":
            stamp = None if said is None else said.seq
            if event.processed_seq != stamp:
                faults.append(f"{name}: processed at {event.processed_seq}, second sighting at {stamp}")
    counted = Counter(i.state for i in trace.inputs)
    if sum(counted.values()) != len(received):
        faults.append(f"{len(received)} accepted, custodies {dict(counted)}")
    if trace.session.state == "terminated" and counted["waiting"]:
        faults.append("input waits in a terminated session")
    return faults


def _check_steps(trace: Trace) -> list[str]:
    """No tool call is dispatched twice unless it is declared harmless."""
    faults: list[str] = []
    dispatched: dict[tuple[UUID, int, int], list[Step]] = {}
    unsettled_turns = {t.id for t in trace.turns if t.state != "settled"}
    for step in trace.steps:
        if step.kind == "tool" and step.dispatched_at is not None:
            dispatched.setdefault((step.turn_id, step.round, step.position), []).append(step)
        if step.state in ("prepared", "dispatched") and step.turn_id not in unsettled_turns:
            faults.append(f"step {step.id} is {step.state} in a settled turn")
    twice = [tries for tries in dispatched.values() if len(tries) > 1 and any(s.on_lost != "repeat" for s in tries)]
    faults += [f"call {tries[0].item_id} was started {len(tries)} times" for tries in twice]
    return faults


def _check_causal_order(trace: Trace) -> list[str]:
    """The model reads each consumed message, then the output of its turn, before any later message."""
    faults: list[str] = []
    entries = sorted(trace.transcript, key=lambda e: (e.causal_pos, e.position))
    messages = [e.ref_seq or 0 for e in entries if e.kind == "input"]
    if messages != sorted(messages):
        faults.append(f"the model reads messages in the order {messages}")
    turns = [e.turn_id for e in entries]
    seen: list[UUID] = []
    for turn_id in turns:
        if turn_id in seen and seen[-1] != turn_id:
            faults.append(f"turn {turn_id} goes on in the model's history after another began")
        if not seen or seen[-1] != turn_id:
            seen.append(turn_id)
    if not set(turns) <= {t.id for t in trace.turns}:
        faults.append("the model's history has turns of nobody")
    return faults


def check_messages(messages: Sequence[dict[str, Any]]) -> list[str]:
    """What a provider would refuse, in the messages of a call that is about to be made."""
    faults: list[str] = []
    owed: list[str] = []
    for place, message in enumerate(messages):
        role, blocks = message["role"], message["content"]
        if role != ("user", "assistant")[place % 2]:
            faults.append(f"message {place} is the {role}'s")
        if not blocks:
            faults.append(f"message {place} is empty")
        results = [b["tool_use_id"] for b in blocks if b["type"] == "tool_result"]
        if role == "user" and results != owed:
            faults.append(f"message {place} has results for {results}, the calls were {owed}")
        owed = [b["id"] for b in blocks if b["type"] == "tool_use"] if role == "assistant" else []
    if owed:
        faults.append(f"calls {owed} have no result")
    calls = [b["id"] for m in messages for b in m["content"] if b["type"] == "tool_use"]
    if len(calls) != len(set(calls)):
        faults.append("a call's id is used twice")
    return faults
