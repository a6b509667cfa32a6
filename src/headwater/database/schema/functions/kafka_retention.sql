-- What leaves a lane from its beginning: deleted on request, too old, or beyond the size that its topic may have.

-- What an event counts for: its parts as they are, without what Postgres adds to them.
create or replace function headwater.kafka_event_bytes(payload bytea, key bytea, record_headers bytea, headers jsonb)
returns bigint
language sql
stable
return
    coalesce(octet_length(payload), 0)::bigint + coalesce(octet_length(key), 0) + coalesce(octet_length(record_headers), 0)
    + coalesce(pg_column_size(headers), 0);

-- Bring the sizes of a topic's lanes up to date. Only what came since the last time is counted, unless retention by time
-- took something, which does not say of how much.
create or replace function headwater.kafka_measure(measured_topic integer)
returns void
language plpgsql
as $$
declare
    settled_to constant bigint := headwater.settled();
    target headwater.topic;
    known headwater.kafka_topic;
    count_after bigint;
begin
    insert into headwater.kafka_topic (topic_id) values (measured_topic) on conflict do nothing;
    select * into known from headwater.kafka_topic k where k.topic_id = measured_topic for update;
    select * into target from headwater.topic t where t.id = measured_topic;
    count_after := known.measured_to;
    if known.measured_after <> target.expired_to then
        update headwater.kafka_lane l set bytes = 0 where l.topic_id = target.id;
        count_after := target.expired_to;
    end if;
    insert into headwater.kafka_lane as l (topic_id, partition, bytes)
    select target.id, e.partition, sum(headwater.kafka_event_bytes(e.payload, e.key, e.record_headers, e.headers))
    from headwater.event e
    where e.topic_id = target.id and e.position > count_after and e.position <= settled_to
    group by e.partition
    on conflict (topic_id, partition) do update set bytes = l.bytes + excluded.bytes;
    update headwater.kafka_topic k
    set measured_to = greatest(settled_to, target.expired_to), measured_after = target.expired_to
    where k.topic_id = target.id;
end;
$$;

-- Take the events of a lane up to a position away, so that it begins at an offset. Only a holder of the log's upkeep may,
-- since an archive that is just being registered must know what is gone. Returns how many went.
create or replace function headwater.kafka_cut(target headwater.topic, lane integer, last_position bigint, begin_at bigint)
returns bigint
language plpgsql
as $$
declare
    cut bigint;
    cut_bytes bigint;
    first_kept bigint;
    known headwater.kafka_topic;
begin
    -- The order in which kafka_measure locks them.
    select * into known from headwater.kafka_topic k where k.topic_id = target.id for update;
    if target.kind = 'sequenced' then
        -- A lane whose tail goes away must not start to count again.
        insert into headwater.lane as l (topic_id, partition, next_offset)
        values (target.id, lane, begin_at)
        on conflict on constraint lane_pkey do update set next_offset = greatest(l.next_offset, excluded.next_offset);
    end if;
    delete from headwater.event_identity i
    using headwater.event e
    where
        e.topic_id = target.id and e.partition = lane and e.position <= last_position and e.event_id is not null
        and i.topic_id = e.topic_id and i.event_id = e.event_id;
    with gone as (
        delete from headwater.event e
        where e.topic_id = target.id and e.partition = lane and e.position <= last_position
        returning e.position, headwater.kafka_event_bytes(e.payload, e.key, e.record_headers, e.headers) as bytes
    )
    select
        count(*),
        coalesce(sum(g.bytes) filter (where g.position <= known.measured_to and g.position > target.expired_to), 0)
    into cut, cut_bytes
    from gone g;
    delete from headwater.kafka_key k
    where k.topic_id = target.id and k.partition = lane and k.position <= last_position;
    insert into headwater.kafka_lane as l (topic_id, partition, start_offset)
    values (target.id, lane, begin_at)
    on conflict on constraint kafka_lane_pkey do update
    set
        start_offset = greatest(l.start_offset, excluded.start_offset),
        bytes = greatest(l.bytes - cut_bytes, 0);
    -- Who reads all lanes hears of the loss if nothing of another lane is kept below it.
    select e.position into first_kept
    from headwater.event e
    where e.topic_id = target.id and e.position > target.expired_to
    order by e.position
    limit 1;
    if cut > 0 and last_position > target.expired_to and last_position < coalesce(first_kept, last_position + 1) then
        update headwater.topic t set expired_to = last_position where t.id = target.id;
        update headwater.kafka_topic k
        set measured_after = last_position
        where k.topic_id = target.id and k.measured_after = target.expired_to;
    end if;
    return cut;
end;
$$;

-- Delete the events of a lane before an offset (of an open topic: a position); -1 deletes all there are. They are gone for
-- every reader at once. Returns where the lane begins now. What somebody who must not lose an event, or an archive, has
-- yet to read is not deleted: HW002 says who.
create or replace function headwater.delete_before(topic text, lane integer, before_offset bigint)
returns bigint
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '5s'
as $$
declare
    target headwater.topic;
    bounds record;
    begin_at bigint;
    last_position bigint;
    needed_by text;
begin
    perform pg_advisory_xact_lock(29288::bigint << 48);
    target := headwater.find_topic(topic);
    if target.event_store then
        raise exception 'topic "%" is an event store, which keeps its events', topic using errcode = 'HW002';
    end if;
    if exists (
        select from headwater.kafka_topic k
        where k.topic_id = target.id and not k.deletes
    ) then
        raise exception 'topic "%" is compacted, and keeps the newest event of each key', topic
            using errcode = 'HW002', hint = 'Delete a key by an event without a payload, or add delete to cleanup.policy.';
    end if;
    select * into bounds from headwater.kafka_bounds(array[target.id], array[lane]);
    if not found then
        raise exception 'topic "%" has the partitions 0 to %, not %', topic, target.partitions - 1, lane
            using errcode = 'HW002';
    end if;
    begin_at := case when before_offset = -1 then bounds.end_offset else before_offset end;
    if begin_at not between 0 and bounds.end_offset then
        raise exception 'partition % of topic "%" ends at %, before %', lane, topic, bounds.end_offset, begin_at
            using errcode = 'HW002', detail = json_build_object('end_offset', bounds.end_offset)::text;
    end if;
    if begin_at <= bounds.start_offset then
        return bounds.start_offset;
    end if;
    select max(e.position) into last_position
    from headwater.event e
    where
        e.topic_id = target.id and e.partition = lane
        and case when target.kind = 'open' then e.position < begin_at else e.topic_offset < begin_at end;
    select h.consumer_kind || ' ' || h.consumer into needed_by
    from headwater.retention_holds(target.id) as h
    where h.held_after < last_position
    order by h.held_after
    limit 1;
    if needed_by is not null then
        raise exception 'the % has yet to read what is to be deleted', needed_by
            using errcode = 'HW002', hint = 'Let it catch up, or take from it that it must not lose an event.';
    end if;
    perform headwater.kafka_cut(target, lane, coalesce(last_position, 0), begin_at);
    return begin_at;
end;
$$;

-- Take the oldest events of a topic's lanes that are larger than it says and, with `by_age`, those that are older, one by
-- one; up to `sweep_size` at a time, and nothing that somebody still needs. Only a holder of the log's upkeep may. Returns
-- how many went.
create or replace function headwater.shorten(target headwater.topic, by_age boolean, sweep_size integer)
returns bigint
language plpgsql
as $$
declare
    safe_to constant bigint := headwater.releasable_of(target.id);
    published_before constant timestamptz := case when by_age then clock_timestamp() - target.retention end;
    largest constant bigint := (select k.retention_bytes from headwater.kafka_topic k where k.topic_id = target.id);
    due record;
    swept bigint := 0;
begin
    if
        target.event_store
        or num_nonnulls(published_before, largest) = 0
        or exists (select from headwater.kafka_topic k where k.topic_id = target.id and not k.deletes)
    then
        return 0;
    end if;
    if largest is not null then
        perform headwater.kafka_measure(target.id);
    end if;
    for due in
        select l.lane, o.position, o.topic_offset
        from generate_series(0, target.partitions - 1) as l (lane)
        left join headwater.kafka_lane k on k.topic_id = target.id and k.partition = l.lane
        cross join lateral (
            select max(g.position) as position, max(g.topic_offset) as topic_offset
            from (
                -- The oldest, as long as there was too much before each, or each is too old.
                select f.position, f.topic_offset, bool_and(
                    coalesce(f.published_at < published_before, false)
                    or coalesce(f.bytes_before < k.bytes - largest, false)
                ) over (order by f.position) as goes
                from (
                    select
                        e.position, e.topic_offset, e.published_at,
                        sum(e.bytes) over (order by e.position) - e.bytes as bytes_before
                    from (
                        select
                            e.position, e.topic_offset, e.published_at,
                            headwater.kafka_event_bytes(e.payload, e.key, e.record_headers, e.headers) as bytes
                        from headwater.event e
                        where
                            e.topic_id = target.id and e.partition = l.lane and e.position > target.expired_to
                            and e.position <= safe_to
                        order by e.position
                        limit sweep_size
                    ) as e
                ) as f
            ) as g
            where g.goes
        ) as o
        where published_before is not null or k.bytes > largest
        -- So that what is gone of all lanes is told to be once the last is cut.
        order by o.position
    loop
        exit when swept >= sweep_size;
        if due.position is not null then
            swept := swept + headwater.kafka_cut(
                (select t from headwater.topic t where t.id = target.id), due.lane, due.position,
                coalesce(due.topic_offset, due.position) + 1
            );
        end if;
    end loop;
    return swept;
end;
$$;

-- Take the oldest events of lanes that are larger than their topics say. After about `sweep_size` events the rest waits for
-- the next call. Returns how many went.
create or replace function headwater.expire_by_size(sweep_size integer default 50000)
returns bigint
language plpgsql
as $$
declare
    target headwater.topic;
    swept bigint := 0;
begin
    for target in
        select t.*
        from headwater.topic t
        join headwater.kafka_topic k on k.topic_id = t.id
        where k.retention_bytes is not null and t.deleted_at is null
        order by t.id
    loop
        exit when swept >= sweep_size;
        swept := swept + headwater.shorten(target, by_age => false, sweep_size => sweep_size - swept::integer);
    end loop;
    return swept;
end;
$$;

-- How many bytes the lanes of topics hold; those that hold none are left out.
create or replace function headwater.kafka_sizes(topic_ids integer[])
returns table (topic_id integer, lane integer, bytes bigint)
language plpgsql
as $$
declare
    measured integer;
begin
    -- In one order, since each stays locked to the end.
    for measured in
        select t.id from headwater.topic t where t.id = any (topic_ids) and t.deleted_at is null order by t.id
    loop
        perform headwater.kafka_measure(measured);
    end loop;
    return query
    select l.topic_id, l.partition, l.bytes
    from headwater.kafka_lane l
    where l.topic_id = any (topic_ids) and l.bytes > 0;
end;
$$;
