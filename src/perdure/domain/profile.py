"""A profile: the values that make one core behave as three products. A session is given one at creation."""

from typing import Final, Literal, TypeAlias

import msgspec

ProfileName: TypeAlias = Literal["managed_agents", "agents_api", "chat"]


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """One row of policy values. Code asks the value, never the name."""

    name: ProfileName
    while_running: Literal["wait", "steer", "lane"]
    turn_row_at: Literal["claim", "admission"]
    duplicate_answer: Literal["refuse", "accept", "tell"]
    on_permanent_failure: Literal["terminate", "continue", "suspend"]
    flush_on_exhaustion: bool
    stop_decides_at: Literal["admission", "confirmation"]
    keep_partial: bool
    publish_retries: bool
    delivery_barrier: bool


PROFILES: Final[dict[str, Profile]] = {
    "managed_agents": Profile(
        name="managed_agents",
        while_running="wait",
        turn_row_at="claim",
        duplicate_answer="refuse",
        on_permanent_failure="terminate",
        flush_on_exhaustion=True,
        stop_decides_at="admission",
        keep_partial=False,
        publish_retries=True,
        delivery_barrier=False,
    ),
    "agents_api": Profile(
        name="agents_api",
        while_running="steer",
        turn_row_at="admission",
        duplicate_answer="accept",
        on_permanent_failure="continue",
        flush_on_exhaustion=False,
        stop_decides_at="confirmation",
        keep_partial=True,
        publish_retries=False,
        delivery_barrier=False,
    ),
    "chat": Profile(
        name="chat",
        while_running="lane",
        turn_row_at="claim",
        duplicate_answer="tell",
        on_permanent_failure="suspend",
        flush_on_exhaustion=False,
        stop_decides_at="confirmation",
        keep_partial=True,
        publish_retries=False,
        delivery_barrier=True,
    ),
}
