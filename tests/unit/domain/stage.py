"""One session on the oracle, driven command by command; every commit is checked."""

from itertools import count
from typing import Any
from uuid import UUID

from perdure.domain import ids
from perdure.domain.barrier import Action
from perdure.domain.event import Event, encode
from perdure.domain.item import call_id, item_id
from perdure.domain.mailbox import Input
from perdure.domain.session import Session, SessionConfig
from perdure.domain.step import Step
from perdure.domain.transcript import tool_result
from perdure.domain.turn import Turn
from perdure.ports.ledger import (
    Accept,
    Advance,
    Arrival,
    CallPlan,
    CreateSession,
    ModelErred,
    ModelReplied,
    OutBlock,
    Perform,
    Release,
    Stopped,
    ToolReturned,
    Working,
)
from perdure.ports.model import Usage
from perdure.testing.invariants import check_sessions, history_of
from perdure.testing.oracle import OracleLedger
from perdure.testing.witness import Witness

WORKSPACE, SESSION, WORKER, OTHER = (UUID(int=n) for n in range(1, 5))
THREAD = ids.primary_thread(SESSION)


def message(text: str = "hi") -> Arrival:
    return Arrival(kind="message", body=encode({"content": [{"type": "text", "text": text}]}))


def system() -> Arrival:
    return Arrival(kind="system", body=encode({"content": [{"type": "text", "text": "be brief"}]}))


INTERRUPT = Arrival(kind="interrupt", body=b"{}")


def answer(action: Action, how: Any = None) -> Arrival:
    """The right answer: a result for the client's call, `how` (allow unless said) for one that asks."""
    if action.kind == "custom":
        body = encode({"content": [{"type": "text", "text": "42"}]})
        return Arrival(kind="custom_result", body=body, action_id=action.id, answer="result", reference="sevt_x")
    body = encode({"result": how or "allow", "deny_message": "no" if how == "deny" else None})
    return Arrival(kind="confirmation", body=body, action_id=action.id, answer=how or "allow", reference="sevt_x")


class Stage:
    """Commands in, answers out. Whatever breaks a rule fails at once."""

    def __init__(self, *arrivals: Arrival, profile: str = "managed_agents") -> None:
        self.oracle = OracleLedger()
        self.witness = Witness(self.oracle)
        self._numbers = count(100)
        self.lease: Any = None
        config = SessionConfig(session_id=SESSION, title=None, metadata=b"{}", agent=b"{}", environment=b"{}")
        self.commit(
            CreateSession(
                session_id=SESSION,
                workspace_id=WORKSPACE,
                profile=profile,
                agent_id=None,
                agent_version=1,
                environment_id=None,
                model="m",
                config=config,
                arrivals=arrivals,
            )
        )

    def commit(self, command: Any) -> Any:
        """One command, judged."""
        self.witness.before(command)
        result = self.oracle.apply(command)
        self.witness.after(command, result)
        assert self.witness.faults + check_sessions(self.oracle) == []
        return result

    def pass_ms(self, ms: int) -> None:
        self.oracle.clock.advance(milliseconds=ms)

    def send(self, *arrivals: Arrival) -> Any:
        return self.commit(Accept(session_id=SESSION, workspace_id=WORKSPACE, arrivals=arrivals))

    def advance(self, outcome: Any = None, *, worker: UUID = WORKER, lease: Any = None, draining: bool = False) -> Any:
        result = self.commit(
            Advance(
                session_id=SESSION,
                thread_id=THREAD,
                worker_id=worker,
                command_id=UUID(int=next(self._numbers)),
                lease=lease,
                outcome=outcome,
                draining=draining,
            )
        )
        if isinstance(result, (Perform, Working)):
            self.lease = result.lease
        return result

    def look(self, worker: UUID = WORKER) -> Any:
        """Ask for work without a lease."""
        return self.advance(worker=worker)

    def report(self, outcome: Any, **rest: Any) -> Any:
        """Report under the present lease."""
        return self.advance(outcome, lease=self.lease, **rest)

    def release(self) -> Any:
        return self.commit(Release(session_id=SESSION, thread_id=THREAD, lease=self.lease))

    # what is there

    @property
    def session(self) -> Session:
        return self.oracle.all(Session)[0]

    @property
    def turns(self) -> list[Turn]:
        return sorted(self.oracle.all(Turn), key=lambda t: t.gen)

    @property
    def actions(self) -> list[Action]:
        return sorted((a for a in self.oracle.all(Action) if a.state == "open"), key=lambda a: a.position)

    def inputs(self) -> list[tuple[str, str, str | None]]:
        rows = sorted(self.oracle.all(Input), key=lambda i: i.seq)
        return [(i.kind, i.state, i.reason) for i in rows]

    def steps(self, state: str) -> list[Step]:
        rows = [s for s in self.oracle.all(Step) if s.state == state]
        return sorted(rows, key=lambda s: (s.ordinal, s.position, s.try_no))

    def events(self, *types: str) -> list[Event]:
        rows = sorted(self.oracle.all(Event), key=lambda e: e.seq)
        return [e for e in rows if not types or e.type in types]

    def phases(self) -> list[str]:
        return [e.kind for e in self.events("session.phase")]

    def history(self) -> list[dict[str, Any]]:
        return history_of(self.oracle, SESSION)


def replied(step: Step, *calls: str, text: str | None = "ok", stop: Any = None) -> ModelReplied:
    """A reply: a text, then calls of these owners."""
    blocks = () if text is None else (OutBlock(index=0, kind="message", body=encode({"content": text})),)
    native: list[dict[str, Any]] = [] if text is None else [{"type": "text", "text": text}]
    plans: list[CallPlan] = []
    for index, owner in enumerate(calls, start=1):
        identity = call_id(item_id(step.turn_id, step.ordinal, step.try_no, index))
        native.append({"type": "tool_use", "id": identity, "name": owner, "input": {}})
        plans.append(a_call(index, owner))
    return ModelReplied(
        step_id=step.id,
        blocks=blocks,
        calls=tuple(plans),
        transcript=encode(native) if native and stop != "refusal" else None,
        stop_reason=stop or ("tool_use" if calls else "end_turn"),
        stop_details=None,
        usage=Usage(input_tokens=1, output_tokens=2),
    )


def a_call(index: int, owner: Any) -> CallPlan:
    harmless = owner == "read"
    return CallPlan(
        index=index,
        name=owner,
        owner="server" if harmless else owner,
        body=encode({"name": owner, "input": {}}),
        on_lost="repeat" if harmless else "ambiguous",
        error="It was cut off." if owner == "refused" else "",
    )


def erred(step: Step, *, retryable: bool = True, retry_after_ms: int | None = None) -> ModelErred:
    return ModelErred(
        step_id=step.id, code="overloaded", message="no", retryable=retryable, retry_after_ms=retry_after_ms
    )


def returned(step: Step) -> ToolReturned:
    assert step.item_id is not None
    content: list[dict[str, Any]] = [{"type": "text", "text": f"r{step.position}"}]
    return ToolReturned(
        step_id=step.id,
        body=encode({"content": content, "is_error": False}),
        transcript=tool_result(call_id(step.item_id), content, is_error=False),
        is_error=False,
    )


def stopped(step: Step) -> Stopped:
    return Stopped(step_id=step.id)
