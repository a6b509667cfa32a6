-- The log itself: topics, events, the positions they get, cursors, and the settings of all of it.

-- CACHE 1 is what makes order provable: a backend that cached positions would draw one far below
-- what another has already committed. Nobody may ever set it backwards.
create sequence headwater.position as bigint minvalue 1 maxvalue 281474976710655 cache 1;

create table headwater.setting (
    only_row            boolean  primary key default true check (only_row),
    segment_interval    interval not null default '1 day'
        constraint "a segment interval is at least 1 second" check (segment_interval >= '1 second'),
    segments_ahead      integer  not null default 3
        constraint "segments ahead are 1 to 100" check (segments_ahead between 1 and 100),
    auto_create_topics  boolean  not null default false
);
insert into headwater.setting default values;

create table headwater.topic (
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
    -- The last position of this topic that retention took away; 0 while nothing is missing.
    expired_to        bigint      not null default 0,
    -- A deleted topic keeps its row until its events are gone, so that they are never read as another's.
    deleted_at        timestamptz
);
create unique index topic_name on headwater.topic (name) where deleted_at is null;
comment on column headwater.topic.retention is 'null keeps events for ever';

-- The parts of an event, with what can never be false of them. Domains, since Postgres reads the checks of a table
-- anew for every statement, which cost a third of publishing one event; those of a domain it keeps.
create domain headwater.event_partition as integer constraint "a partition is not negative" check (value >= 0);
create domain headwater.event_offset as bigint constraint "an offset is not negative" check (value >= 0);
create domain headwater.event_key as bytea constraint "a key is up to 65535 bytes" check (octet_length(value) <= 65535);
create domain headwater.event_type as text constraint "a type is 1 to 200 characters" check (length(value) between 1 and 200);
create domain headwater.event_routing_key as text constraint "a routing key is 1 to 255 characters" check (length(value) between 1 and 255);
create domain headwater.event_headers as jsonb constraint "headers are a JSON object" check (jsonb_typeof(value) = 'object');
create domain headwater.event_content_type as text constraint "a content type is 1 to 200 characters" check (length(value) between 1 and 200);
create domain headwater.event_payload as bytea constraint "a payload is up to 64 MiB" check (octet_length(value) <= 67108864);
create domain headwater.event_id as text constraint "an event id is 1 to 255 characters" check (length(value) between 1 and 255);

create table headwater.event (
    position     bigint      not null default nextval('headwater.position'),
    topic_id     integer     not null,
    partition    headwater.event_partition not null default 0,
    -- Dense within (topic, partition); null in an open topic, whose offsets are its positions.
    topic_offset headwater.event_offset,
    key          headwater.event_key,
    type         headwater.event_type,
    routing_key  headwater.event_routing_key,
    headers      headwater.event_headers,
    -- Null: nobody said what the bytes are.
    content_type headwater.event_content_type,
    payload      headwater.event_payload,
    event_id     headwater.event_id,
    published_at timestamptz not null default clock_timestamp(),
    primary key (topic_id, position)
) partition by range (position);
create index event_lane on headwater.event (topic_id, partition, topic_offset) where topic_offset is not null;

-- One physical table of `event`: the positions from `lo` up to, not including, `hi`.
create table headwater.segment (
    lo        bigint      primary key check (lo >= 0),
    hi        bigint      not null unique check (hi > lo),
    opened_at timestamptz,
    closed_at timestamptz check (closed_at >= opened_at),
    -- The last position that was drawn in it: rotation leaves the rest of the range unused.
    last_position bigint check (last_position < hi)
);
comment on column headwater.segment.opened_at is 'when the log was first seen to have reached it; null: made ahead';
comment on column headwater.segment.closed_at is 'when the log was first seen to have left it; null: still open';

-- The offset a lane goes on with when retention has taken its tail.
create table headwater.lane (
    topic_id    integer not null references headwater.topic (id) on delete cascade,
    partition   integer not null check (partition >= 0),
    next_offset bigint  not null check (next_offset >= 1),
    primary key (topic_id, partition)
);

-- Which event ids are taken, and by which event; position is null while the event is still scheduled.
-- No reference to `topic`: its check would cost more than the row. Upkeep clears the ids of topics that are gone.
create table headwater.event_identity (
    topic_id integer not null,
    event_id headwater.event_id not null,
    position bigint,
    primary key (topic_id, event_id)
);

-- Events that enter the log when they are due.
create table headwater.scheduled (
    id           bigint      generated always as identity primary key,
    due_at       timestamptz not null,
    topic_id     integer     not null references headwater.topic (id) on delete cascade,
    key          headwater.event_key,
    type         headwater.event_type,
    routing_key  headwater.event_routing_key,
    headers      headwater.event_headers,
    content_type headwater.event_content_type,
    payload      headwater.event_payload,
    event_id     headwater.event_id
);
create index scheduled_due on headwater.scheduled (due_at);

create table headwater.cursor (
    name          text        primary key
        constraint "a cursor name is 1 to 200 characters" check (length(name) between 1 and 200),
    position      bigint      not null constraint "a position is not negative" check (position >= 0),
    -- What was gone already when the cursor was set: its absence is no loss.
    gone_to       bigint      not null default 0,
    -- Null: the whole log.
    topics        text[],
    -- Retention waits for a cursor that must not lose an event.
    must_not_lose boolean    not null default false,
    updated_at    timestamptz not null default clock_timestamp()
);

-- What crosses the contract when events are read.
create type headwater.stored_event as (
    position     bigint,
    topic        text,
    partition    headwater.event_partition,
    topic_offset headwater.event_offset,
    key          headwater.event_key,
    type         headwater.event_type,
    routing_key  headwater.event_routing_key,
    headers      headwater.event_headers,
    content_type headwater.event_content_type,
    payload      headwater.event_payload,
    event_id     headwater.event_id,
    published_at timestamptz
);
