-- Kafka topics: created with Kafka's settings, and listed with everything that a broker needs.

-- A topic as the Kafka server sees it.
create or replace view headwater_internal.kafka_topic_overview as
select
    t.id,
    t.name,
    t.kind,
    -- The events of an event store have index terms, which only its own functions write.
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
    -- The schemas to which keys and values must conform; null: none.
    (
        select jsonb_object_agg(b.part, jsonb_build_array(b.subject, b.framed, b.strategy))
        from headwater_internal.topic_schema b
        where b.topic_id = t.id
    ) as schemas,
    coalesce(k.deletes, true) as deletes,
    coalesce(k.settings, '{}') as settings
from headwater_internal.topic t
left join headwater_internal.kafka_topic k on k.topic_id = t.id
where t.deleted_at is null;

-- Change settings of a topic, all or none; null leaves one unchanged. A size of -1 removes the limit. `settings` are
-- those that are only stored and reported; a null in them deletes one.
create or replace function headwater_internal.kafka_alter_topic(
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
    -- Does nothing if there are none.
    select headwater_internal.set_topic_schemas(kafka_alter_topic.topic, s.schemas)
    from (select kafka_alter_topic.schemas as schemas) as s
    where s.schemas is not null;
    select headwater.alter_topic(
        kafka_alter_topic.topic, null, kafka_alter_topic.retention, kafka_alter_topic.max_payload_bytes, null,
        keep_forever
    );
    insert into headwater_internal.kafka_topic as k
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
    from headwater_internal.find_topic(kafka_alter_topic.topic) as t
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

-- Create a sequenced topic with its settings, all or nothing; returns its id.
create or replace function headwater_internal.kafka_create_topic(
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
    created headwater_internal.topic;
begin
    created := headwater.create_topic(
        name, 'sequenced', partitions, retention, coalesce(max_payload_bytes, 1048576)
    );
    if
        num_nonnulls(timestamp_type, compression_type, compacted, tombstones_kept, retention_bytes, deletes, settings) > 0
    then
        perform headwater_internal.kafka_alter_topic(
            name, timestamp_type, compression_type, compacted, tombstones_kept, retention_bytes, deletes => deletes,
            settings => settings
        );
    end if;
    if schemas is not null then
        perform headwater_internal.set_topic_schemas(name, schemas);
    end if;
    return created.id;
end;
$$;

-- Create the missing topic that a client named, if the setting `auto_create_topics` is on; returns its id. Null: the
-- setting is off.
create or replace function headwater_internal.kafka_create_missing(name text, partitions integer)
returns integer
language plpgsql
as $$
begin
    if not (select s.auto_create_topics from headwater_internal.setting s) then
        return null;
    end if;
    return (headwater.create_topic(name, 'sequenced', partitions, if_missing => true)).id;
end;
$$;

-- The topics whose whole name matches a regular expression. Evaluated by Postgres, where a timeout can stop it.
create or replace function headwater_internal.kafka_matching_topics(pattern text)
returns setof text
language sql
stable
begin atomic
    select t.name from headwater_internal.topic t where t.deleted_at is null and t.name ~ ('^(?:' || pattern || ')$');
end;
