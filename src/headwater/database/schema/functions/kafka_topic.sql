-- Kafka's topics: made with their own settings, listed with all that a broker must know of them.

-- A topic as the Kafka door sees it.
create or replace view headwater.kafka_topic_overview as
select
    t.id,
    t.name,
    t.kind,
    -- An event store has marks for its events, which only its own functions write.
    t.kind = 'sequenced' and not t.event_store as writable,
    t.partitions,
    t.retention,
    t.max_payload_bytes,
    t.max_header_bytes,
    coalesce(k.timestamp_type, 'CreateTime') as timestamp_type,
    coalesce(k.compression_type, 'producer') as compression_type,
    coalesce(k.compacted, false) as compacted,
    coalesce(k.tombstones_kept, interval '1 day') as tombstones_kept,
    k.retention_bytes,
    -- What keys and values must fit; null: nothing.
    (
        select jsonb_object_agg(b.part, jsonb_build_array(b.subject, b.framed, b.strategy))
        from headwater.topic_schema b
        where b.topic_id = t.id
    ) as schemas,
    coalesce(k.deletes, true) as deletes,
    coalesce(k.settings, '{}') as settings
from headwater.topic t
left join headwater.kafka_topic k on k.topic_id = t.id
where t.deleted_at is null;

-- Change settings of a topic, all or none; null leaves one as it is. A size of -1 removes the limit. `settings` are those
-- that are only told; what is null in them is forgotten.
create or replace function headwater.kafka_alter_topic(
    topic text,
    timestamp_type text default null,
    compression_type text default null,
    compacted boolean default null,
    tombstones_kept interval default null,
    retention_bytes bigint default null,
    retention interval default null,
    max_payload_bytes integer default null,
    keep_forever boolean default false,
    schemas jsonb default null,
    deletes boolean default null,
    settings jsonb default null
)
returns void
language sql
begin atomic
    -- Nothing happens where there are none.
    select headwater.set_topic_schemas(kafka_alter_topic.topic, s.schemas)
    from (select kafka_alter_topic.schemas as schemas) as s
    where s.schemas is not null;
    select headwater.alter_topic(
        kafka_alter_topic.topic, null, kafka_alter_topic.retention, kafka_alter_topic.max_payload_bytes, null,
        keep_forever
    );
    insert into headwater.kafka_topic as k
        (topic_id, timestamp_type, compression_type, compacted, tombstones_kept, retention_bytes, deletes, settings)
    select
        t.id,
        coalesce(kafka_alter_topic.timestamp_type, 'CreateTime'),
        coalesce(kafka_alter_topic.compression_type, 'producer'),
        coalesce(kafka_alter_topic.compacted, false),
        coalesce(kafka_alter_topic.tombstones_kept, interval '1 day'),
        nullif(kafka_alter_topic.retention_bytes, -1),
        coalesce(kafka_alter_topic.deletes, true),
        jsonb_strip_nulls(coalesce(kafka_alter_topic.settings, '{}'))
    from headwater.find_topic(kafka_alter_topic.topic) as t
    on conflict (topic_id) do update
    set
        timestamp_type = coalesce(kafka_alter_topic.timestamp_type, k.timestamp_type),
        compression_type = coalesce(kafka_alter_topic.compression_type, k.compression_type),
        compacted = coalesce(kafka_alter_topic.compacted, k.compacted),
        tombstones_kept = coalesce(kafka_alter_topic.tombstones_kept, k.tombstones_kept),
        retention_bytes = nullif(coalesce(kafka_alter_topic.retention_bytes, k.retention_bytes), -1),
        deletes = coalesce(kafka_alter_topic.deletes, k.deletes),
        settings = jsonb_strip_nulls(k.settings || coalesce(kafka_alter_topic.settings, '{}'));
end;

-- Make a sequenced topic with its settings, all or nothing.
create or replace function headwater.kafka_create_topic(
    name text,
    partitions integer,
    retention interval default null,
    max_payload_bytes integer default null,
    timestamp_type text default null,
    compression_type text default null,
    compacted boolean default null,
    tombstones_kept interval default null,
    retention_bytes bigint default null,
    schemas jsonb default null,
    deletes boolean default null,
    settings jsonb default null
)
returns integer
language plpgsql
as $$
declare
    created headwater.topic;
begin
    created := headwater.create_topic(
        name, 'sequenced', partitions, retention, coalesce(max_payload_bytes, 1048576)
    );
    if
        num_nonnulls(timestamp_type, compression_type, compacted, tombstones_kept, retention_bytes, deletes, settings) > 0
    then
        perform headwater.kafka_alter_topic(
            name, timestamp_type, compression_type, compacted, tombstones_kept, retention_bytes, deletes => deletes,
            settings => settings
        );
    end if;
    if schemas is not null then
        perform headwater.set_topic_schemas(name, schemas);
    end if;
    return created.id;
end;
$$;

-- The topic that a client named and nobody made, if the log is set to make such. Null: it is not.
create or replace function headwater.kafka_create_missing(name text, partitions integer)
returns integer
language plpgsql
as $$
begin
    if not (select s.auto_create_topics from headwater.setting s) then
        return null;
    end if;
    return (headwater.create_topic(name, 'sequenced', partitions, if_missing => true)).id;
end;
$$;

-- The topics whose whole names a regular expression fits. Postgres looks, since it can be stopped.
create or replace function headwater.kafka_matching_topics(pattern text)
returns setof text
language sql
stable
begin atomic
    select t.name from headwater.topic t where t.deleted_at is null and t.name ~ ('^(?:' || pattern || ')$');
end;
