-- The Kafka door: what a record carries beyond an event, and the state of brokers, producers and consumer groups.

-- Both null for events that did not come as records: they then take no room, and nobody pays for them.
alter table headwater.event
    add column produced_ms bigint,
    add column record_headers bytea;
comment on column headwater.event.produced_ms is
    'the time that a Kafka producer gave, in milliseconds since 1970; null: published_at stands';
comment on column headwater.event.record_headers is
    'the headers of a Kafka record as they came, where `headers` could not give them back to the bit';

-- How long offsets of a consumer group without members are kept after it last committed any.
alter table headwater.setting
    add column kafka_offsets_kept interval not null default '7 days'
        constraint "offsets are kept for more than no time" check (kafka_offsets_kept > '0');

-- What makes this log one Kafka cluster: clients must see the same id from every broker, and for ever.
create table headwater.kafka_cluster (
    only_row boolean primary key default true check (only_row),
    id       uuid    not null default gen_random_uuid()
);
insert into headwater.kafka_cluster default values;

-- Settings of a topic that only Kafka has; a topic without a row has the defaults.
create table headwater.kafka_topic (
    topic_id         integer primary key references headwater.topic (id) on delete cascade,
    timestamp_type   text    not null default 'CreateTime'
        constraint "message.timestamp.type is CreateTime or LogAppendTime"
        check (timestamp_type in ('CreateTime', 'LogAppendTime')),
    -- With what fetched records are packed; stored they are one by one. `producer` is as good as none here.
    compression_type text    not null default 'producer'
        constraint "compression: producer, uncompressed, gzip, snappy, lz4 or zstd"
        check (compression_type in ('producer', 'uncompressed', 'gzip', 'snappy', 'lz4', 'zstd')),
    -- Of events with one key in one lane only the newest is kept.
    compacted        boolean not null default false,
    -- How long an event without a payload, which deletes its key, is kept when it is the newest.
    tombstones_kept  interval not null default '1 day'
        constraint "delete.retention.ms is 0 or more" check (tombstones_kept >= '0'),
    -- Up to here all is compacted.
    compacted_to     bigint  not null default 0,
    -- How large a lane may get before its oldest events go; null: as large as it likes.
    retention_bytes  bigint
        constraint "retention.bytes is 0 or more, or -1 for no limit" check (retention_bytes >= 0),
    -- Up to which position, and after which, `kafka_lane.bytes` counts.
    measured_to      bigint  not null default 0,
    measured_after   bigint  not null default 0
);

-- What is known of a lane beyond its events. One without a row begins with its first event, and was never measured.
create table headwater.kafka_lane (
    topic_id     integer not null references headwater.topic (id) on delete cascade,
    partition    integer not null check (partition >= 0),
    -- Nothing below it is there: it was deleted, or beyond the size that the topic may have.
    start_offset bigint  not null default 0 check (start_offset >= 0),
    bytes        bigint  not null default 0 check (bytes >= 0),
    primary key (topic_id, partition)
) with (fillfactor = 70);

create sequence headwater.kafka_incarnation as bigint;

-- Broker processes that are alive: each renews its lease. An incarnation is one run of one process, and never another.
create table headwater.kafka_broker (
    node_id     integer     primary key check (node_id >= 1),
    incarnation bigint      not null unique,
    host        text        not null check (length(host) between 1 and 255),
    port        integer     not null check (port between 1 and 65535),
    expires_at  timestamptz not null
);

create sequence headwater.kafka_producer_id as bigint minvalue 1;

-- What is known of an idempotent producer in a lane: its last batches, so that one that comes again is recognised.
create table headwater.kafka_producer_lane (
    producer_id     bigint      not null,
    topic_id        integer     not null references headwater.topic (id) on delete cascade,
    partition       integer     not null check (partition >= 0),
    epoch           integer     not null check (epoch between 0 and 32767),
    -- The newest last; five at most. An offset of -1: the batch waits in a transaction.
    first_sequences integer[]   not null,
    last_sequences  integer[]   not null,
    base_offsets    bigint[]    not null,
    updated_at      timestamptz not null default clock_timestamp(),
    primary key (producer_id, topic_id, partition)
) with (fillfactor = 50);
create index kafka_producer_lane_age on headwater.kafka_producer_lane (updated_at);

-- A consumer group, its coordinator and the generation that it must count on from.
create table headwater.kafka_group (
    name          text        primary key
        constraint "a Kafka group name is 1 to 32767 characters" check (length(name) between 1 and 32767),
    -- The incarnation of the broker that coordinates it. Whether that one is alive, kafka_broker says.
    coordinator   bigint      not null,
    generation    integer     not null default 0 check (generation >= 0),
    protocol_type text        not null default '',
    -- When it last got a generation, or its coordinator last saw members of it.
    updated_at    timestamptz not null default clock_timestamp()
);

create table headwater.kafka_offset (
    group_name       text        not null references headwater.kafka_group (name) on delete cascade,
    topic_id         integer     not null references headwater.topic (id) on delete cascade,
    partition        integer     not null check (partition >= 0),
    committed_offset bigint      not null check (committed_offset >= 0),
    leader_epoch     integer     not null default -1,
    metadata         text        not null default ''
        constraint "the metadata of an offset is up to 4096 characters" check (length(metadata) <= 4096),
    committed_at     timestamptz not null default clock_timestamp(),
    primary key (group_name, topic_id, partition)
) with (fillfactor = 70);

-- A transactional producer, and what it is at.
create table headwater.kafka_transaction (
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
    -- somebody else fenced it.
    former_id        bigint,
    former_epoch     integer     check (num_nulls(former_id, former_epoch) in (0, 2)),
    updated_at       timestamptz not null default clock_timestamp()
);

-- The records of open transactions. They enter the log when the transaction commits, and nobody sees them before.
create table headwater.kafka_staged (
    id             bigint    generated always as identity primary key,
    producer_id    bigint    not null references headwater.kafka_transaction (producer_id),
    topic_id       integer   not null references headwater.topic (id) on delete cascade,
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
create index kafka_staged_producer on headwater.kafka_staged (producer_id);
alter table headwater.kafka_staged alter column payloads set storage external;

-- The offsets that an open transaction will commit, and the groups that it said it would commit for.
create table headwater.kafka_staged_offset (
    producer_id      bigint  not null references headwater.kafka_transaction (producer_id),
    group_name       text    not null,
    topic_id         integer not null references headwater.topic (id) on delete cascade,
    partition        integer not null check (partition >= 0),
    committed_offset bigint  not null check (committed_offset >= 0),
    leader_epoch     integer not null default -1,
    metadata         text    not null default '' check (length(metadata) <= 4096),
    primary key (producer_id, group_name, topic_id, partition)
);

-- Who may come in by the doors of the log that listen, and what they may do there. (A role of Postgres is another
-- matter: it comes in by Postgres itself.)
create table headwater.account (
    name            text        primary key
        constraint "an account name is 1 to 200 characters" check (length(name) between 1 and 200),
    -- Verifiers as SCRAM has them, for each of its mechanisms: the password itself is nowhere. Null: the account cannot
    -- come in by that one.
    salt_256        bytea       check (octet_length(salt_256) between 8 and 64),
    iterations_256  integer
        constraint "iterations are 4096 to 1000000"
        check (iterations_256 between 4096 and 1000000 and iterations_512 between 4096 and 1000000),
    stored_key_256  bytea       check (octet_length(stored_key_256) = 32),
    server_key_256  bytea       check (octet_length(server_key_256) = 32),
    salt_512        bytea       check (octet_length(salt_512) between 8 and 64),
    iterations_512  integer,
    stored_key_512  bytea       check (octet_length(stored_key_512) = 64),
    server_key_512  bytea       check (octet_length(server_key_512) = 64),
    check (num_nulls(salt_256, iterations_256, stored_key_256, server_key_256) in (0, 4)),
    check (num_nulls(salt_512, iterations_512, stored_key_512, server_key_512) in (0, 4)),
    -- May do everything, and give rights to others.
    administrator   boolean     not null default false,
    created_at      timestamptz not null default clock_timestamp()
);

create table headwater.permission (
    account  text    not null
        constraint "an account name is 1 to 200 characters" check (length(account) between 1 and 200),
    action   text    not null
        constraint "actions are read, write, create, delete, alter, describe, all"
        check (action in ('read', 'write', 'create', 'delete', 'alter', 'describe', 'all')),
    kind     text    not null
        constraint "a permission is for a topic, a group, a transaction or the log"
        check (kind in ('topic', 'group', 'transaction', 'log')),
    -- Of all that begin with the name, if `prefix`; `*` stands for all.
    name     text    not null check (length(name) between 1 and 32767),
    prefix   boolean not null default false,
    primary key (account, action, kind, name, prefix)
);
comment on column headwater.permission.account is 'the name of an account, or * for everybody';
