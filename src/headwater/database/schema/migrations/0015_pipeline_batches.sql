-- The last batches of each pipeline, and the tries that failed.
-- oldest program: 13

create table headwater.pipeline_batch (
    pipeline text        not null references headwater.pipeline (name) on delete cascade,
    -- In the order in which they ended.
    number   bigint      generated always as identity,
    ended_at timestamptz not null default clock_timestamp(),
    rows     bigint      not null default 0 check (rows >= 0),
    -- As whoever ran it tells of it.
    details  jsonb,
    error    text,
    primary key (pipeline, number),
    constraint "a batch has an end or an error" check ((details is null) <> (error is null))
);
