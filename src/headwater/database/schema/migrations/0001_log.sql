-- The log itself: topics, events, the positions they get, cursors, and the settings of all of it.

-- CACHE 1 is what makes the order provable: a backend that cached positions would assign one far below a position that
-- another backend has already committed. The sequence must never be set backwards.
create sequence headwater_internal.position as bigint minvalue 1 maxvalue 281474976710655 cache 1;

create table headwater_internal.setting (
    only_row            boolean  primary key default true check (only_row),
    segment_interval    interval not null default '1 day'
        constraint "a segment interval is at least 1 second" check (segment_interval >= '1 second'),
    segments_ahead      integer  not null default 3
        constraint "segments ahead are 1 to 100" check (segments_ahead between 1 and 100),
    auto_create_topics  boolean  not null default false,
    -- How long offsets of a Kafka consumer group without members are kept after its last commit.
    kafka_offsets_kept interval not null default '7 days'
        constraint "offsets are kept for more than no time" check (kafka_offsets_kept > '0'),
    -- Ends a publishing transaction that stays open longer; null: never.
    max_publisher_seconds float8
        constraint "a publisher may stay open for 1 second to 30 days" check (max_publisher_seconds between 1 and 2592000)
);
insert into headwater_internal.setting default values;

create table headwater_internal.topic (
    id                integer     generated always as identity primary key,
    name              text        not null
        constraint "a topic name is 1 to 249 of A-Z a-z 0-9 . _ -" check (name ~ '^[A-Za-z0-9_][A-Za-z0-9._-]{0,248}$'),
    kind              text        not null default 'open'
        constraint "a topic is open or sequenced" check (kind in ('open', 'sequenced')),
    partitions        integer     not null default 1
        constraint "partitions are 1 to 1024" check (partitions between 1 and 1024),
    retention         interval    constraint "retention is above zero" check (retention > '0'),
    max_payload_bytes integer     not null default 1048576
        constraint "the payload limit is 1 byte to 64 MiB" check (max_payload_bytes between 1 and 67108864),
    max_header_bytes  integer     not null default 65536
        constraint "the header limit is 2 bytes to 1 MiB" check (max_header_bytes between 2 and 1048576),
    created_at        timestamptz not null default clock_timestamp(),
    -- The last position of this topic that retention removed; 0: none.
    expired_to        bigint      not null default 0,
    -- A deleted topic keeps its row until its events are gone, so that they are never read as another's.
    deleted_at        timestamptz,
    -- All events of the topic have higher positions. Events at or below it with the same topic name belong to a topic
    -- that was deleted before; an archive may still hold them.
    created_after     bigint      not null default 0,
    event_store       boolean     not null default false,
    -- Topics that only Headwater itself writes to: the audit log.
    reserved          boolean     not null generated always as (name = 'headwater.audit') stored,
    -- What an append condition once saw it must always see: nothing may expire, and one partition gives one order.
    constraint "an event store has one sequenced partition and no retention"
        check (not event_store or (kind = 'sequenced' and partitions = 1 and retention is null))
);
create unique index topic_name on headwater_internal.topic (name) where deleted_at is null;
comment on column headwater_internal.topic.retention is 'null keeps events for ever';

-- The parts of an event, with what can never be false of them. Domains, since Postgres reads the checks of a table
-- again for every statement, which cost a third of publishing one event; those of a domain it keeps.
create domain headwater_internal.event_partition as integer constraint "a partition is not negative" check (value >= 0);
create domain headwater_internal.event_offset as bigint constraint "an offset is not negative" check (value >= 0);
create domain headwater_internal.event_key as bytea constraint "a key is up to 65535 bytes" check (octet_length(value) <= 65535);
create domain headwater_internal.event_type as text constraint "a type is 1 to 200 characters" check (length(value) between 1 and 200);
create domain headwater_internal.event_routing_key as text constraint "a routing key is 1 to 255 characters" check (length(value) between 1 and 255);
create domain headwater_internal.event_headers as jsonb constraint "headers are a JSON object" check (jsonb_typeof(value) = 'object');
create domain headwater_internal.event_content_type as text constraint "a content type is 1 to 200 characters" check (length(value) between 1 and 200);
create domain headwater_internal.event_payload as bytea constraint "a payload is up to 64 MiB" check (octet_length(value) <= 67108864);
create domain headwater_internal.event_id as text constraint "an event id is 1 to 255 characters" check (length(value) between 1 and 255);

create table headwater_internal.event (
    position     bigint      not null default nextval('headwater_internal.position'),
    topic_id     integer     not null,
    partition    headwater_internal.event_partition not null default 0,
    -- Dense within (topic, partition); null in an open topic, whose offsets are its positions.
    topic_offset headwater_internal.event_offset,
    key          headwater_internal.event_key,
    type         headwater_internal.event_type,
    routing_key  headwater_internal.event_routing_key,
    headers      headwater_internal.event_headers,
    -- Null: the publisher gave none.
    content_type headwater_internal.event_content_type,
    payload      headwater_internal.event_payload,
    event_id     headwater_internal.event_id,
    published_at timestamptz not null default clock_timestamp(),
    -- The time that a Kafka producer gave, in milliseconds since 1970; null: published_at holds.
    produced_ms    bigint,
    -- The headers of a Kafka record as they came, where `headers` could not return them to the bit.
    record_headers bytea,
    -- Null in every event that was not appended to an event store. A plain array: a column of a domain would have the
    -- whole log scanned; what is appended is cast to the domain headwater_internal.event_tags instead.
    tags           text[],
    primary key (topic_id, position)
) partition by range (position);
create index event_partition_offset on headwater_internal.event (topic_id, partition, topic_offset) where topic_offset is not null;

-- One physical table of `event`: the positions from `lo` up to, not including, `hi`.
create table headwater_internal.segment (
    lo        bigint      primary key check (lo >= 0),
    hi        bigint      not null unique check (hi > lo),
    opened_at timestamptz,
    closed_at timestamptz check (closed_at >= opened_at),
    -- The last position that was assigned in it: rotation leaves the rest of the range unused.
    last_position bigint check (last_position < hi)
);
comment on column headwater_internal.segment.opened_at is 'when the log was first seen to have reached it; null: made ahead';
comment on column headwater_internal.segment.closed_at is 'when the log was first seen to have left it; null: still open';

-- The offset a partition goes on with when retention has taken its tail.
create table headwater_internal.partition_tail (
    topic_id    integer not null references headwater_internal.topic (id) on delete cascade,
    partition   integer not null check (partition >= 0),
    next_offset bigint  not null check (next_offset >= 1),
    primary key (topic_id, partition)
);

-- Which event ids are taken, and by which event; position is null while the event is still scheduled.
-- No reference to `topic`: its check would cost more than the row. Maintenance clears the ids of topics that are gone.
create table headwater_internal.event_identity (
    topic_id integer not null,
    event_id headwater_internal.event_id not null,
    position bigint,
    primary key (topic_id, event_id)
);

-- Events that enter the log when they are due.
create table headwater_internal.scheduled (
    id           bigint      generated always as identity primary key,
    due_at       timestamptz not null,
    topic_id     integer     not null references headwater_internal.topic (id) on delete cascade,
    key          headwater_internal.event_key,
    type         headwater_internal.event_type,
    routing_key  headwater_internal.event_routing_key,
    headers      headwater_internal.event_headers,
    content_type headwater_internal.event_content_type,
    payload      headwater_internal.event_payload,
    event_id     headwater_internal.event_id
);
create index scheduled_due on headwater_internal.scheduled (due_at);

create table headwater_internal.cursor (
    name          text        primary key
        constraint "a cursor name is 1 to 200 characters" check (length(name) between 1 and 200),
    position      bigint      not null constraint "a position is not negative" check (position >= 0),
    -- What was gone already when the cursor was set: its absence is no loss.
    gone_to       bigint      not null default 0,
    -- Null: the whole log.
    topics        text[],
    -- Retention waits for a cursor that must not lose an event.
    holds_retention boolean   not null default false,
    updated_at    timestamptz not null default clock_timestamp(),
    -- The epoch in which the position was saved; null: unknown.
    epoch         integer
);

-- What crosses the contract when events are read.
create type headwater.stored_event as (
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

-- Publishes an event at the times of a cron expression, once, whichever process is alive.
create table headwater_internal.cron_schedule (
    name         text        primary key
        constraint "a schedule name is 1 to 200 characters" check (length(name) between 1 and 200),
    cron         text        not null check (length(cron) between 1 and 200),
    time_zone    text        not null default 'UTC',
    topic_id     integer     not null references headwater_internal.topic (id) on delete cascade,
    key          headwater_internal.event_key,
    type         headwater_internal.event_type,
    routing_key  headwater_internal.event_routing_key,
    headers      headwater_internal.event_headers,
    content_type headwater_internal.event_content_type,
    payload      headwater_internal.event_payload,
    next_at      timestamptz not null,
    last_at      timestamptz,
    paused       boolean     not null default false
);
