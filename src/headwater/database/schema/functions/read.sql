-- Read: stable events only, by topic and position, forwards and backwards.

-- The ids of these topics; null means all topics. HW004 if one does not exist.
create or replace function headwater_internal.topic_ids(topics text[])
returns integer[]
language plpgsql
stable
as $$
declare
    ids integer[];
    missing text;
begin
    if topics is null then
        return array(select t.id from headwater_internal.topic t where t.deleted_at is null);
    end if;
    select array_agg(t.id), min(n.name) filter (where t.id is null)
    into ids, missing
    from unnest(topics) as n (name)
    left join headwater_internal.topic t on t.name = n.name and t.deleted_at is null;
    if missing is not null then
        perform headwater_internal.raise_topic_not_found(missing);
    end if;
    return coalesce(ids, '{}');
end;
$$;

-- The last position at which retention removed an event of any of these topics.
create or replace function headwater_internal.expired_to(topics text[])
returns bigint
language sql
stable
return coalesce((select max(t.expired_to) from headwater_internal.topic t where t.id = any (headwater_internal.topic_ids(topics))), 0);

-- HW007 if events of these topics after this position were removed by retention.
create or replace function headwater_internal.refuse_expired(ids integer[], after bigint)
returns void
language plpgsql
as $$
declare
    lost_to bigint;
    lost_topic text;
    earliest bigint;
begin
    select t.expired_to, t.name into lost_to, lost_topic
    from headwater_internal.topic t
    where t.id = any (ids) and t.expired_to > after
    order by t.expired_to desc
    limit 1;
    if found then
        select min(e.position) into earliest
        from unnest(ids) as i (id)
        cross join lateral (
            select e.position
            from headwater_internal.event e
            where e.topic_id = i.id and e.position > lost_to
            order by e.position
            limit 1
        ) as e;
        earliest := coalesce(earliest, lost_to + 1);
        raise exception 'events of topic "%" after position % were removed by retention; the earliest is %',
            lost_topic, after, earliest
            using errcode = 'HW007',
                  detail = json_build_object('earliest_position', earliest, 'topic', lost_topic)::text,
                  hint = 'Continue from the earliest position, or read with skip_expired.';
    end if;
end;
$$;

-- The extent of a page of one topic: up to `batch_size` events after a position (null: from the first that exists), up
-- to `stable_to`, which the caller knows to be stable, until `max_bytes` of payload are reached; at least one event,
-- whatever its size. HW007 if events were removed by retention, except up to `gone_to`, which the caller accepts as
-- removed. `epoch` is the epoch in which `stable_to` was read (null: in this transaction); HW021 if the log is in
-- another one.
create or replace function headwater_internal.page_of_topic(
    topic text,
    after bigint,
    stable_to bigint,
    batch_size integer,
    max_bytes bigint,
    gone_to bigint,
    epoch integer,
    out topic_id integer,
    out name text,
    out start_after bigint,
    out last_position bigint
)
language plpgsql
stable
as $$
declare
    single constant headwater_internal.topic := headwater_internal.find_topic(topic);
begin
    if epoch <> headwater.current_epoch() then
        perform headwater_internal.refuse_other_epoch(epoch, coalesce(after, 0));
    end if;
    if after is not null and single.expired_to > greatest(after, gone_to) then
        perform headwater_internal.refuse_expired(array[single.id], after);
    end if;
    topic_id := single.id;
    name := single.name;
    -- Expired events are not returned, even while they wait to be deleted.
    start_after := greatest(after, single.expired_to);
    last_position := stable_to;
    -- A window function materializes every event. A plain sum costs a third of that, and nearly every page is below
    -- `max_bytes`.
    if max_bytes < (
        select sum(octet_length(f.payload))
        from (
            select e.payload from headwater_internal.event e
            where e.topic_id = single.id and e.position > start_after and e.position <= stable_to
            order by e.position
            limit batch_size
        ) as f
    ) then
        select max(g.position) into last_position
        from (
            select
                f.position,
                sum(octet_length(f.payload)) over (order by f.position rows between unbounded preceding and 1 preceding)
                    as bytes_before
            from (
                select e.position, e.payload from headwater_internal.event e
                where e.topic_id = single.id and e.position > start_after and e.position <= stable_to
                order by e.position
                limit batch_size
            ) as f
        ) as g
        where coalesce(g.bytes_before < max_bytes, true);
    end if;
end;
$$;

-- The events of such a page, in order. A single query, STABLE and not STRICT, so that Postgres inlines it: events are
-- sent to the client as they are found, all from one snapshot. The bounds must not be known at plan time: with no
-- segment left in the range, page_of_topic() would not be called and could not raise its errors.
create or replace function headwater_internal.read_topic(
    topic text,
    after bigint,
    stable_to bigint,
    batch_size integer default 100,
    max_bytes bigint default 16777216,
    gone_to bigint default 0,
    epoch integer default null
)
returns setof headwater.stored_event
language sql
stable
begin atomic
    with page as materialized (
        select p.*
        from headwater_internal.page_of_topic(read_topic.topic, after, stable_to, batch_size, max_bytes, gone_to, epoch) as p
    )
    select
        e.position, (select page.name from page), e.partition, e.topic_offset, e.key, e.type, e.routing_key,
        e.headers, e.content_type, e.payload, e.event_id, e.published_at
    from headwater_internal.event e
    where
        e.topic_id = (select page.topic_id from page)
        and e.position > (select page.start_after from page)
        and e.position <= (select page.last_position from page)
    order by e.position
    limit batch_size;
end;

-- The same page, segment by segment, for a log of many segments. A plan for any range of positions opens and locks
-- every segment each time it runs. A plan for the range of one segment touches only that segment, and planning it costs
-- less than opening ten.
create or replace function headwater_internal.read_topic_by_segment(
    topic text,
    after bigint,
    stable_to bigint,
    batch_size integer default 100,
    max_bytes bigint default 16777216,
    gone_to bigint default 0,
    epoch integer default null
)
returns setof headwater.stored_event
language plpgsql
stable
-- The bounds must be known at plan time, so that Postgres prunes the other segments.
set plan_cache_mode = force_custom_plan
as $$
declare
    single constant headwater_internal.topic := headwater_internal.find_topic(topic);
    start_after bigint := greatest(after, single.expired_to);
    bytes_left bigint := max_bytes;
    events_left integer := batch_size;
    segment_end bigint;
    page_end bigint;
    found_events integer;
    found_bytes bigint;
begin
    if epoch <> headwater.current_epoch() then
        perform headwater_internal.refuse_other_epoch(epoch, coalesce(after, 0));
    end if;
    if after is not null and single.expired_to > greatest(after, gone_to) then
        perform headwater_internal.refuse_expired(array[single.id], after);
    end if;
    for segment_end in
        select s.hi - 1 from headwater_internal.segment s
        where s.hi > start_after + 1 and s.lo <= stable_to
        order by s.lo
    loop
        page_end := least(segment_end, stable_to);
        select count(*), coalesce(sum(octet_length(f.payload)), 0) into found_events, found_bytes
        from (
            select e.payload from headwater_internal.event e
            where e.topic_id = single.id and e.position > start_after and e.position <= page_end
            order by e.position
            limit events_left
        ) as f;
        if found_bytes > bytes_left then
            select max(g.position), count(*) into page_end, found_events
            from (
                select
                    f.position,
                    sum(octet_length(f.payload))
                        over (order by f.position rows between unbounded preceding and 1 preceding) as bytes_before
                from (
                    select e.position, e.payload from headwater_internal.event e
                    where e.topic_id = single.id and e.position > start_after and e.position <= page_end
                    order by e.position
                    limit events_left
                ) as f
            ) as g
            where coalesce(g.bytes_before < bytes_left, true);
        end if;
        if found_events > 0 then
            return query
            select
                e.position, single.name, e.partition, e.topic_offset, e.key, e.type, e.routing_key,
                e.headers, e.content_type, e.payload, e.event_id, e.published_at
            from headwater_internal.event e
            where e.topic_id = single.id and e.position > start_after and e.position <= page_end
            order by e.position
            limit found_events;
        end if;
        bytes_left := bytes_left - found_bytes;
        events_left := events_left - found_events;
        exit when events_left <= 0 or bytes_left <= 0;
        start_after := greatest(start_after, segment_end);
    end loop;
end;
$$;

-- The same for any topics. `epoch` is the epoch in which `stable_to` was read; HW021 if the log is in another one.
create or replace function headwater_internal.read_stable(
    topics text[],
    after bigint,
    stable_to bigint,
    batch_size integer default 100,
    max_bytes bigint default 16777216,
    gone_to bigint default 0,
    epoch integer default null
)
returns setof headwater.stored_event
language plpgsql
volatile
as $$
declare
    ids integer[];
    window_start bigint := coalesce(after, 0);
begin
    if cardinality(topics) = 1 then
        -- The clients decide by the same rule: see calls/reading.py.
        if stable_to > 8 * headwater_internal.segment_size() then
            return query
            select * from headwater_internal.read_topic_by_segment(
                topics[1], after, stable_to, batch_size, max_bytes, gone_to, epoch
            );
            return;
        end if;
        return query
        select * from headwater_internal.read_topic(topics[1], after, stable_to, batch_size, max_bytes, gone_to, epoch);
        return;
    end if;

    -- Several topics: n positions hold at most n events, so a window of `batch_size` positions is read from the index
    -- of each topic, and no event is read in vain.
    if epoch <> headwater.current_epoch() then
        perform headwater_internal.refuse_other_epoch(epoch, coalesce(after, 0));
    end if;
    ids := headwater_internal.topic_ids(topics);
    select min(f.position) - 1 into window_start
    from headwater_internal.topic t
    cross join lateral (
        select e.position from headwater_internal.event e
        where e.topic_id = t.id and e.position > greatest(window_start, t.expired_to) and e.position <= stable_to
        order by e.position
        limit 1
    ) as f
    where t.id = any (ids);
    return query
    select
        e.position, e.name, e.partition, e.topic_offset, e.key, e.type, e.routing_key,
        e.headers, e.content_type, e.payload, e.event_id, e.published_at
    from (
        select
            f.*,
            t.name,
            sum(coalesce(octet_length(f.payload), 0)) over (order by f.position rows unbounded preceding)
                - coalesce(octet_length(f.payload), 0) as bytes_before
        from headwater_internal.event f
        join headwater_internal.topic t on t.id = f.topic_id
        where
            f.topic_id = any (ids)
            and f.position > window_start
            and f.position <= least(stable_to, window_start + batch_size)
            and f.position > t.expired_to
    ) as e
    where e.bytes_before < max_bytes
    order by e.position;
    -- Checked last, because retention may have run between these statements.
    if after is not null then
        perform headwater_internal.refuse_expired(ids, greatest(after, gone_to));
    end if;
end;
$$;

-- Read up to `batch_size` stable events of these topics after a position (null: from the first that exists), in order,
-- until `max_bytes` of payload are reached; no rows means that no further event is stable. HW007 if events after the
-- position were removed by retention, unless `skip_expired`; HW021 if the position is above the head or, with `epoch`,
-- if the log is in another epoch; HW004 if a topic does not exist.
create or replace function headwater.read(
    topics text[],
    after bigint default null,
    batch_size integer default 100,
    max_bytes bigint default 16777216,
    up_to bigint default null,
    skip_expired boolean default false,
    epoch integer default null
)
returns setof headwater.stored_event
language plpgsql
volatile
as $$
declare
    stable_to constant bigint := headwater.stable_position(topics);
begin
    if after is not null and (after > stable_to or epoch is not null) then
        perform headwater_internal.refuse_other_epoch(epoch, after);
    end if;
    return query
    select * from headwater_internal.read_stable(
        topics, after, least(stable_to, up_to), batch_size, max_bytes,
        case when skip_expired then stable_to else 0 end
    );
end;
$$;

-- Read backwards: up to `batch_size` stable events of these topics before a position (null: from the newest), newest
-- first, until `max_bytes` of payload are reached. HW004 if a topic does not exist.
create or replace function headwater.read_backwards(
    topics text[],
    before bigint default null,
    batch_size integer default 100,
    max_bytes bigint default 16777216
)
returns setof headwater.stored_event
language plpgsql
volatile
as $$
declare
    stable_to bigint := headwater.stable_position(topics);
    ids constant integer[] := headwater_internal.topic_ids(topics);
    below constant bigint := least(coalesce(before, stable_to + 1), stable_to + 1);
begin
    return query
    select
        e.position, t.name, e.partition, e.topic_offset, e.key, e.type, e.routing_key,
        e.headers, e.content_type, e.payload, e.event_id, e.published_at
    from (
        select
            f.*,
            sum(coalesce(octet_length(f.payload), 0)) over (order by f.position desc rows unbounded preceding)
                - coalesce(octet_length(f.payload), 0) as bytes_before
        from (
            select g.*
            from headwater_internal.topic t
            cross join lateral (
                select * from headwater_internal.event h
                where h.topic_id = t.id and h.position < below and h.position > t.expired_to
                order by h.position desc
                limit batch_size
            ) as g
            where t.id = any (ids)
            order by g.position desc
            limit batch_size
        ) as f
    ) as e
    join headwater_internal.topic t on t.id = e.topic_id
    where e.bytes_before < max_bytes
    order by e.position desc;
end;
$$;

-- The position after which to read in order to get every event published at or after a time. Found by binary search;
-- one second of events before the result is checked one by one, since clock times and commits interleave. HW004 if a
-- topic does not exist.
create or replace function headwater.position_before(topics text[], at_time timestamptz)
returns bigint
language plpgsql
volatile
as $$
declare
    stable_to constant bigint := headwater.stable_position(topics);
    ids constant integer[] := headwater_internal.topic_ids(topics);
    one_topic integer;
    low bigint;
    high bigint;
    middle bigint;
    probe_position bigint;
    probe_time timestamptz;
    result bigint := stable_to;
begin
    foreach one_topic in array ids loop
        low := 0;
        high := stable_to + 1;
        while high - low > 1 loop
            middle := (low + high) / 2;
            select e.position, e.published_at into probe_position, probe_time
            from headwater_internal.event e
            where e.topic_id = one_topic and e.position >= middle and e.position < high
            order by e.position
            limit 1;
            if probe_position is null or probe_time >= at_time - interval '1 second' then
                high := middle;
            else
                low := probe_position;
            end if;
        end loop;
        select e.position into probe_position
        from headwater_internal.event e
        where
            e.topic_id = one_topic
            and e.position > low
            and e.position <= stable_to
            and e.published_at >= at_time
        order by e.position
        limit 1;
        result := least(result, probe_position - 1);
    end loop;
    return result;
end;
$$;
