"""The text of reads: views, pages and the feed."""

from typing import Any, Final

from perdure.ports.ledger import READ_BYTES_MAX, EventQuery, SessionQuery

VIEW_SQL: Final = """
-- read_view
select s as session, c as config, t as thread
  from session s
  join session_config c on c.session_id = s.id
  join thread t on t.session_id = s.id and t.parent_id is null
 where s.state not in ('deleting', 'deleted')"""


def _bounded(name: str, where: str, *, order: str, rows: str, size: str) -> str:
    """A read of events that is bounded by rows and bytes. `where` is about `e` and has the session as `$1`; `rows` and `size` are places.

    A row of the answer is a row of the page, or (not `listed`) one that such a row refers to; in no order, and each once.

    No plan of it can be bad, whatever the statistics say: bodies are looked at only for their length, which reads none of them, until
    the page is known. Then each is read once, by key. There is no join of `event` with itself, since a nested loop would read every
    body of one side for each row of the other. The bound on rows is a parameter, since a plan for all values of it stops early.
    """
    return f"""
-- {name}
with near as materialized (
    select e.seq, e.ref_seq, octet_length(e.snap) + coalesce(octet_length(e.body), 0) as size
      from event e
     {where}
     order by e.seq {order} limit {rows}
), behind as materialized (
    select o.seq, octet_length(o.body) as size
      from event o
     where o.session_id = $1 and o.seq = any(array(select n.ref_seq from near n where n.ref_seq is not null))
), measured as materialized (
    select n.seq, n.ref_seq, sum(n.size + coalesce(b.size, 0)) over (
               order by n.seq {order} rows between unbounded preceding and 1 preceding
           ) as size_before
      from near n
      left join behind b on b.seq = n.ref_seq
), page as materialized (
    select m.seq, m.ref_seq from measured m where m.size_before is null or m.size_before < {size}
)
select e as event, e.seq = any(array(select p.seq from page p)) as listed
  from event e
 where e.session_id = $1
   and e.seq = any(array(select p.seq from page p union all select p.ref_seq from page p where p.ref_seq is not null))"""


FEED_SQL: Final = _bounded(
    "read_feed",
    """where e.session_id = $1 and e.seq > $2
       and exists (select from session s where s.id = $1 and s.state not in ('deleting', 'deleted'))""",
    order="asc",
    rows="$3",
    size="$4",
)

SPAN_SQL: Final = """
-- read_span
select e as event
  from event e
 where e.session_id = $1 and e.seq between $2 and $3 and e.type = 'input.received'
 order by e.seq"""

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


def event_read(query: EventQuery) -> tuple[str, list[Any]]:
    """A read for a list of events. An input counts from when it was processed."""
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
    parameters = [*where.parameters, query.limit, READ_BYTES_MAX]
    sql = _bounded(
        "read_events",
        where.text("where"),
        order="desc" if query.descending else "asc",
        rows=f"${len(parameters) - 1}",
        size=f"${len(parameters)}",
    )
    return sql, parameters
