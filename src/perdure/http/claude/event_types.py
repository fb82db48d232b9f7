"""The event types of this face: which there are, who sends them, and from which rows each is read."""

from collections.abc import Iterable, Mapping
from typing import Final

CLIENT_TYPES: Final = (
    "user.message",
    "user.interrupt",
    "user.tool_confirmation",
    "user.custom_tool_result",
    "user.tool_result",
    "user.define_outcome",
    "system.message",
)

RowPair = tuple[str, str | None]
"""A row type and the kind of row, as the ledger filters by."""

_RESTING: Final = ("idle", "wait_action", "wait_env", "failed")


def _phases(*kinds: str) -> tuple[RowPair, ...]:
    return tuple(("session.phase", kind) for kind in kinds)


ROWS: Final[Mapping[str, tuple[RowPair, ...]]] = {
    "user.message": (("input.received", "message"),),
    "user.interrupt": (("input.received", "interrupt"),),
    "user.tool_confirmation": (("input.received", "confirmation"),),
    "user.custom_tool_result": (("input.received", "custom_result"),),
    "system.message": (("input.received", "system"),),
    "agent.message": (("item.closed", "message"),),
    "agent.thinking": (("item.closed", "thinking"),),
    "agent.tool_use": (("item.opened", "tool"),),
    "agent.custom_tool_use": (("item.opened", "custom"),),
    "agent.tool_result": (("item.closed", "tool"),),
    "session.error": (("session.error", None),),
    "session.updated": (("session.updated", None),),
    "session.status_running": _phases("active"),
    "session.status_idle": _phases(*_RESTING),
    "session.status_rescheduled": _phases("retrying"),
    "session.status_terminated": _phases("terminated"),
    "session.thread_status_running": _phases("active"),
    "session.thread_status_idle": _phases(*_RESTING),
    "session.thread_status_rescheduled": _phases("retrying"),
    "session.thread_status_terminated": _phases("terminated"),
    "session.usage": _phases(*_RESTING),
    "span.model_request_start": (("step.model.started", None),),
    "span.model_request_end": (("step.model.ended", None),),
}
"""What lists are made of. The types that the SDK knows and no row becomes yet are in `RESERVED`."""

RESERVED: Final = (
    "user.tool_result",
    "user.define_outcome",
    "agent.mcp_tool_use",
    "agent.mcp_tool_result",
    "agent.thread_message_received",
    "agent.thread_message_sent",
    "agent.thread_context_compacted",
    "session.thread_created",
    "span.outcome_evaluation_start",
    "span.outcome_evaluation_end",
    "span.outcome_evaluation_ongoing",
    "workflow_run.created",
    "workflow_run.status_running",
    "workflow_run.status_idle",
    "workflow_run.status_ended",
    "workflow_run.error",
    "workflow_run.phase_started",
    "workflow_run.phase_ended",
)

EVENT_TYPES: Final = frozenset(ROWS) | frozenset(RESERVED)
"""Every value that `types[]` takes."""


def rows_of(types: Iterable[str]) -> tuple[RowPair, ...]:
    """The rows to read for these types, each once, in a stable order."""
    return tuple(dict.fromkeys(pair for kind in types for pair in ROWS.get(kind, ())))
