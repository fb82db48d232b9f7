-- The ledger. Every row of a session is written under a guard on session.rev; see docs/concepts.md.
-- Bodies are bytea, encoded once and never parsed here: what must be searched is a column of its own.

create table workspace (
    id uuid primary key,
    name text not null constraint workspace_name_is_unique unique,
    created_at timestamptz not null default clock_timestamp()
);

create table api_key (
    id uuid primary key,
    workspace_id uuid not null references workspace (id),
    name text not null,
    digest bytea not null constraint api_key_digest_is_unique unique,
    hint text not null,
    created_at timestamptz not null default clock_timestamp(),
    last_used_at timestamptz,
    revoked_at timestamptz
);

create table agent (
    id uuid primary key,
    workspace_id uuid not null references workspace (id),
    version bigint not null,
    created_at timestamptz not null,
    updated_at timestamptz not null,
    archived_at timestamptz
);
create index agent_newest_first on agent (workspace_id, created_at desc, id desc);

create table agent_version (
    agent_id uuid not null references agent (id),
    version bigint not null,
    body bytea not null,
    created_at timestamptz not null,
    primary key (agent_id, version)
);

create table environment (
    id uuid primary key,
    workspace_id uuid not null references workspace (id),
    body bytea not null,
    created_at timestamptz not null,
    updated_at timestamptz not null,
    archived_at timestamptz
);
create index environment_newest_first on environment (workspace_id, created_at desc, id desc);

-- One per process. Its lease connection holds the advisory lock of its id.
create table worker (
    id uuid primary key,
    host text not null,
    boot text not null,
    pid bigint not null,
    started text not null,
    lease_until timestamptz not null,
    lock_free_since timestamptz,
    dead_at timestamptz
);

-- The last batch that each writer committed, and which of its sessions it did not write because others had moved them: after a lost
-- connection it says what became of the batch in doubt.
create table writer (
    id uuid primary key,
    batch_no bigint not null,
    missed uuid[] not null default '{}'
);

-- The guard. Small and rewritten at each commit, hence the room left in its pages.
create table session (
    id uuid primary key,
    workspace_id uuid not null references workspace (id),
    profile text not null,
    rev bigint not null,
    incarnation bigint not null,
    receipt_seq bigint not null,
    state text not null,
    status text not null,
    agent_id uuid,
    agent_version bigint not null,
    environment_id uuid,
    model text not null,
    input_tokens bigint not null,
    output_tokens bigint not null,
    cache_read_tokens bigint not null,
    cache_creation_5m_tokens bigint not null,
    cache_creation_1h_tokens bigint not null,
    active_ms bigint not null,
    running_since timestamptz,
    created_at timestamptz not null,
    updated_at timestamptz not null,
    archived_at timestamptz,
    seen_at timestamptz not null
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02);
create index session_newest_first on session (workspace_id, created_at desc, id desc);
create index session_being_deleted on session (id) where state = 'deleting';
create index session_tombstone on session (updated_at) where state = 'deleted';

create table session_config (
    session_id uuid primary key,
    title text,
    metadata bytea not null,
    agent bytea not null,
    environment bytea not null
);

-- The slot: turn_id names the one unsettled turn.
create table thread (
    session_id uuid not null,
    id uuid not null,
    parent_id uuid,
    turn_gen bigint not null,
    turn_id uuid,
    causal_pos bigint not null,
    waiting_count bigint not null,
    waiting_bytes bigint not null,
    control_count bigint not null,
    command_id uuid,
    answer bytea,
    created_at timestamptz not null,
    primary key (session_id, id)
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02);

create table input (
    session_id uuid not null,
    seq bigint not null,
    id uuid not null,
    thread_id uuid not null,
    kind text not null,
    state text not null,
    reason text,
    turn_id uuid,
    action_id uuid,
    companion_of bigint,
    causal_pos bigint,
    size_bytes bigint not null,
    authority uuid,
    received_at timestamptz not null,
    settled_at timestamptz,
    primary key (session_id, seq),
    constraint input_terminal_custody_has_a_time
        check ((state in ('dropped', 'cancelled', 'interrupted', 'ambiguous')) <= (settled_at is not null))
) with (fillfactor = 70);
create index input_waiting on input (session_id, thread_id, seq) where state = 'waiting';
create index input_taken on input (session_id) where settled_at is null and state <> 'waiting';

create table turn (
    session_id uuid not null,
    id uuid not null,
    thread_id uuid not null,
    gen bigint not null,
    state text not null,
    wait text,
    wake_at timestamptz,
    attempt_no bigint not null,
    charge bigint not null,
    charged boolean not null,
    worker_id uuid,
    lease_token bigint not null,
    outcome text,
    error_code text,
    round bigint not null,
    cut_rounds bigint not null,
    causal_pos bigint not null,
    out_index bigint not null,
    input_tokens bigint not null,
    output_tokens bigint not null,
    cache_read_tokens bigint not null,
    cache_creation_5m_tokens bigint not null,
    cache_creation_1h_tokens bigint not null,
    progress_at timestamptz not null,
    created_at timestamptz not null,
    ended_at timestamptz,
    primary key (session_id, id),
    constraint turn_generation_is_unique unique (session_id, thread_id, gen),
    constraint turn_active_has_a_worker check ((state = 'active') = (worker_id is not null)),
    constraint turn_settled_has_an_outcome check ((state = 'settled') = (outcome is not null))
) with (fillfactor = 70);
create unique index turn_one_unsettled_per_thread on turn (session_id, thread_id) where state <> 'settled';
create index turn_of_worker on turn (worker_id) where state = 'active';

create table step (
    session_id uuid not null,
    id uuid not null,
    turn_id uuid not null,
    thread_id uuid not null,
    kind text not null,
    ordinal bigint not null,
    try_no bigint not null,
    failures bigint not null,
    round bigint not null,
    position bigint not null,
    name text not null,
    state text not null,
    on_lost text not null,
    serial boolean not null,
    item_id uuid,
    event_seq bigint not null,
    attempt_no bigint not null,
    dispatched_at timestamptz,
    settled_at timestamptz,
    primary key (session_id, id),
    constraint step_try_is_unique unique (session_id, turn_id, ordinal, position, try_no)
) with (fillfactor = 70);
create index step_unsettled on step (session_id) where state in ('prepared', 'dispatched');

create table action (
    session_id uuid not null,
    id uuid not null,
    thread_id uuid not null,
    turn_id uuid not null,
    round bigint not null,
    position bigint not null,
    kind text not null,
    name text not null,
    on_lost text not null,
    serial boolean not null,
    state text not null,
    event_seq bigint not null,
    answer text,
    answer_seq bigint,
    opened_at timestamptz not null,
    primary key (session_id, id),
    constraint action_has_one_answer unique (session_id, answer_seq)
);
create index action_unsettled on action (session_id) where state <> 'closed';

create table control (
    session_id uuid not null,
    seq bigint not null,
    thread_id uuid not null,
    kind text not null,
    state text not null,
    target_turn_id uuid,
    target_gen bigint not null,
    outcome text,
    at timestamptz not null,
    primary key (session_id, seq)
);
create index control_open on control (session_id) where state = 'open';

create table event (
    session_id uuid not null,
    seq bigint not null,
    id uuid not null,
    thread_id uuid not null,
    type text not null,
    kind text not null,
    at timestamptz not null,
    turn_id uuid,
    item_id uuid,
    step_id uuid,
    ref_seq bigint,
    out_index bigint,
    snap bytea not null,
    body bytea,
    processed_seq bigint,
    processed_at timestamptz,
    primary key (session_id, seq)
);

create table transcript (
    session_id uuid not null,
    thread_id uuid not null,
    causal_pos bigint not null,
    position bigint not null,
    kind text not null,
    turn_id uuid not null,
    ref_seq bigint,
    body bytea,
    primary key (session_id, thread_id, causal_pos, position)
);

-- Wakeups: at most one a thread; only an advance takes it away.
create table outbox (
    session_id uuid not null,
    thread_id uuid not null,
    due_at timestamptz not null,
    tries bigint not null,
    primary key (session_id, thread_id)
) with (autovacuum_vacuum_scale_factor = 0.02);
create index outbox_due on outbox (due_at);

create table submission (
    digest bytea primary key,
    session_id uuid not null,
    body_digest bytea not null,
    explicit boolean not null,
    attempt bigint not null,
    first_seq bigint not null,
    last_seq bigint not null,
    process uuid not null,
    written_at timestamptz,
    connection_reused boolean not null,
    created_at timestamptz not null
);
create index submission_old on submission (created_at);
create index submission_of_session on submission (session_id);
