-- Compaction, and applying a topic's cleanup.policy at once.

-- Record the newest event of each key among the events of a topic after a position, up to another one. Returns the
-- positions of the events that they supersede, before and among these.
create or replace function headwater_internal.kafka_note_keys(topic_id integer, after bigint, up_to bigint)
returns bigint[]
language plpgsql
as $$
declare
    superseded bigint[];
begin
    with fresh as materialized (
        select
            e.partition, sha256(e.key) as digest, e.position,
            case when e.payload is null then e.published_at end as deleted_at,
            row_number() over (partition by e.partition, e.key order by e.topic_offset desc) = 1 as newest
        from headwater_internal.event e
        where
            e.topic_id = kafka_note_keys.topic_id and e.position > after and e.position <= up_to
            and e.key is not null and e.topic_offset is not null
    ), noted as (
        insert into headwater_internal.kafka_key as k (topic_id, partition, digest, position, deleted_at)
        select kafka_note_keys.topic_id, f.partition, f.digest, f.position, f.deleted_at from fresh f where f.newest
        on conflict on constraint kafka_key_pkey do update
        set position = excluded.position, deleted_at = excluded.deleted_at
    )
    select array_agg(s.position) into superseded
    from (
        select f.position from fresh f where not f.newest
        union all
        select k.position
        from fresh f
        -- The limit makes Postgres look up each key, rather than read all keys for a few.
        cross join lateral (
            select k.position
            from headwater_internal.kafka_key k
            where k.topic_id = kafka_note_keys.topic_id and k.partition = f.partition and k.digest = f.digest
            limit 1
        ) as k
        where f.newest
    ) as s;
    return superseded;
end;
$$;

-- Compact the events that a topic received since the last call, up to `sweep_size`: of the events with one key in one
-- partition only the newest stays, and a tombstone (no payload) is removed once it is old enough. Events that a
-- consumer with holds_retention, or an archive, still needs are not removed; nor is the last event of a partition, from
-- which offsets continue. Only new events are read: earlier keys are recorded. `done`: there is nothing more to do now.
create or replace function headwater_internal.kafka_compact_topic(
    target headwater_internal.topic,
    sweep_size integer,
    out compacted bigint,
    out done boolean
)
language plpgsql
as $$
declare
    safe_to constant bigint := headwater_internal.releasable_of(target.id);
    last_offsets constant bigint[] := array(
        select headwater_internal.next_offset(target.id, n.partition) - 1
        from generate_series(0, target.partitions - 1) as n (partition)
        order by n.partition
    );
    known headwater_internal.kafka_topic;
    deleted_before timestamptz;
    up_to bigint;
    seen bigint;
    superseded bigint[];
    deleted bigint[];
begin
    -- The same lock order as in kafka_measure().
    select * into known from headwater_internal.kafka_topic k where k.topic_id = target.id for update;
    known.compacted_to := greatest(known.compacted_to, target.expired_to);
    deleted_before := clock_timestamp() - known.tombstones_kept;
    select coalesce(max(n.position), 0), count(*) into up_to, seen
    from (
        select e.position
        from headwater_internal.event e
        where e.topic_id = target.id and e.position > known.compacted_to and e.position <= safe_to
        order by e.position
        limit sweep_size
    ) as n;
    done := seen < sweep_size;
    if done then
        up_to := greatest(up_to, safe_to);
    end if;
    -- Keys whose newest event was removed by retention.
    delete from headwater_internal.kafka_key k where k.topic_id = target.id and k.position <= target.expired_to;
    if seen > 0 then
        superseded := headwater_internal.kafka_note_keys(target.id, known.compacted_to, up_to);
    end if;
    select array_agg(d.position) into deleted
    from (
        select k.position
        from headwater_internal.kafka_key k
        left join headwater_internal.event e on e.topic_id = k.topic_id and e.position = k.position
        where
            k.topic_id = target.id and k.deleted_at <= deleted_before
            -- Few of them are old enough and all others are below it, so an index by position would not help: `+ 0`
            -- prevents its use.
            and k.position + 0 <= safe_to
            and coalesce(e.topic_offset < last_offsets[k.partition + 1], true)
        limit sweep_size
    ) as d;
    done := done and coalesce(cardinality(deleted), 0) < sweep_size;
    delete from headwater_internal.kafka_key k where k.topic_id = target.id and k.position = any (deleted);
    with gone as (
        delete from headwater_internal.event e
        where e.topic_id = target.id and e.position = any (superseded || deleted)
        returning
            e.partition, e.position, headwater_internal.kafka_event_bytes(e.payload, e.key, e.record_headers, e.headers) as bytes
    ), measured as (
        update headwater_internal.kafka_partition l
        set bytes = greatest(l.bytes - less.bytes, 0)
        from (
            select g.partition, sum(g.bytes) as bytes
            from gone g
            where g.position <= known.measured_to and g.position > target.expired_to
            group by g.partition
        ) as less
        where l.topic_id = target.id and l.partition = less.partition
    )
    select count(*) into compacted from gone;
    update headwater_internal.kafka_topic k
    set compacted_to = up_to
    where k.topic_id = target.id and k.compacted_to < up_to;
end;
$$;

-- Compact all topics with compaction, up to `sweep_size` events of each. `done`: there is nothing more to do now, or
-- another session is compacting.
create or replace function headwater_internal.kafka_compact(
    sweep_size integer default 50000,
    out compacted bigint,
    out done boolean
)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    target headwater_internal.topic;
    swept record;
begin
    compacted := 0;
    done := true;
    -- One session at a time: another would compact the same events. Lock tag: see locks.sql.
    if not pg_try_advisory_xact_lock((29291::bigint << 48) | 1) then
        return;
    end if;
    for target in
        select t.*
        from headwater_internal.kafka_topic k
        join headwater_internal.topic t on t.id = k.topic_id
        where k.compacted and t.kind = 'sequenced' and not t.event_store and t.deleted_at is null
        order by t.id
    loop
        select * into swept from headwater_internal.kafka_compact_topic(target, sweep_size);
        compacted := compacted + swept.compacted;
        done := done and swept.done;
    end loop;
end;
$$;

-- Apply a topic's cleanup.policy now, without waiting for maintenance: compact it if it is compacted, and remove the
-- events beyond its retention by age and size, event by event. About `sweep_size` events of each kind at a time: call
-- and commit until `done`. Events that a consumer with holds_retention, or an archive, still needs are not removed.
-- HW004 if the topic does not exist.
create or replace function headwater.clean_up(
    topic text,
    sweep_size integer default 50000,
    out compacted bigint,
    out expired bigint,
    out done boolean
)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '5s'
as $$
declare
    target headwater_internal.topic;
begin
    perform pg_advisory_xact_lock(29288::bigint << 48);
    target := headwater_internal.find_topic(topic);
    compacted := 0;
    done := true;
    if exists (select from headwater_internal.kafka_topic k where k.topic_id = target.id and k.compacted) and target.kind = 'sequenced'
        and not target.event_store
    then
        perform pg_advisory_xact_lock((29291::bigint << 48) | 1);
        select c.compacted, c.done into compacted, done from headwater_internal.kafka_compact_topic(target, sweep_size) as c;
    end if;
    expired := headwater_internal.shorten(target, by_age => true, sweep_size => sweep_size);
    done := done and expired < sweep_size;
end;
$$;
