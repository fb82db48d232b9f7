"""The text of reads: views, pages and the feed."""

from typing import Any, Final

from perdure.ports.ledger import EventQuery, SessionQuery

VIEW_SQL: Final = """
-- read_view
select s as session, c as config, t as thread
  from session s
  join session_config c on c.session_id = s.id
  join thread t on t.session_id = s.id and t.parent_id is null
 where s.state not in ('deleting', 'deleted')"""

EVENT_SQL: Final = """
-- read_events
select e as event, o as referred
  from event e
  left join event o on o.session_id = e.session_id and o.seq = e.ref_seq"""

FEED_SQL: Final = f"""{EVENT_SQL}
  join session s on s.id = e.session_id and s.state not in ('deleting', 'deleted')
 where e.session_id = $1 and e.seq > $2
 order by e.seq limit $3"""

TRANSCRIPT_SQL: Final = """
-- read_transcript
select t.session_id, t.thread_id, t.causal_pos, t.position, t.kind, t.turn_id, t.ref_seq, t.body, e.body as ref_body
  from transcript t
  left join event e on e.session_id = t.session_id and e.seq = t.ref_seq
 where t.session_id = $1 and t.thread_id = $2
 order by t.causal_pos, t.position"""


class _Where:
    def __init__(self) -> None:
        self.parts: list[str] = []
        self.parameters: list[Any] = []

    def add(self, template: str, *values: Any) -> None:
        """Add a condition; `{}` stands for each value's place."""
        places: list[str] = []
        for value in values:
            self.parameters.append(value)
            places.append(f"${len(self.parameters)}")
        self.parts.append(template.format(*places))

    def text(self, lead: str) -> str:
        return f"{lead} " + " and ".join(self.parts)


def session_filters(query: SessionQuery) -> tuple[str, list[Any]]:
    """The conditions of a list of sessions, to stand behind `VIEW_SQL`."""
    where = _Where()
    where.add("s.workspace_id = {}", query.workspace_id)
    where.add("s.profile = {}", query.profile)
    if query.agent_id is not None:
        where.add("s.agent_id = {}", query.agent_id)
    if query.agent_version is not None:
        where.add("s.agent_version = {}", query.agent_version)
    if query.statuses is not None:
        where.add("s.status = any({}::text[])", list(query.statuses))
    if not query.include_archived:
        where.add("s.archived_at is null")
    for value, sign in (
        (query.created_after, ">"),
        (query.created_from, ">="),
        (query.created_before, "<"),
        (query.created_until, "<="),
    ):
        if value is not None:
            where.add(f"s.created_at {sign} {{}}", value)
    if query.after is not None:
        sign = "<" if query.descending else ">"
        where.add(f"(s.created_at, s.id) {sign} ({{}}, {{}})", *query.after)
    return where.text("and"), where.parameters


def event_filters(query: EventQuery) -> tuple[str, list[Any]]:
    """The conditions of a list of events, to stand behind `EVENT_SQL`. An input counts from when it was processed."""
    where = _Where()
    where.add("e.session_id = {}", query.session_id)
    where.add("e.type <> 'input.settled'")
    if query.after_seq is not None:
        where.add("e.seq < {}" if query.descending else "e.seq > {}", query.after_seq)
    shown_at = "(case when e.type = 'input.received' then e.processed_at else e.at end)"
    for value, sign in (
        (query.processed_after, ">"),
        (query.processed_from, ">="),
        (query.processed_before, "<"),
        (query.processed_until, "<="),
    ):
        if value is not None:
            where.add(f"{shown_at} {sign} {{}}", value)
    if query.types is not None:
        whole = [t for t, k in query.types if k is None]
        pairs = [(t, k) for t, k in query.types if k is not None]
        where.add(
            "(e.type = any({}::text[]) or (e.type, e.kind) in (select * from unnest({}::text[], {}::text[])))",
            whole,
            [t for t, _ in pairs],
            [k for _, k in pairs],
        )
    return where.text("where"), where.parameters
