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
    ) as schemas
from headwater.topic t
left join headwater.kafka_topic k on k.topic_id = t.id
where t.deleted_at is null;

-- Change settings of a topic, all or none; null leaves one as it is. A size of -1 removes the limit.
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
    schemas jsonb default null
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
        (topic_id, timestamp_type, compression_type, compacted, tombstones_kept, retention_bytes)
    select
        t.id,
        coalesce(kafka_alter_topic.timestamp_type, 'CreateTime'),
        coalesce(kafka_alter_topic.compression_type, 'producer'),
        coalesce(kafka_alter_topic.compacted, false),
        coalesce(kafka_alter_topic.tombstones_kept, interval '1 day'),
        nullif(kafka_alter_topic.retention_bytes, -1)
    from headwater.find_topic(kafka_alter_topic.topic) as t
    on conflict (topic_id) do update
    set
        timestamp_type = coalesce(kafka_alter_topic.timestamp_type, k.timestamp_type),
        compression_type = coalesce(kafka_alter_topic.compression_type, k.compression_type),
        compacted = coalesce(kafka_alter_topic.compacted, k.compacted),
        tombstones_kept = coalesce(kafka_alter_topic.tombstones_kept, k.tombstones_kept),
        retention_bytes = nullif(coalesce(kafka_alter_topic.retention_bytes, k.retention_bytes), -1),
        compacted_to = 0;
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
    schemas jsonb default null
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
    if num_nonnulls(timestamp_type, compression_type, compacted, tombstones_kept, retention_bytes) > 0 then
        perform headwater.kafka_alter_topic(
            name, timestamp_type, compression_type, compacted, tombstones_kept, retention_bytes
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

-- Compact what is due of topics that are to be: of events with one key in one lane only the newest stays, and of those
-- without a payload not even that, once they are old enough. Nothing goes that a reader who must not lose an event, or
-- an archive, still needs; and never the last of a lane, from which it counts on. At most about `sweep_size` events of a
-- topic at a time. Returns how many went.
create or replace function headwater.kafka_compact(sweep_size integer default 50000)
returns bigint
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    releasable constant bigint := headwater.releasable();
    due record;
    safe_to bigint;
    gone bigint;
    total bigint := 0;
begin
    -- One at a time: another would look for the same.
    if not pg_try_advisory_xact_lock((29291::bigint << 48) | 1) then
        return 0;
    end if;
    for due in
        select t as topic, k.compacted_to, k.tombstones_kept
        from headwater.kafka_topic k
        join headwater.topic t on t.id = k.topic_id
        where k.compacted and t.kind = 'sequenced' and not t.event_store and t.deleted_at is null
        order by t.id
    loop
        safe_to := least(releasable, headwater.archived_to(due.topic));
        -- Nothing new, and nothing that grew old since.
        continue when safe_to <= due.compacted_to and not exists (
            select from headwater.event e
            where
                e.topic_id = (due.topic).id and e.position <= safe_to and e.payload is null and e.key is not null
                and e.published_at <= clock_timestamp() - due.tombstones_kept
            limit 1
        );
        delete from headwater.event e
        using (
            select r.topic_id, r.position
            from (
                select
                    f.topic_id, f.position, f.key is not null as keyed, f.payload is null as tombstone, f.published_at,
                    row_number() over (partition by f.partition, f.key order by f.topic_offset desc) as newer,
                    row_number() over (partition by f.partition order by f.topic_offset desc) as from_end
                from headwater.event f
                where f.topic_id = (due.topic).id and f.position <= safe_to and f.topic_offset is not null
            ) as r
            where
                r.keyed
                and r.from_end > 1
                and (r.newer > 1 or (r.tombstone and r.published_at <= clock_timestamp() - due.tombstones_kept))
            limit sweep_size
        ) as superseded
        where e.topic_id = superseded.topic_id and e.position = superseded.position;
        get diagnostics gone = row_count;
        total := total + gone;
        if gone < sweep_size then
            update headwater.kafka_topic k set compacted_to = safe_to where k.topic_id = (due.topic).id;
        end if;
    end loop;
    return total;
end;
$$;
