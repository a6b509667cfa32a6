-- Pipelines that run: who runs one, how far it is, what went wrong.

-- Drawn anew whenever a pipeline begins again, so that no old checkpoint is ever taken for its own.
create sequence headwater.pipeline_generation as bigint;

create table headwater.pipeline (
    name           text        primary key
        constraint "a pipeline name is 1 to 100 characters" check (length(name) between 1 and 100),
    -- As it was declared when it was last started, without addresses and passwords.
    definition     jsonb       not null,
    -- 'log': its place is a position. 'changes': an LSN.
    source         text        not null check (source in ('log', 'changes')),
    -- Names the checkpoint that Spark keeps of it.
    generation     bigint      not null default nextval('headwater.pipeline_generation'),

    -- Whoever holds the token runs it until the lease ends. Tokens only grow: what an older one says is refused.
    runner         text,
    token          bigint      not null default 0,
    leased_until   timestamptz,
    -- Nobody is to run it until somebody starts it by name again.
    stopped        boolean     not null default false,
    started_at     timestamptz,

    -- Everything up to here is durable in all of its sinks.
    place          bigint,
    batches        bigint      not null default 0,
    rows           bigint      not null default 0,
    last_batch     jsonb,
    last_batch_at  timestamptz,

    -- In a row; a batch that succeeds sets it to 0.
    failures       integer     not null default 0,
    last_error     text,
    last_error_at  timestamptz
);

-- A table as it was when a pipeline loaded it whole: the changes that `visible` already saw are in it.
create table headwater.pipeline_snapshot (
    pipeline   text        not null references headwater.pipeline (name) on delete cascade,
    table_name text        not null,
    visible    text        not null,
    -- What commits from here on cannot be in it, so nobody has to ask `visible`, whose numbers come round.
    lsn        bigint      not null,
    rows       bigint      not null,
    taken_at   timestamptz not null default clock_timestamp(),
    primary key (pipeline, table_name)
);
