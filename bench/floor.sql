-- The least that an admission must do, in one call: the yardstick for B1 and B2. It shares no table with the server, so that neither
-- can hold up the other, and it stands in a schema of its own: dropping the schema leaves nothing behind.
--
-- One call numbers a message within its session, keeps the message as an event, puts it into the session's mailbox, marks the session
-- as running, and leaves a wakeup for whoever runs turns. What it leaves out, and the server does: authentication, recognising
-- repeats, limits of the mailbox, the rows that show the change of status, and the thread's counts.
drop schema if exists floor cascade;
create schema floor;

create table floor.session (
    id bigint primary key,
    seq bigint not null,
    status text not null,
    updated_at timestamptz not null
) with (fillfactor = 50);

create table floor.event (
    session_id bigint not null,
    seq bigint not null,
    type text not null,
    at timestamptz not null,
    body bytea not null,
    primary key (session_id, seq)
);

create table floor.input (
    session_id bigint not null,
    seq bigint not null,
    state text not null,
    size_bytes bigint not null,
    received_at timestamptz not null,
    primary key (session_id, seq)
) with (fillfactor = 70);

create table floor.outbox (
    session_id bigint primary key,
    due_at timestamptz not null
);
create index outbox_due on floor.outbox (due_at);

create function floor.admit(session bigint, body bytea) returns bigint language plpgsql as $$
declare
    next_seq bigint;
begin
    update floor.session s set seq = s.seq + 1, status = 'running', updated_at = clock_timestamp()
     where s.id = session returning s.seq into strict next_seq;
    insert into floor.event (session_id, seq, type, at, body)
    values (session, next_seq, 'user.message', clock_timestamp(), body);
    insert into floor.input (session_id, seq, state, size_bytes, received_at)
    values (session, next_seq, 'waiting', octet_length(body), clock_timestamp());
    insert into floor.outbox (session_id, due_at) values (session, clock_timestamp()) on conflict (session_id) do nothing;
    return next_seq;
end
$$;

insert into floor.session select n, 0, 'idle', clock_timestamp() from generate_series(1, 10000) as n;
