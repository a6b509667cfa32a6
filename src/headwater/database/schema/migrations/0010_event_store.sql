-- The event store: topics whose events are found by type and by tag, so that an append can stand under a condition.

create domain headwater_internal.event_tags as text[]
    constraint "an event has up to 100 tags" check (cardinality(value) <= 100 and array_position(value, null) is null);
create domain headwater_internal.index_term as text collate "C"
    constraint "a tag is 1 to 255 characters" check (length(value) between 2 and 256);

-- What an event of an event store is found by: its type (':' and the type) and its tags ('#' and the tag). A table
-- of its own, since an index on `event` would be paid for by every topic. No reference to `topic`: its check would
-- cost as much as the row, and maintenance clears the index terms of topics that are gone.
create table headwater_internal.event_index_term (
    topic_id   integer                       not null,
    index_term headwater_internal.index_term not null,
    position   bigint                        not null,
    primary key (topic_id, index_term, position)
);

-- Fields of the data by which the events of a store are found as well: those with all of them have an index term, '=',
-- the index and a hash of the values. The hash only leads to events; what they have is always looked at.
create table headwater_internal.field_index (
    id       integer generated always as identity primary key,
    topic_id integer not null references headwater_internal.topic (id) on delete cascade,
    name     text    not null constraint "an index name is 1 to 63 characters" check (length(name) between 1 and 63),
    fields   text[]  not null
        constraint "an index has 1 to 8 fields" check (cardinality(fields) between 1 and 8),
    kinds    text[]  not null
        constraint "a field is text, numeric, boolean or timestamp" check (
            kinds <@ array['text', 'numeric', 'boolean', 'timestamp'] and cardinality(kinds) = cardinality(fields)
        ),
    -- Which events it has: [{"field": "k", "operator": "=", "value": "1"}]; all, or one, must hold. Empty: every event.
    conditions jsonb not null default '[]',
    combine    text  not null default 'and'
        constraint "conditions are combined by and, or by or" check (combine in ('and', 'or')),
    -- Events after `fill_to` have their index terms from the start; of the earlier ones, those up to `filled_to`.
    fill_to   bigint  not null,
    filled_to bigint  not null default 0,
    -- Dropped: no longer used; its index terms are being removed.
    dropped   boolean not null default false
);
create unique index field_index_name on headwater_internal.field_index (topic_id, name) where not dropped;

-- States that decisions were made on, kept so that the next decision reads only what came since. Each is of one query,
-- of which `query_hash` stands here, and of one version of the program that made it.
create table headwater_internal.store_snapshot (
    topic_id   integer     not null references headwater_internal.topic (id) on delete cascade,
    name       text        not null
        constraint "the name of snapshots is 1 to 200 characters" check (length(name) between 1 and 200),
    query_hash text        not null check (length(query_hash) <= 64),
    version    integer     not null constraint "a version is 1 or more" check (version >= 1),
    position   bigint      not null constraint "a position is not negative" check (position >= 0),
    state      bytea       not null
        constraint "a snapshot is up to 16 MiB" check (octet_length(state) <= 16777216),
    saved_at   timestamptz not null default clock_timestamp(),
    primary key (topic_id, name, query_hash, version)
);

-- What crosses the contract when an event store is read.
create type headwater.store_event as (
    position     bigint,
    topic_offset bigint,
    event_id     text,
    type         text,
    tags         text[],
    metadata     jsonb,
    content_type text,
    payload      bytea,
    published_at timestamptz
);

-- What became of one append of a group: the positions of its events, or what stood in its way.
create type headwater_internal.append_verdict as (
    positions bigint[],
    -- It was appended before, under the same ids.
    repeated  boolean,
    -- The condition was false: the latest match, 0 if there is none.
    moved_to  bigint,
    -- This id belongs to an event of another append.
    taken_id  text,
    -- The epoch of the log, and the last position that it shares with that of the condition.
    epoch           integer,
    common_position bigint
);

-- Where an event store ends: its last event, and the offset that the next one gets.
create type headwater_internal.store_tail as (
    position    bigint,
    event_id    text,
    next_offset bigint
);
