-- What Spark writes to the log: events staged by its tasks, and which batches were published.

-- Events that a task has handed over and no batch has published yet, many to a row, as publish_batch takes them.
-- Unlogged: a crash of the server empties it, the count at publishing notices, and Spark runs the batch again.
create unlogged table headwater.staged (
    writer        text        not null
        constraint "a writer name is 1 to 200 characters" check (length(writer) between 1 and 200),
    epoch         bigint      not null check (epoch >= 0),
    -- One run of one task. Of several runs of the same task only one is ever published.
    attempt       text        not null check (length(attempt) between 1 and 100),
    place         integer     not null check (place >= 0),
    staged_at     timestamptz not null default clock_timestamp(),
    topic         text        not null,
    payloads      bytea[]     not null,
    keys          bytea[],
    types         text[],
    routing_keys  text[],
    headers       text[],
    content_types text[],
    event_ids     text[],
    primary key (writer, epoch, attempt, place)
);
-- It is read once: compressing it would cost more than it saves.
alter table headwater.staged alter column payloads set storage external;
create index staged_age on headwater.staged (staged_at);

-- The last batch that each writer published. A batch at or below it is a repetition and adds nothing.
create table headwater.writer_epoch (
    writer       text        primary key
        constraint "a writer name is 1 to 200 characters" check (length(writer) between 1 and 200),
    epoch        bigint      not null check (epoch >= 0),
    -- False: the writer had one batch to write and is gone; nobody will ask again.
    replayable   boolean     not null,
    published_at timestamptz not null default clock_timestamp()
);
