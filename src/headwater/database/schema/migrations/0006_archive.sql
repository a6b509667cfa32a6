-- Archives: where events are kept outside of this database, so that retention waits for them and readers find them.

-- A location that receives all events of some topics. Retention waits for it.
create table headwater_internal.archive (
    name          text        primary key
        constraint "an archive name is 1 to 200 characters" check (length(name) between 1 and 200),
    -- A directory or an address, as readers on any machine find it.
    location      text        not null
        constraint "a location is 1 to 2000 characters" check (length(location) between 1 and 2000),
    -- Null: the whole log.
    topics        text[],
    -- Every event up to here is in it, but for those that archive_start says are missing.
    archived_to   bigint      not null check (archived_to >= 0),
    registered_at timestamptz not null default clock_timestamp(),
    updated_at    timestamptz not null default clock_timestamp()
);

-- What an archive began too late for. A topic without a row here is in it from its first event on.
create table headwater_internal.archive_start (
    archive    text    not null references headwater_internal.archive (name) on delete cascade,
    topic_id   integer not null references headwater_internal.topic (id) on delete cascade,
    -- The position of the last event that it does not have: a real event, as in topic.expired_to.
    missing_to bigint  not null check (missing_to >= 1),
    primary key (archive, topic_id)
);

-- Replays: what is copied, to where, and how far that is. A replay that was killed goes on by its name.
create table headwater_internal.replay (
    name           text        primary key
        constraint "a replay name is 1 to 100 characters" check (length(name) between 1 and 100),
    -- What was asked for. The same name with another request is a mistake.
    request        jsonb       not null,
    -- What was found out when it began, and has to stay as it was: where a queue was rewound to, for instance.
    plan           jsonb       not null default '{}',
    start_after    bigint      not null check (start_after >= 0),
    up_to          bigint      not null check (up_to >= 0),
    -- Everything that was asked for up to here has arrived.
    done_to        bigint      not null,
    events         bigint      not null default 0 check (events >= 0),
    started_at     timestamptz not null default clock_timestamp(),
    updated_at     timestamptz not null default clock_timestamp(),
    finished_at    timestamptz,
    check (done_to >= start_after)
);
