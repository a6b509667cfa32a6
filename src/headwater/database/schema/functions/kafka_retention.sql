-- Removing events from the beginning of a partition: deleted on request, too old, or beyond the size limit of the
-- topic.

-- The size of an event: its fields, without the overhead of Postgres.
create or replace function headwater_internal.kafka_event_bytes(payload bytea, key bytea, record_headers bytea, headers jsonb)
returns bigint
language sql
stable
return
    coalesce(octet_length(payload), 0)::bigint + coalesce(octet_length(key), 0) + coalesce(octet_length(record_headers), 0)
    + coalesce(pg_column_size(headers), 0);

-- Update the recorded sizes of a topic's partitions. Only events since the last call are counted, unless retention by
-- time has removed events: it does not record their size.
create or replace function headwater_internal.kafka_measure(measured_topic integer)
returns void
language plpgsql
as $$
declare
    stable_to constant bigint := headwater.stable_position();
    target headwater_internal.topic;
    known headwater_internal.kafka_topic;
    count_after bigint;
begin
    insert into headwater_internal.kafka_topic (topic_id) values (measured_topic) on conflict do nothing;
    select * into known from headwater_internal.kafka_topic k where k.topic_id = measured_topic for update;
    select * into target from headwater_internal.topic t where t.id = measured_topic;
    count_after := known.measured_to;
    if known.measured_after <> target.expired_to then
        update headwater_internal.kafka_partition l set bytes = 0 where l.topic_id = target.id;
        count_after := target.expired_to;
    end if;
    insert into headwater_internal.kafka_partition as l (topic_id, partition, bytes)
    select target.id, e.partition, sum(headwater_internal.kafka_event_bytes(e.payload, e.key, e.record_headers, e.headers))
    from headwater_internal.event e
    where e.topic_id = target.id and e.position > count_after and e.position <= stable_to
    group by e.partition
    on conflict (topic_id, partition) do update set bytes = l.bytes + excluded.bytes;
    update headwater_internal.kafka_topic k
    set measured_to = greatest(stable_to, target.expired_to), measured_after = target.expired_to
    where k.topic_id = target.id;
end;
$$;

-- Delete the events of a partition up to a position, so that it begins at an offset. Returns their number. The caller
-- must hold the maintenance lock, since an archive that is being registered must know what was removed.
create or replace function headwater_internal.kafka_cut(target headwater_internal.topic, partition integer, last_position bigint, begin_at bigint)
returns bigint
language plpgsql
as $$
declare
    cut bigint;
    cut_bytes bigint;
    first_kept bigint;
    known headwater_internal.kafka_topic;
begin
    -- The same lock order as in kafka_measure().
    select * into known from headwater_internal.kafka_topic k where k.topic_id = target.id for update;
    if target.kind = 'sequenced' then
        -- A partition whose last event is removed must not restart its offsets.
        insert into headwater_internal.partition_tail as l (topic_id, partition, next_offset)
        values (target.id, kafka_cut.partition, begin_at)
        on conflict on constraint partition_tail_pkey do update set next_offset = greatest(l.next_offset, excluded.next_offset);
    end if;
    delete from headwater_internal.event_identity i
    using headwater_internal.event e
    where
        e.topic_id = target.id and e.partition = kafka_cut.partition and e.position <= last_position and e.event_id is not null
        and i.topic_id = e.topic_id and i.event_id = e.event_id;
    with gone as (
        delete from headwater_internal.event e
        where e.topic_id = target.id and e.partition = kafka_cut.partition and e.position <= last_position
        returning e.position, headwater_internal.kafka_event_bytes(e.payload, e.key, e.record_headers, e.headers) as bytes
    )
    select
        count(*),
        coalesce(sum(g.bytes) filter (where g.position <= known.measured_to and g.position > target.expired_to), 0)
    into cut, cut_bytes
    from gone g;
    delete from headwater_internal.kafka_key k
    where k.topic_id = target.id and k.partition = kafka_cut.partition and k.position <= last_position;
    insert into headwater_internal.kafka_partition as l (topic_id, partition, start_offset)
    values (target.id, kafka_cut.partition, begin_at)
    on conflict on constraint kafka_partition_pkey do update
    set
        start_offset = greatest(l.start_offset, excluded.start_offset),
        bytes = greatest(l.bytes - cut_bytes, 0);
    -- Readers of all partitions get HW007 only if no event of another partition is left below this position.
    select e.position into first_kept
    from headwater_internal.event e
    where e.topic_id = target.id and e.position > target.expired_to
    order by e.position
    limit 1;
    if cut > 0 and last_position > target.expired_to and last_position < coalesce(first_kept, last_position + 1) then
        update headwater_internal.topic t set expired_to = last_position where t.id = target.id;
        update headwater_internal.kafka_topic k
        set measured_after = last_position
        where k.topic_id = target.id and k.measured_after = target.expired_to;
    end if;
    return cut;
end;
$$;

-- Delete the events of a partition before an offset (for an open topic: a position); -1 deletes all existing ones. They
-- are removed for every reader at once. Returns the new first offset. HW002 if a consumer with holds_retention, or an
-- archive, has not read them yet.
create or replace function headwater.delete_before(topic text, partition integer, before_offset bigint)
returns bigint
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '5s'
as $$
declare
    target headwater_internal.topic;
    bounds record;
    begin_at bigint;
    last_position bigint;
    needed_by text;
begin
    perform pg_advisory_xact_lock(29288::bigint << 48);
    target := headwater_internal.find_topic(topic);
    if target.event_store then
        raise exception 'topic "%" is an event store: its events cannot be deleted', topic using errcode = 'HW002';
    end if;
    if exists (
        select from headwater_internal.kafka_topic k
        where k.topic_id = target.id and not k.deletes
    ) then
        raise exception 'topic "%" is compacted and keeps the newest event of each key', topic
            using errcode = 'HW002', hint = 'To delete a key, publish an event without a payload, or add delete to cleanup.policy.';
    end if;
    select * into bounds from headwater_internal.kafka_bounds(array[target.id], array[delete_before.partition]);
    if not found then
        raise exception 'invalid partition: topic "%" has the partitions 0 to %, not %', topic, target.partitions - 1, partition
            using errcode = 'HW002';
    end if;
    begin_at := case when before_offset = -1 then bounds.end_offset else before_offset end;
    if begin_at not between 0 and bounds.end_offset then
        raise exception 'offset out of range: partition % of topic "%" ends at %, before %', delete_before.partition, topic, bounds.end_offset, begin_at
            using errcode = 'HW002', detail = json_build_object('end_offset', bounds.end_offset)::text;
    end if;
    if begin_at <= bounds.start_offset then
        return bounds.start_offset;
    end if;
    select max(e.position) into last_position
    from headwater_internal.event e
    where
        e.topic_id = target.id and e.partition = delete_before.partition
        and case when target.kind = 'open' then e.position < begin_at else e.topic_offset < begin_at end;
    select h.consumer_kind || ' ' || h.consumer into needed_by
    from headwater_internal.retention_holds(target.id) as h
    where h.held_after < last_position
    order by h.held_after
    limit 1;
    if needed_by is not null then
        raise exception 'the % has not read the events to be deleted yet', needed_by
            using errcode = 'HW002', hint = 'Wait until it has caught up, or turn off its holds_retention.';
    end if;
    perform headwater_internal.kafka_cut(target, delete_before.partition, coalesce(last_position, 0), begin_at);
    return begin_at;
end;
$$;

-- Delete the oldest events of a topic's partitions that exceed its size limit and, with `by_age`, those older than its
-- retention, event by event; up to `sweep_size` at a time, and none that a consumer still needs. Returns their number.
-- The caller must hold the maintenance lock.
create or replace function headwater_internal.shorten(target headwater_internal.topic, by_age boolean, sweep_size integer)
returns bigint
language plpgsql
as $$
declare
    safe_to constant bigint := headwater_internal.releasable_of(target.id);
    published_before constant timestamptz := case when by_age then clock_timestamp() - target.retention end;
    largest constant bigint := (select k.retention_bytes from headwater_internal.kafka_topic k where k.topic_id = target.id);
    due record;
    swept bigint := 0;
begin
    if
        target.event_store
        or num_nonnulls(published_before, largest) = 0
        or exists (select from headwater_internal.kafka_topic k where k.topic_id = target.id and not k.deletes)
    then
        return 0;
    end if;
    if largest is not null then
        perform headwater_internal.kafka_measure(target.id);
    end if;
    for due in
        select l.partition, o.position, o.topic_offset
        from generate_series(0, target.partitions - 1) as l (partition)
        left join headwater_internal.kafka_partition k on k.topic_id = target.id and k.partition = l.partition
        cross join lateral (
            select max(g.position) as position, max(g.topic_offset) as topic_offset
            from (
                -- The oldest events, as long as the total before each is too large, or each is too old.
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
                            headwater_internal.kafka_event_bytes(e.payload, e.key, e.record_headers, e.headers) as bytes
                        from headwater_internal.event e
                        where
                            e.topic_id = target.id and e.partition = l.partition and e.position > target.expired_to
                            and e.position <= safe_to
                        order by e.position
                        limit sweep_size
                    ) as e
                ) as f
            ) as g
            where g.goes
        ) as o
        where published_before is not null or k.bytes > largest
        -- In this order, so that readers of all partitions see the removal once the last partition is cut.
        order by o.position
    loop
        exit when swept >= sweep_size;
        if due.position is not null then
            swept := swept + headwater_internal.kafka_cut(
                (select t from headwater_internal.topic t where t.id = target.id), due.partition, due.position,
                coalesce(due.topic_offset, due.position) + 1
            );
        end if;
    end loop;
    return swept;
end;
$$;

-- Delete the oldest events of partitions that exceed the size limit of their topic, about `sweep_size` events in one
-- call. Returns their number.
create or replace function headwater_internal.expire_by_size(sweep_size integer default 50000)
returns bigint
language plpgsql
as $$
declare
    target headwater_internal.topic;
    swept bigint := 0;
begin
    for target in
        select t.*
        from headwater_internal.topic t
        join headwater_internal.kafka_topic k on k.topic_id = t.id
        where k.retention_bytes is not null and t.deleted_at is null
        order by t.id
    loop
        exit when swept >= sweep_size;
        swept := swept + headwater_internal.shorten(target, by_age => false, sweep_size => sweep_size - swept::integer);
    end loop;
    return swept;
end;
$$;

-- The size in bytes of the partitions of topics; empty ones are omitted.
create or replace function headwater_internal.kafka_sizes(topic_ids integer[])
returns table (topic_id integer, partition integer, bytes bigint)
language plpgsql
as $$
declare
    measured integer;
begin
    -- In one order, since each stays locked until the end of the transaction.
    for measured in
        select t.id from headwater_internal.topic t where t.id = any (topic_ids) and t.deleted_at is null order by t.id
    loop
        perform headwater_internal.kafka_measure(measured);
    end loop;
    return query
    select l.topic_id, l.partition, l.bytes
    from headwater_internal.kafka_partition l
    where l.topic_id = any (topic_ids) and l.bytes > 0;
end;
$$;
