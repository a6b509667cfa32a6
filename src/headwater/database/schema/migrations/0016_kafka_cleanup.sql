-- Kafka's cleanup.policy as it was said, compaction that goes on from where it was, and where each lane begins.

alter table headwater.kafka_topic
    -- Whether retention takes what is old, or too much. One that neither deletes nor is compacted there is not.
    add column deletes boolean not null default true,
    -- Settings of Kafka that mean nothing here, told as they were given.
    add column settings jsonb not null default '{}' check (jsonb_typeof(settings) = 'object'),
    add constraint "cleanup.policy is delete, compact or both" check (compacted or deletes);
-- So far it followed from whether there was anything to go by.
update headwater.kafka_topic k
set deletes = false
from headwater.topic t
where t.id = k.topic_id and k.compacted and t.retention is null and k.retention_bytes is null;

-- The newest event of each key of a compacted topic, as far as it is compacted.
create table headwater.kafka_key (
    topic_id   integer not null references headwater.topic (id) on delete cascade,
    partition  integer not null check (partition >= 0),
    -- SHA-256 of the key, which may be long.
    digest     bytea   not null check (octet_length(digest) = 32),
    position   bigint  not null check (position >= 1),
    -- When it was published, if it has no payload, which deletes the key.
    deleted_at timestamptz,
    primary key (topic_id, partition, digest)
) with (fillfactor = 70);
create index kafka_key_position on headwater.kafka_key (topic_id, position);
create index kafka_key_deleted on headwater.kafka_key (topic_id, deleted_at) where deleted_at is not null;
update headwater.kafka_topic k set compacted_to = 0;

-- From now on a lane begins where it is noted to, and at 0 where nothing is: its first event may have been superseded.
insert into headwater.kafka_lane as l (topic_id, partition, start_offset)
select t.id, n.lane, coalesce(min(e.topic_offset), max(c.next_offset), 0)
from headwater.topic t
cross join lateral generate_series(0, t.partitions - 1) as n (lane)
left join headwater.event e
    on e.topic_id = t.id and e.partition = n.lane and e.position > t.expired_to and e.topic_offset is not null
left join headwater.lane c on c.topic_id = t.id and c.partition = n.lane
where t.kind = 'sequenced' and t.expired_to > 0
group by t.id, n.lane
on conflict (topic_id, partition) do update set start_offset = greatest(l.start_offset, excluded.start_offset);

-- It says more than how many went.
drop function if exists headwater.kafka_compact(integer);
