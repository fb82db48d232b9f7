"""Reading facts: every session of a batch in one statement, that is, in one snapshot. No locks."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final
from uuid import UUID

import msgspec

from perdure.core.facts import Facts, Needs
from perdure.domain.barrier import Action
from perdure.domain.control import Control
from perdure.domain.mailbox import Input
from perdure.domain.session import Session, SessionConfig, Thread
from perdure.domain.step import Step
from perdure.domain.submission import Submission
from perdure.domain.turn import Turn
from perdure.domain.wakeup import Wakeup
from perdure.postgres.tables import read_row, read_rows

# What only a busy session has is asked for only when the thread's own row says so: an idle one costs three index look-ups.
FACTS_SQL: Final = """
-- read_facts
select q.id,
       coalesce($8::timestamptz, clock_timestamp()) as now,
       s as session,
       case when q.config then (select c from session_config c where c.session_id = q.id) end as config,
       th.threads,
       array(select o from outbox o where o.session_id = q.id) as wakeups,
       case when th.busy then
           array(select u from turn u where u.session_id = q.id and u.state <> 'settled') end as turns,
       case when th.waiting > 0 and q.heads > 0 then
           array(select i from input i where i.session_id = q.id and i.state = 'waiting' order by i.seq limit q.heads) end as waiting,
       case when th.busy then
           array(select i from input i
                  where i.session_id = q.id and i.settled_at is null and i.state <> 'waiting'
                    and i.state in ('claimed', 'consumed')) end as taken,
       case when th.busy then
           array(select p from step p where p.session_id = q.id and p.state in ('prepared', 'dispatched')) end as steps,
       case when th.busy then
           array(select a from action a where a.session_id = q.id and a.state <> 'closed') end as actions,
       case when cardinality($4::uuid[]) > 0 then
           array(select a from unnest($4::uuid[], $5::uuid[]) as k (session_id, id)
                   join action a on a.session_id = k.session_id and a.id = k.id
                  where k.session_id = q.id and a.state = 'closed') end as closed_actions,
       case when th.controls > 0 then
           array(select c from control c where c.session_id = q.id and c.state = 'open') end as controls,
       case when cardinality($6::uuid[]) > 0 then
           array(select m from unnest($6::uuid[], $7::bytea[]) as k (session_id, digest)
                   join submission m on m.digest = k.digest
                  where k.session_id = q.id) end as submissions,
       case when th.busy then
           array(select w.id from turn u join worker w on w.id = u.worker_id
                  where u.session_id = q.id and u.state = 'active' and w.dead_at is not null) end as dead_workers
  from unnest($1::uuid[], $2::bigint[], $3::boolean[]) as q (id, heads, config)
  left join session s on s.id = q.id
 cross join lateral (
       select array_agg(t) as threads,
              bool_or(t.turn_id is not null) as busy,
              sum(t.waiting_count) as waiting,
              sum(t.control_count) as controls
         from thread t where t.session_id = q.id) as th
"""


class Ask(msgspec.Struct, frozen=True):
    """One session of a batch and what its commands need."""

    session_id: UUID
    needs: tuple[Needs, ...]


def arguments(asks: Sequence[Ask], now: datetime | None) -> list[Any]:
    """The parameters of `FACTS_SQL`."""
    refs = [(a.session_id, ref) for a in asks for ref in sorted({r for n in a.needs for r in n.actions})]
    digests = [(a.session_id, d) for a in asks for d in sorted({d for n in a.needs for d in n.digests})]
    return [
        [a.session_id for a in asks],
        [max(n.heads_max for n in a.needs) for a in asks],
        [any(n.config for n in a.needs) for a in asks],
        [s for s, _ in refs],
        [r for _, r in refs],
        [s for s, _ in digests],
        [d for _, d in digests],
        now,
    ]


def from_record(record: Any) -> tuple[UUID, Facts]:
    """One row of the answer."""
    actions = read_rows(Action, record["actions"]) + read_rows(Action, record["closed_actions"])
    facts = Facts(
        session_id=record["id"],
        now=record["now"],
        session=None if record["session"] is None else read_row(Session, record["session"]),
        config=None if record["config"] is None else read_row(SessionConfig, record["config"]),
        threads=read_rows(Thread, record["threads"]),
        turns=read_rows(Turn, record["turns"]),
        waiting=read_rows(Input, record["waiting"]),
        taken=read_rows(Input, record["taken"]),
        steps=read_rows(Step, record["steps"]),
        actions=actions,
        controls=read_rows(Control, record["controls"]),
        wakeups=read_rows(Wakeup, record["wakeups"]),
        submissions=read_rows(Submission, record["submissions"]),
        dead_workers=frozenset(record["dead_workers"] or ()),
    )
    return facts.session_id, facts
