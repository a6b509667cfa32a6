-- What Spark writes to the log: events staged by its tasks, and which batches were published.

-- Events that a task has handed over and no batch has published yet, many to a row, as publish_batch takes them.
-- Unlogged: a crash of the server empties it, the count at publishing notices, and Spark runs the batch again.
create unlogged table headwater_internal.staged (
    writer        text        not null
        constraint "a writer name is 1 to 200 characters" check (length(writer) between 1 and 200),
    epoch         bigint      not null check (epoch >= 0),
    -- One run of one task. Of several runs of the same task only one is ever published.
    attempt       text        not null check (length(attempt) between 1 and 100),
    -- The number of this row within the attempt, from 0.
    chunk_number  integer     not null check (chunk_number >= 0),
    staged_at     timestamptz not null default clock_timestamp(),
    topic         text        not null,
    payloads      bytea[]     not null,
    keys          bytea[],
    types         text[],
    routing_keys  text[],
    headers       text[],
    content_types text[],
    event_ids     text[],
    primary key (writer, epoch, attempt, chunk_number)
);
-- It is read once: compressing it would cost more than it saves.
alter table headwater_internal.staged alter column payloads set storage external;
create index staged_age on headwater_internal.staged (staged_at);

-- The last batch that each writer published. A batch at or below it is a repetition and adds nothing.
create table headwater_internal.writer_epoch (
    writer       text        primary key
        constraint "a writer name is 1 to 200 characters" check (length(writer) between 1 and 200),
    epoch        bigint      not null check (epoch >= 0),
    -- False: the writer had one batch to write and has ended; its epoch is not asked for again.
    replayable   boolean     not null,
    published_at timestamptz not null default clock_timestamp()
);

-- Pipelines that run: who runs one, how far it is, what went wrong.

-- A new number whenever a pipeline starts over, so that it never uses an old checkpoint.
create sequence headwater_internal.checkpoint_epoch as bigint;

create table headwater_internal.pipeline (
    name           text        primary key
        constraint "a pipeline name is 1 to 100 characters" check (length(name) between 1 and 100),
    -- As it was declared when it was last started, without addresses and passwords.
    definition     jsonb       not null,
    -- 'log': its checkpoint is a position. 'changes': an LSN.
    source         text        not null check (source in ('log', 'changes')),
    -- Names the checkpoint that Spark keeps of it.
    checkpoint_epoch bigint    not null default nextval('headwater_internal.checkpoint_epoch'),

    -- The holder of the token runs the pipeline until the lease ends. Tokens only grow: older ones are refused.
    runner         text,
    token          bigint      not null default 0,
    leased_until   timestamptz,
    -- Stopped: no runner takes it until it is started by name.
    stopped        boolean     not null default false,
    started_at     timestamptz,

    -- Everything up to here is durable in all of its sinks.
    checkpoint     bigint,
    batches        bigint      not null default 0,
    rows           bigint      not null default 0,
    last_batch     jsonb,
    last_batch_at  timestamptz,

    -- In a row; a batch that succeeds sets it to 0.
    failures       integer     not null default 0,
    last_error     text,
    last_error_at  timestamptz,
    leased_at      timestamptz,
    -- The epoch in which it was last set back from a history that the log lost; null: never.
    rewound_in     integer
);

-- A table as it was when a pipeline loaded it whole: the changes that `visible` already saw are in it.
create table headwater_internal.pipeline_snapshot (
    pipeline   text        not null references headwater_internal.pipeline (name) on delete cascade,
    table_name text        not null,
    visible    text        not null,
    -- What commits from here on cannot be in it, so `visible`, whose transaction ids wrap around, need not be checked.
    lsn        bigint      not null,
    rows       bigint      not null,
    taken_at   timestamptz not null default clock_timestamp(),
    primary key (pipeline, table_name)
);

-- The last batches of each pipeline, and the tries that failed.
create table headwater_internal.pipeline_batch (
    pipeline text        not null references headwater_internal.pipeline (name) on delete cascade,
    -- In the order in which they ended.
    number   bigint      generated always as identity,
    ended_at timestamptz not null default clock_timestamp(),
    rows     bigint      not null default 0 check (rows >= 0),
    -- As the runner reported it.
    details  jsonb,
    error    text,
    primary key (pipeline, number),
    constraint "a batch has an end or an error" check ((details is null) <> (error is null))
);
