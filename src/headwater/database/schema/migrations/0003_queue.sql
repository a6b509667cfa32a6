-- Queues: their bindings, leases, retries and dead letters.

-- A position known to be stable, shared by all sessions without a row, a lock or a dead tuple. Unlogged: after a crash
-- it is 0 again, and 0 is always stable.
create unlogged sequence headwater_internal.stable_register as bigint minvalue 0 start 0 cache 1;

-- Proves a lease. Assigned under the queue's lock, so that within a queue the order of tokens is the order of claims.
create sequence headwater_internal.lease_token as bigint maxvalue 549755813887 cache 1;

create table headwater_internal.queue (
    id                  integer     generated always as identity primary key,
    name                text        not null unique
        constraint "a queue name is 1 to 200 characters" check (length(name) between 1 and 200),
    -- 'bindings': a lifecycle for each event. 'subscriptions': one position for all SQL subscriptions of the queue.
    kind                text        not null default 'bindings'
        constraint "a queue is fed by bindings or by subscriptions" check (kind in ('bindings', 'subscriptions')),
    -- Everything at or below is not this queue's; claims with a token up to start_token are of an earlier pass.
    start_position      bigint      not null constraint "a position is not negative" check (start_position >= 0),
    start_token         bigint      not null default 0,
    lease_seconds       float8      not null default 30
        constraint "a lease is 0.1 seconds to 1 day" check (lease_seconds between 0.1 and 86400),
    max_attempts        integer     not null default 5
        constraint "max attempts are 1 to 1000" check (max_attempts between 1 and 1000),
    backoff_seconds     float8      not null default 1
        constraint "a backoff is 0 seconds to 1 day" check (backoff_seconds between 0 and 86400),
    backoff_factor      float8      not null default 2
        constraint "a backoff factor is 1 to 100" check (backoff_factor between 1 and 100),
    backoff_max_seconds float8      not null default 3600
        constraint "the longest backoff is 0 seconds to 30 days" check (backoff_max_seconds between 0 and 2592000),
    backoff_jitter      float8      not null default 0.2
        constraint "jitter is 0 to 1" check (backoff_jitter between 0 and 1),
    -- Null: retries end only with the attempts.
    retry_age_seconds   float8
        constraint "the retry age is 1 second to 10 years" check (retry_age_seconds between 1 and 315360000),
    -- One event of a key at a time, in the order of the log.
    ordered_keys        boolean     not null default false,
    -- Null: no limit on how many events are leased at once.
    max_in_flight       integer     constraint "events in flight are limited to 1 or more" check (max_in_flight >= 1),
    -- Retention waits for a queue that must not lose an event.
    holds_retention     boolean     not null default true,
    paused_at           timestamptz,
    created_at          timestamptz not null default clock_timestamp()
);

-- Which events a queue gets: those above from_position, up to to_position, that fit every part that is given.
create table headwater_internal.binding (
    id            integer generated always as identity primary key,
    queue_id      integer not null references headwater_internal.queue (id) on delete cascade,
    topic_id      integer references headwater_internal.topic (id) on delete cascade,
    type          headwater_internal.event_type,
    -- As in AMQP: words between dots, * for one word, # for any number of them.
    pattern       text
        constraint "a pattern is words between dots" check (length(pattern) between 1 and 255 and pattern !~ '[^.]#|#[^.]|[^.]\*|\*[^.]'),
    pattern_regex text,
    headers       headwater_internal.event_headers,
    from_position bigint  not null check (from_position >= 0),
    to_position   bigint  check (to_position >= from_position),
    -- Whether from_position was given. If not, the binding began at the position of its queue, and a rewind goes below it.
    from_position_given boolean not null default false,
    check ((pattern is null) = (pattern_regex is null))
);
create index binding_topic on headwater_internal.binding (topic_id);
-- A queue may be bound to thousands of topics: the bindings of one topic are found without reading the others.
create index binding_queue_topic on headwater_internal.binding (queue_id, topic_id);

-- One row per claimed batch, appended; the newest row is the queue's claimed position. No index but the key, so that
-- acknowledging is an update in place; fillfactor leaves the room for it. No foreign key either: it would lock
-- the queue's row at every claim.
create table headwater_internal.ledger (
    queue_id     integer     not null,
    token        bigint      not null,
    lo           bigint      not null,
    hi           bigint      not null,
    -- How many events of the queue the range held.
    events       integer     not null check (events >= 0),
    worker       text        not null,
    expires_at   timestamptz not null,
    settled      boolean     not null,
    acked        int8multirange,
    acked_events integer     not null default 0,
    -- In a queue with ordered keys: whose keys are busy while this is not settled.
    keys         bigint[],
    -- When this was claimed, no retry that was due by then was left; null: not checked.
    due_after    timestamptz,
    -- The clock when the lease began. If it is later than the clock, the clock was set back since, and the rest of the
    -- lease is counted from now on: see redate() in clock.sql.
    dated_at     timestamptz not null default clock_timestamp(),
    primary key (queue_id, token),
    check (lo <= hi + 1)
) with (fillfactor = 60);

-- The progress of a queue, updated from time to time: all claims below the token are settled and can be deleted.
create table headwater_internal.queue_progress (
    queue_id      integer primary key references headwater_internal.queue (id) on delete cascade,
    settled_token bigint  not null,
    -- Events claimed in rows of the ledger that are deleted.
    past_events   bigint  not null
) with (fillfactor = 20);

-- Events that failed at the first attempt, or that wait for another event of their key.
create table headwater_internal.redelivery (
    queue_id   integer     not null,
    position   bigint      not null check (position >= 1),
    topic_id   integer     not null,
    -- Tries that were this event's own. A lease that ran out with several events in it counts for none of them.
    attempt    integer     not null check (attempt >= 0),
    -- When it may be claimed; while leased, when the lease ends; infinity: behind another event of its key.
    visible_at timestamptz not null,
    token      bigint,
    worker     text,
    -- Its lease expired once, so it may be what crashes workers: it is leased without any other event.
    isolated   boolean     not null default false,
    key_hash   bigint,
    last_error text        check (length(last_error) <= 10000),
    history    jsonb       not null default '[]',
    -- As in ledger.
    dated_at   timestamptz not null default clock_timestamp(),
    primary key (queue_id, position)
) with (fillfactor = 70);
-- Without the events that wait behind another of their key. This also keeps lookups by position, key or token from using
-- this index, which statistics of other queues can make look cheap: they would read every event of the queue.
create index redelivery_due on headwater_internal.redelivery (queue_id, visible_at) where visible_at < 'infinity';
-- The cast keeps lookups by key from using the primary key, which also begins with queue_id: they would read every waiting
-- event of the queue and sort them.
create index redelivery_key on headwater_internal.redelivery ((queue_id::bigint), key_hash, position)
where key_hash is not null;
create index redelivery_token on headwater_internal.redelivery (queue_id, token) where token is not null;

-- Events that a queue has given up on.
create table headwater_internal.dead_letter (
    queue_id   integer     not null,
    position   bigint      not null check (position >= 1),
    topic_id   integer     not null,
    attempts   integer     not null check (attempts >= 0),
    isolated   boolean     not null,
    last_error text        check (length(last_error) <= 10000),
    history    jsonb       not null,
    died_at    timestamptz not null default clock_timestamp(),
    -- A dead letter of a SQL subscription names the subscription and the handler that gave up; one of a queue names
    -- neither. The foreign key is added with the table of subscriptions.
    subscription_id bigint,
    handler    text        check (length(handler) between 1 and 200),
    constraint dead_letter_identity unique nulls not distinct (queue_id, position, subscription_id, handler),
    constraint "a subscriber's dead letter names its handler" check ((subscription_id is null) = (handler is null))
);
create index dead_letter_subscription on headwater_internal.dead_letter (subscription_id) where subscription_id is not null;

-- An event as a worker gets it: the proof of the lease, which try this is, and the event.
create type headwater.claimed_event as (
    token        bigint,
    attempt      integer,
    isolated     boolean,
    expires_at   timestamptz,
    position     bigint,
    topic        text,
    partition    headwater_internal.event_partition,
    topic_offset headwater_internal.event_offset,
    key          headwater_internal.event_key,
    type         headwater_internal.event_type,
    routing_key  headwater_internal.event_routing_key,
    headers      headwater_internal.event_headers,
    content_type headwater_internal.event_content_type,
    payload      headwater_internal.event_payload,
    event_id     headwater_internal.event_id,
    published_at timestamptz
);

-- When a worker last asked a queue for events, written at most once in ten seconds. No row: none ever did.
create table headwater_internal.queue_activity (
    queue_id   integer     primary key references headwater_internal.queue (id) on delete cascade,
    claimed_at timestamptz not null,
    worker     text        not null
) with (fillfactor = 20);
