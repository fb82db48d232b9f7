"""Writing changes: everything of a batch in one statement, each row joined to the sessions that nobody else moved.

A session that is not returned was not written. Only the tables that a batch touches are part of its statement, so there are a few
dozen forms of it, each prepared once per connection.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final
from uuid import UUID

from perdure.core.facts import Changes, Row
from perdure.domain.session import Session
from perdure.domain.submission import Submission
from perdure.postgres.tables import BY_KIND, CHILDREN, SESSION, Table

# Taken before any session: one batch of a writer at a time, and none that was given up. See `GIVE_UP_SQL`.
MY_TURN: Final = """
me as (select w.id from writer w where w.id = {writer}::uuid and w.batch_no < {batch}::bigint for no key update)"""

GUARD_UPDATE: Final = """
mine as (
    -- the rows nobody changed since we read them; never wait for one
    select s.id from session s join unnest({ids}::uuid[], {revs}::bigint[]) as r (id, rev) on s.id = r.id and s.rev = r.rev
     where exists (select from me)
     order by s.id for no key update of s skip locked),
moved as (
    update session s set ({columns}) = ({values})
      from {rows} join mine on mine.id = n.id
     where s.id = n.id returning s.id)"""

GUARD_LOCKED: Final = """
mine as (
    -- the slow path: the caller's transaction holds these rows already
    select s.id from session s join unnest({ids}::uuid[], {revs}::bigint[]) as r (id, rev) on s.id = r.id and s.rev = r.rev
     where exists (select from me)),
moved as (
    update session s set ({columns}) = ({values})
      from {rows} join mine on mine.id = n.id
     where s.id = n.id returning s.id)"""

# A key that another creation or retry took first keeps its record; ours is not made, and its command reads the facts again. The repeat
# of a creation makes no session: it is written when its record is.
GUARD_CREATE: Final = """
keys as (
    insert into submission ({sub_columns}) select {sub_values} from {sub_rows} where exists (select from me)
    on conflict (digest) do update set ({sub_columns}) = row(excluded.*)
     where (submission.created_at, submission.attempt) = (
        select f.created_at, f.attempt
          from unnest({found}::bytea[], {found_at}::timestamptz[], {found_attempt}::bigint[]) as f (digest, created_at, attempt)
         where f.digest = submission.digest)
    returning digest, session_id),
counted as (
    select c.id from unnest({repeats}::uuid[], {repeated}::bytea[]) as c (id, digest) join keys on keys.digest = c.digest),
moved as (
    insert into session ({columns}) select {values} from {rows}
     where exists (select from me)
       and (n.id not in (select u.id from unnest({keyed}::uuid[]) as u (id)) or n.id in (select session_id from keys))
    returning id),
written as (select id from moved union all select id from counted)"""


GIVE_UP_SQL: Final = """
-- give_up_batch
update writer set batch_no = $2, missed = $3 where id = $1 and batch_no < $2 returning id"""
"""Settles a batch in doubt: it was committed before this, or it never will be, wherever its bytes still are."""

MISSED_SQL: Final = """
-- missed_by_batch
select missed from writer where id = $1"""


class _Parameters:
    def __init__(self) -> None:
        self.count = 0

    def one(self) -> str:
        self.count += 1
        return f"${self.count}"

    def rows(self, table: Table) -> str:
        """The rows of a table as one array of its row type: half the encoding of an array for each column."""
        return f"unnest({self.one()}::{table.name}[]) as n"


@lru_cache(maxsize=512)
def statement(tables: tuple[str, ...], *, stamps: bool, slept: bool, create: bool, locked: bool) -> str:
    """The text for a batch that touches these child tables. The first three parameters are the writer, its batch number
    and the sessions."""
    p = _Parameters()
    written = "written" if create else "moved"
    writer, batch, ids = p.one(), p.one(), p.one()
    parts = [MY_TURN.format(writer=writer, batch=batch), _guard(p, ids, create=create, locked=locked)]
    touched = [t for t in CHILDREN if t.name in tables and not (create and t.kind is Submission)]
    parts += [_child(p, table) for table in touched]
    if stamps:
        parts.append(
            f"stamped as (update event e set processed_seq = n.processed_seq, processed_at = n.processed_at "
            f"from unnest({p.one()}::uuid[], {p.one()}::bigint[], {p.one()}::bigint[], {p.one()}::timestamptz[]) "
            "as n (session_id, seq, processed_seq, processed_at) join moved on moved.id = n.session_id "
            "where e.session_id = n.session_id and e.seq = n.seq)"
        )
    if slept:
        parts.append(
            f"slept as (delete from outbox o using unnest({p.one()}::uuid[], {p.one()}::uuid[]) as n (session_id, thread_id) "
            "join moved on moved.id = n.session_id where o.session_id = n.session_id and o.thread_id = n.thread_id)"
        )
    parts.append(
        f"turn_of_batch as (update writer w set batch_no = {batch}::bigint, missed = array("
        f"select m.id from unnest({ids}::uuid[]) as m (id) where m.id not in (select id from {written})) from me where w.id = me.id)"
    )
    return "-- write_batch\nwith " + ",\n".join(parts) + f"\nselect id from {written}"


def _guard(p: _Parameters, ids: str, *, create: bool, locked: bool) -> str:
    columns = ", ".join(SESSION.names)
    values = ", ".join(f"n.{c}" for c in SESSION.names)
    if create:
        table = BY_KIND[Submission]
        sub_rows = p.rows(table)
        return GUARD_CREATE.format(
            sub_columns=", ".join(table.names),
            sub_values=", ".join(f"n.{c}" for c in table.names),
            sub_rows=sub_rows,
            columns=columns,
            values=values,
            rows=p.rows(SESSION),
            keyed=p.one(),
            found=p.one(),
            found_at=p.one(),
            found_attempt=p.one(),
            repeats=p.one(),
            repeated=p.one(),
        )
    form = GUARD_LOCKED if locked else GUARD_UPDATE
    revs = p.one()
    return form.format(ids=ids, revs=revs, columns=columns, values=values, rows=p.rows(SESSION))


def _child(p: _Parameters, table: Table) -> str:
    columns = ", ".join(table.names)
    values = ", ".join(f"n.{c}" for c in table.names)
    sql = f"{table.name}_rows as (insert into {table.name} ({columns}) select {values} from {p.rows(table)} "
    sql += f"join moved on moved.id = n.{table.session_column}"
    if not table.appended:
        changed = [c for c in table.names if c not in table.key]
        sql += f" on conflict ({', '.join(table.key)}) do update set "
        sql += ", ".join(f"{c} = excluded.{c}" for c in changed)
    return sql + ")"


def compose(
    batch: Sequence[Changes], *, writer_id: UUID, batch_no: int, create: bool = False, locked: bool = False
) -> tuple[str, list[Any]]:
    """The statement and its parameters for the changes of several sessions."""
    by_table: dict[type[Row], list[Row]] = {}
    for changes in batch:
        for kind, rows in changes.rows.items():
            by_table.setdefault(kind, []).extend(rows)
    sessions = by_table.pop(Session, [])
    submissions = by_table.get(Submission, [])
    stamps = [s for c in batch for s in c.stamps]
    slept = [(c.session_id, t) for c in batch for t in c.slept]
    names = tuple(t.name for t in CHILDREN if by_table.get(t.kind))
    sql = statement(names, stamps=bool(stamps), slept=bool(slept), create=create, locked=locked)
    parameters: list[Any] = [writer_id, batch_no, [c.session_id for c in batch]]
    if create:
        parameters.append(BY_KIND[Submission].tuples(submissions))
        parameters.append(SESSION.tuples(sessions))
        found = [s for c in batch for s in c.found]
        parameters.append([s.session_id for s in submissions if isinstance(s, Submission)])
        parameters += [[s.digest for s in found], [s.created_at for s in found], [s.attempt for s in found]]
        repeats = [(c.session_id, s) for c in batch if not c.of(Session) for s in c.of(Submission)]
        parameters += [[i for i, _ in repeats], [s.digest for _, s in repeats if isinstance(s, Submission)]]
    else:
        parameters.append([c.expected_rev for c in batch])
        parameters.append(SESSION.tuples(sessions))
    written = (t for t in CHILDREN if t.name in names and not (create and t.kind is Submission))
    parameters.extend(table.tuples(by_table[table.kind]) for table in written)
    if stamps:
        parameters += [
            [s.session_id for s in stamps],
            [s.seq for s in stamps],
            [s.processed_seq for s in stamps],
            [s.processed_at for s in stamps],
        ]
    if slept:
        parameters += [[s for s, _ in slept], [t for _, t in slept]]
    return sql, parameters
