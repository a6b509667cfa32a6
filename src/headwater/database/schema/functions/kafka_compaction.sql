-- Compaction, and a topic's cleanup.policy applied at once.

-- Compact what came to a topic since the last time, up to `sweep_size` events: of events with one key in one lane only the
-- newest stays, and of those without a payload not even that, once they are old enough. Nothing goes that a reader who must
-- not lose an event, or an archive, still needs; and never the last of a lane, from which it counts on. Only what is new
-- is read: what there was of its keys is known. `done`: there is no more to do by now.
create or replace function headwater.kafka_compact_topic(
    target headwater.topic,
    sweep_size integer,
    out compacted bigint,
    out done boolean
)
language plpgsql
as $$
declare
    safe_to constant bigint := headwater.releasable_of(target.id);
    last_offsets constant bigint[] := array(
        select headwater.next_offset(target.id, n.lane) - 1
        from generate_series(0, target.partitions - 1) as n (lane)
        order by n.lane
    );
    known headwater.kafka_topic;
    deleted_before timestamptz;
    up_to bigint;
    seen bigint;
    superseded bigint[];
    deleted bigint[];
begin
    -- The order in which kafka_measure locks them.
    select * into known from headwater.kafka_topic k where k.topic_id = target.id for update;
    known.compacted_to := greatest(known.compacted_to, target.expired_to);
    deleted_before := clock_timestamp() - known.tombstones_kept;
    select coalesce(max(n.position), 0), count(*) into up_to, seen
    from (
        select e.position
        from headwater.event e
        where e.topic_id = target.id and e.position > known.compacted_to and e.position <= safe_to
        order by e.position
        limit sweep_size
    ) as n;
    done := seen < sweep_size;
    if done then
        up_to := greatest(up_to, safe_to);
    end if;
    -- Keys whose newest event retention took.
    delete from headwater.kafka_key k where k.topic_id = target.id and k.position <= target.expired_to;
    if seen > 0 then
        with fresh as materialized (
            select
                e.partition, sha256(e.key) as digest, e.position,
                case when e.payload is null then e.published_at end as deleted_at,
                row_number() over (partition by e.partition, e.key order by e.topic_offset desc) = 1 as newest
            from headwater.event e
            where
                e.topic_id = target.id and e.position > known.compacted_to and e.position <= up_to
                and e.key is not null and e.topic_offset is not null
        ), noted as (
            insert into headwater.kafka_key as k (topic_id, partition, digest, position, deleted_at)
            select target.id, f.partition, f.digest, f.position, f.deleted_at from fresh f where f.newest
            on conflict on constraint kafka_key_pkey do update
            set position = excluded.position, deleted_at = excluded.deleted_at
        )
        select array_agg(s.position) into superseded
        from (
            select f.position from fresh f where not f.newest
            union all
            select k.position
            from fresh f
            -- The limit has Postgres look each key up, rather than read all keys for a few.
            cross join lateral (
                select k.position
                from headwater.kafka_key k
                where k.topic_id = target.id and k.partition = f.partition and k.digest = f.digest
                limit 1
            ) as k
            where f.newest
        ) as s;
    end if;
    select array_agg(d.position) into deleted
    from (
        select k.position
        from headwater.kafka_key k
        left join headwater.event e on e.topic_id = k.topic_id and e.position = k.position
        where
            k.topic_id = target.id and k.deleted_at <= deleted_before
            -- Few of them are old enough, and all others are below it, so that an index by position would not help.
            and k.position + 0 <= safe_to
            and coalesce(e.topic_offset < last_offsets[k.partition + 1], true)
        limit sweep_size
    ) as d;
    done := done and coalesce(cardinality(deleted), 0) < sweep_size;
    delete from headwater.kafka_key k where k.topic_id = target.id and k.position = any (deleted);
    with gone as (
        delete from headwater.event e
        where e.topic_id = target.id and e.position = any (superseded || deleted)
        returning
            e.partition, e.position, headwater.kafka_event_bytes(e.payload, e.key, e.record_headers, e.headers) as bytes
    ), measured as (
        update headwater.kafka_lane l
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
    update headwater.kafka_topic k
    set compacted_to = up_to
    where k.topic_id = target.id and k.compacted_to < up_to;
end;
$$;

-- Compact all topics that are to be: of each what is due, up to `sweep_size` events. `done`: there is no more to do by now,
-- or somebody else is at it.
create or replace function headwater.kafka_compact(
    sweep_size integer default 50000,
    out compacted bigint,
    out done boolean
)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    target headwater.topic;
    swept record;
begin
    compacted := 0;
    done := true;
    -- One at a time: another would look for the same.
    if not pg_try_advisory_xact_lock((29291::bigint << 48) | 1) then
        return;
    end if;
    for target in
        select t.*
        from headwater.kafka_topic k
        join headwater.topic t on t.id = k.topic_id
        where k.compacted and t.kind = 'sequenced' and not t.event_store and t.deleted_at is null
        order by t.id
    loop
        select * into swept from headwater.kafka_compact_topic(target, sweep_size);
        compacted := compacted + swept.compacted;
        done := done and swept.done;
    end loop;
end;
$$;

-- Apply a topic's cleanup.policy now, without waiting for upkeep: compact it if it is to be, and take what is older or more
-- than its retention says, to the event. About `sweep_size` events of each at a time: call it, and commit, until `done`.
-- Nothing goes that a reader who must not lose an event, or an archive, still needs.
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
    target headwater.topic;
begin
    perform pg_advisory_xact_lock(29288::bigint << 48);
    target := headwater.find_topic(topic);
    compacted := 0;
    done := true;
    if exists (select from headwater.kafka_topic k where k.topic_id = target.id and k.compacted) and target.kind = 'sequenced'
        and not target.event_store
    then
        perform pg_advisory_xact_lock((29291::bigint << 48) | 1);
        select c.compacted, c.done into compacted, done from headwater.kafka_compact_topic(target, sweep_size) as c;
    end if;
    expired := headwater.shorten(target, by_age => true, sweep_size => sweep_size);
    done := done and expired < sweep_size;
end;
$$;
