-- The Kafka server: what a record carries beyond an event, and the state of brokers, producers and consumer groups.

-- What makes this log one Kafka cluster: clients must see the same id from every broker, and for ever.
create table headwater_internal.kafka_cluster (
    only_row boolean primary key default true check (only_row),
    id       uuid    not null default gen_random_uuid()
);
insert into headwater_internal.kafka_cluster default values;

-- Settings of a topic that only Kafka has; a topic without a row has the defaults.
create table headwater_internal.kafka_topic (
    topic_id         integer primary key references headwater_internal.topic (id) on delete cascade,
    timestamp_type   text    not null default 'CreateTime'
        constraint "message.timestamp.type is CreateTime or LogAppendTime"
        check (timestamp_type in ('CreateTime', 'LogAppendTime')),
    -- With what fetched records are packed; stored they are one by one. `producer` is as good as none here.
    compression_type text    not null default 'producer'
        constraint "compression: producer, uncompressed, gzip, snappy, lz4 or zstd"
        check (compression_type in ('producer', 'uncompressed', 'gzip', 'snappy', 'lz4', 'zstd')),
    -- Of events with one key in one partition only the newest is kept.
    compacted        boolean not null default false,
    -- How long an event without a payload, which deletes its key, is kept when it is the newest.
    tombstones_kept  interval not null default '1 day'
        constraint "delete.retention.ms is 0 or more" check (tombstones_kept >= '0'),
    -- Up to here all is compacted.
    compacted_to     bigint  not null default 0,
    -- How large a partition may get before its oldest events go; null: no limit.
    retention_bytes  bigint
        constraint "retention.bytes is 0 or more, or -1 for no limit" check (retention_bytes >= 0),
    -- Up to which position, and after which, `kafka_partition.bytes` counts.
    measured_to      bigint  not null default 0,
    measured_after   bigint  not null default 0,
    -- Whether retention removes old records, or those above the size limit.
    deletes          boolean not null default true,
    -- Settings of Kafka that mean nothing here, returned as they were given.
    settings         jsonb   not null default '{}' check (jsonb_typeof(settings) = 'object'),
    constraint "cleanup.policy is delete, compact or both" check (compacted or deletes)
);

-- What is known of a partition beyond its events. One without a row begins with its first event, and was never
-- measured.
create table headwater_internal.kafka_partition (
    topic_id     integer not null references headwater_internal.topic (id) on delete cascade,
    partition    integer not null check (partition >= 0),
    -- The first offset that is kept: records below were deleted, or exceeded the size limit of the topic.
    start_offset bigint  not null default 0 check (start_offset >= 0),
    bytes        bigint  not null default 0 check (bytes >= 0),
    primary key (topic_id, partition)
) with (fillfactor = 70);

create sequence headwater_internal.kafka_incarnation as bigint;

-- Broker processes that are alive: each renews its lease. An incarnation is one run of one process, and never another.
create table headwater_internal.kafka_broker (
    node_id     integer     primary key check (node_id >= 1),
    incarnation bigint      not null unique,
    host        text        not null check (length(host) between 1 and 255),
    port        integer     not null check (port between 1 and 65535),
    expires_at  timestamptz not null,
    leased_at   timestamptz not null default clock_timestamp()
);

create sequence headwater_internal.kafka_producer_id as bigint minvalue 1;

-- What is known of an idempotent producer in a partition: its last batches, so that one that comes again is recognised.
create table headwater_internal.kafka_producer_partition (
    producer_id     bigint      not null,
    topic_id        integer     not null references headwater_internal.topic (id) on delete cascade,
    partition       integer     not null check (partition >= 0),
    epoch           integer     not null check (epoch between 0 and 32767),
    -- The newest last; five at most. An offset of -1: the batch waits in a transaction.
    first_sequences integer[]   not null,
    last_sequences  integer[]   not null,
    base_offsets    bigint[]    not null,
    updated_at      timestamptz not null default clock_timestamp(),
    primary key (producer_id, topic_id, partition)
) with (fillfactor = 50);
create index kafka_producer_partition_age on headwater_internal.kafka_producer_partition (updated_at);

-- A consumer group, its coordinator and its current generation.
create table headwater_internal.kafka_group (
    name          text        primary key
        constraint "a Kafka group name is 1 to 32767 characters" check (length(name) between 1 and 32767),
    -- The incarnation of the broker that coordinates it. Whether that one is alive, kafka_broker says.
    coordinator   bigint      not null,
    generation    integer     not null default 0 check (generation >= 0),
    protocol_type text        not null default '',
    -- When it last got a generation, or its coordinator last saw members of it.
    updated_at    timestamptz not null default clock_timestamp()
);

create table headwater_internal.kafka_offset (
    group_name       text        not null references headwater_internal.kafka_group (name) on delete cascade,
    topic_id         integer     not null references headwater_internal.topic (id) on delete cascade,
    partition        integer     not null check (partition >= 0),
    committed_offset bigint      not null check (committed_offset >= 0),
    leader_epoch     integer     not null default -1,
    metadata         text        not null default ''
        constraint "the metadata of an offset is up to 4096 characters" check (length(metadata) <= 4096),
    committed_at     timestamptz not null default clock_timestamp(),
    primary key (group_name, topic_id, partition)
) with (fillfactor = 70);

-- A transactional producer and the state of its transaction.
create table headwater_internal.kafka_transactional_producer (
    transactional_id text        primary key
        constraint "a transactional id is 1 to 32767 characters" check (length(transactional_id) between 1 and 32767),
    producer_id      bigint      not null unique,
    epoch            integer     not null check (epoch between 0 and 32767),
    timeout_ms       integer     not null check (timeout_ms >= 1),
    -- Null: no transaction is open.
    began_at         timestamptz,
    -- How the last one ended, for a client that asks again: committed or aborted.
    last_outcome     text        check (last_outcome in ('committed', 'aborted')),
    -- What the producer was before it asked for its present id and epoch, for when it asks again; null: it did not ask,
    -- another producer fenced it.
    former_id        bigint,
    former_epoch     integer     check (num_nulls(former_id, former_epoch) in (0, 2)),
    updated_at       timestamptz not null default clock_timestamp()
);

-- The records of open transactions. They enter the log when the transaction commits, and are not visible before.
create table headwater_internal.kafka_staged (
    id             bigint    generated always as identity primary key,
    producer_id    bigint    not null references headwater_internal.kafka_transactional_producer (producer_id),
    topic_id       integer   not null references headwater_internal.topic (id) on delete cascade,
    partition      integer   not null check (partition >= 0),
    payloads       bytea[]   not null,
    keys           bytea[],
    types          text[],
    routing_keys   text[],
    headers        text[],
    content_types  text[],
    produced       bigint[],
    record_headers bytea[]
);
create index kafka_staged_producer on headwater_internal.kafka_staged (producer_id);
alter table headwater_internal.kafka_staged alter column payloads set storage external;

-- The offsets that an open transaction will commit, and the groups that it said it would commit for.
create table headwater_internal.kafka_staged_offset (
    producer_id      bigint  not null references headwater_internal.kafka_transactional_producer (producer_id),
    group_name       text    not null,
    topic_id         integer not null references headwater_internal.topic (id) on delete cascade,
    partition        integer not null check (partition >= 0),
    committed_offset bigint  not null check (committed_offset >= 0),
    leader_epoch     integer not null default -1,
    metadata         text    not null default '' check (length(metadata) <= 4096),
    primary key (producer_id, group_name, topic_id, partition)
);

-- The newest event of each key of a compacted topic, as far as it is compacted.
create table headwater_internal.kafka_key (
    topic_id   integer not null references headwater_internal.topic (id) on delete cascade,
    partition  integer not null check (partition >= 0),
    -- SHA-256 of the key, which may be long.
    digest     bytea   not null check (octet_length(digest) = 32),
    position   bigint  not null check (position >= 1),
    -- When it was published, if it has no payload, which deletes the key.
    deleted_at timestamptz,
    primary key (topic_id, partition, digest)
) with (fillfactor = 70);
create index kafka_key_position on headwater_internal.kafka_key (topic_id, position);
create index kafka_key_deleted on headwater_internal.kafka_key (topic_id, deleted_at) where deleted_at is not null;
