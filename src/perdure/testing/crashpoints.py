"""The named crash points, and what a process that is killed there must leave.

A point belongs to the process that passes it: the API for admissions, a worker for the rest. `before_commit` means that the database
never saw the statement; `after_commit` that it was committed, and nobody was told.
"""

from typing import Final, Literal, TypeAlias

import msgspec

Side: TypeAlias = Literal["api", "worker"]
Plan: TypeAlias = Literal["talk", "tool", "park", "delete", "drain", "none"]


class CrashPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One place. `plan` is the work of a client during which it is passed."""

    name: str
    side: Side
    plan: Plan
    leaves: str


def _both(kind: str, side: Side, plan: Plan, before: str, after: str) -> tuple[CrashPoint, CrashPoint]:
    return (
        CrashPoint(name=f"before_commit.{kind}", side=side, plan=plan, leaves=before),
        CrashPoint(name=f"after_commit.{kind}", side=side, plan=plan, leaves=after),
    )


CRASH_POINTS: Final[tuple[CrashPoint, ...]] = (
    *_both("create", "api", "talk", "no session", "the session, which its creator finds by sending the request again"),
    *_both(
        "accept", "api", "talk", "no input", "the input, which runs; sent again with its key it is not admitted twice"
    ),
    *_both(
        "delete",
        "api",
        "delete",
        "the session as it was",
        "a session behind the fence, whose rows the next worker removes",
    ),
    *_both("claim", "worker", "talk", "the input, waiting, with its wakeup", "a turn of a dead worker"),
    *_both(
        "dispatch_model",
        "worker",
        "talk",
        "nothing new",
        "a call that counts as made: it is made again as the next try",
    ),
    CrashPoint(
        name="before_call.model",
        side="worker",
        plan="talk",
        leaves="a dispatched call that was never made; it is made as the next try",
    ),
    CrashPoint(
        name="after_call.model",
        side="worker",
        plan="talk",
        leaves="a reply that nobody has: the call is made again as the next try",
    ),
    *_both("outcome_model", "worker", "talk", "a reply that nobody has", "the reply, once; the turn goes on behind it"),
    *_both(
        "dispatch_tool",
        "worker",
        "tool",
        "a prepared call, not run",
        "a call that may have run: ambiguous, and never run again",
    ),
    CrashPoint(
        name="before_call.tool", side="worker", plan="tool", leaves="a call that was not run, and counts as ambiguous"
    ),
    CrashPoint(
        name="after_call.tool", side="worker", plan="tool", leaves="a call that ran once, and counts as ambiguous"
    ),
    *_both("outcome_tool", "worker", "tool", "a call that ran once, and counts as ambiguous", "its result"),
    *_both("finish", "worker", "talk", "the turn, open; its last call is made again", "the turn, ended once"),
    *_both(
        "park",
        "worker",
        "park",
        "the turn, open; its last call is made again",
        "a parked turn with its action, open once",
    ),
    *_both(
        "resume", "worker", "park", "a turn whose answer was given, with its wakeup", "a resumed turn of a dead worker"
    ),
    CrashPoint(name="after_sweep", side="worker", plan="talk", leaves="wakeups, all of them: looking consumes none"),
    CrashPoint(name="before_renewal", side="worker", plan="tool", leaves="a worker that the next one finds dead"),
    CrashPoint(name="before_workspace_removal", side="worker", plan="delete", leaves="a session behind the fence"),
    CrashPoint(
        name="before_row_removal",
        side="worker",
        plan="delete",
        leaves="a session behind the fence, without its workspace",
    ),
    CrashPoint(name="before_release", side="worker", plan="drain", leaves="a turn of a worker that left or died"),
    CrashPoint(
        name="before_wake", side="worker", plan="none", leaves="a dead worker's turn that the next sweep finds as well"
    ),
)
