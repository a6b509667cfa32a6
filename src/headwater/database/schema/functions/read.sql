-- Read: settled events only, by topic and position, forwards and backwards.

-- The ids of these topics in one array; null stands for the whole log.
create or replace function headwater.topic_ids(topics text[])
returns integer[]
language plpgsql
stable
as $$
declare
    ids integer[];
    missing text;
begin
    if topics is null then
        return array(select t.id from headwater.topic t where t.deleted_at is null);
    end if;
    select array_agg(t.id), min(n.name) filter (where t.id is null)
    into ids, missing
    from unnest(topics) as n (name)
    left join headwater.topic t on t.name = n.name and t.deleted_at is null;
    if missing is not null then
        perform headwater.raise_topic_not_found(missing);
    end if;
    return coalesce(ids, '{}');
end;
$$;

-- The last position that retention took of any of these topics.
create or replace function headwater.expired_to(topics text[])
returns bigint
language sql
stable
return coalesce((select max(t.expired_to) from headwater.topic t where t.id = any (headwater.topic_ids(topics))), 0);

-- Say that events after this position are gone, if they are.
create or replace function headwater.refuse_expired(ids integer[], after bigint)
returns void
language plpgsql
as $$
declare
    lost_to bigint;
    lost_topic text;
    earliest bigint;
begin
    select t.expired_to, t.name into lost_to, lost_topic
    from headwater.topic t
    where t.id = any (ids) and t.expired_to > after
    order by t.expired_to desc
    limit 1;
    if found then
        select min(e.position) into earliest
        from unnest(ids) as i (id)
        cross join lateral (
            select e.position
            from headwater.event e
            where e.topic_id = i.id and e.position > lost_to
            order by e.position
            limit 1
        ) as e;
        earliest := coalesce(earliest, lost_to + 1);
        raise exception 'events of topic "%" after position % are gone; the earliest kept is %',
            lost_topic, after, earliest
            using errcode = 'HW007',
                  detail = json_build_object('earliest_position', earliest, 'topic', lost_topic)::text,
                  hint = 'Go on from the earliest position, or read with skip_expired.';
    end if;
end;
$$;

-- What a page of one topic covers: up to `batch_size` events after a position (null: from the first that is kept)
-- and up to one that the caller knows to be settled, until `max_bytes` of payload are reached; one event comes
-- whatever its size. What retention took is HW007, except up to `gone_to`, which the caller knows to be gone. `epoch`: in
-- which the caller was told what is settled (null: it was told in this transaction); HW021 if the log is in another.
create or replace function headwater.page_of_topic(
    topic text,
    after bigint,
    settled_to bigint,
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
    single constant headwater.topic := headwater.find_topic(topic);
begin
    if epoch <> headwater.current_epoch() then
        perform headwater.refuse_other_epoch(epoch, coalesce(after, 0));
    end if;
    if after is not null and single.expired_to > greatest(after, gone_to) then
        perform headwater.refuse_expired(array[single.id], after);
    end if;
    topic_id := single.id;
    name := single.name;
    -- What has expired is not read, also while it waits to be cleared away.
    start_after := greatest(after, single.expired_to);
    last_position := settled_to;
    -- A running sum carries every event through a store of its own; a plain one costs a third of that, and nearly
    -- every page is within its bytes.
    if max_bytes < (
        select sum(octet_length(f.payload))
        from (
            select e.payload from headwater.event e
            where e.topic_id = single.id and e.position > start_after and e.position <= settled_to
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
                select e.position, e.payload from headwater.event e
                where e.topic_id = single.id and e.position > start_after and e.position <= settled_to
                order by e.position
                limit batch_size
            ) as f
        ) as g
        where coalesce(g.bytes_before < max_bytes, true);
    end if;
end;
$$;

-- The events of such a page, in order. One plain query, stable and not strict, so that Postgres puts it in the place
-- of its call: the events then go to the client as they are found, and all is seen in one snapshot. No bound of a position
-- may be known when it is planned: with no segment left in the range, the page would not be asked for, nor refused.
create or replace function headwater.read_topic(
    topic text,
    after bigint,
    settled_to bigint,
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
        from headwater.page_of_topic(read_topic.topic, after, settled_to, batch_size, max_bytes, gone_to, epoch) as p
    )
    select
        e.position, (select page.name from page), e.partition, e.topic_offset, e.key, e.type, e.routing_key,
        e.headers, e.content_type, e.payload, e.event_id, e.published_at
    from headwater.event e
    where
        e.topic_id = (select page.topic_id from page)
        and e.position > (select page.start_after from page)
        and e.position <= (select page.last_position from page)
    order by e.position
    limit batch_size;
end;

-- The same page, segment by segment: for a log of many segments. A plan for any range of positions opens and locks every
-- segment each time it runs; one for the range of a single segment, made when it is known, touches that one alone, and
-- making it costs less than opening ten.
create or replace function headwater.read_topic_by_segment(
    topic text,
    after bigint,
    settled_to bigint,
    batch_size integer default 100,
    max_bytes bigint default 16777216,
    gone_to bigint default 0,
    epoch integer default null
)
returns setof headwater.stored_event
language plpgsql
stable
-- The bounds choose the segment when the query is planned.
set plan_cache_mode = force_custom_plan
as $$
declare
    single constant headwater.topic := headwater.find_topic(topic);
    start_after bigint := greatest(after, single.expired_to);
    bytes_left bigint := max_bytes;
    events_left integer := batch_size;
    segment_end bigint;
    page_end bigint;
    found_events integer;
    found_bytes bigint;
begin
    if epoch <> headwater.current_epoch() then
        perform headwater.refuse_other_epoch(epoch, coalesce(after, 0));
    end if;
    if after is not null and single.expired_to > greatest(after, gone_to) then
        perform headwater.refuse_expired(array[single.id], after);
    end if;
    for segment_end in
        select s.hi - 1 from headwater.segment s
        where s.hi > start_after + 1 and s.lo <= settled_to
        order by s.lo
    loop
        page_end := least(segment_end, settled_to);
        select count(*), coalesce(sum(octet_length(f.payload)), 0) into found_events, found_bytes
        from (
            select e.payload from headwater.event e
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
                    select e.position, e.payload from headwater.event e
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
            from headwater.event e
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

-- The same of any topics. `epoch`: in which the caller was told what is settled; HW021 if the log is in another.
create or replace function headwater.read_settled(
    topics text[],
    after bigint,
    settled_to bigint,
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
        -- As the clients decide: see calls/reading.py.
        if settled_to > 8 * headwater.segment_size() then
            return query
            select * from headwater.read_topic_by_segment(
                topics[1], after, settled_to, batch_size, max_bytes, gone_to, epoch
            );
            return;
        end if;
        return query
        select * from headwater.read_topic(topics[1], after, settled_to, batch_size, max_bytes, gone_to, epoch);
        return;
    end if;

    -- Several topics: as many positions as events are asked for hold at most that many events, so a
    -- window of positions is read from each topic's index and nothing is read in vain.
    if epoch <> headwater.current_epoch() then
        perform headwater.refuse_other_epoch(epoch, coalesce(after, 0));
    end if;
    ids := headwater.topic_ids(topics);
    select min(f.position) - 1 into window_start
    from headwater.topic t
    cross join lateral (
        select e.position from headwater.event e
        where e.topic_id = t.id and e.position > greatest(window_start, t.expired_to) and e.position <= settled_to
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
        from headwater.event f
        join headwater.topic t on t.id = f.topic_id
        where
            f.topic_id = any (ids)
            and f.position > window_start
            and f.position <= least(settled_to, window_start + batch_size)
            and f.position > t.expired_to
    ) as e
    where e.bytes_before < max_bytes
    order by e.position;
    -- Last, since retention may have come between these statements.
    if after is not null then
        perform headwater.refuse_expired(ids, greatest(after, gone_to));
    end if;
end;
$$;

-- The same up to what is stable now. No rows: nothing more is stable. A position that this log never issued is HW021,
-- and so is one of another epoch than `epoch`, if that is given: see epoch.sql.
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
    settled_to constant bigint := headwater.stable_position(topics);
begin
    if after is not null and (after > settled_to or epoch is not null) then
        perform headwater.refuse_other_epoch(epoch, after);
    end if;
    return query
    select * from headwater.read_settled(
        topics, after, least(settled_to, up_to), batch_size, max_bytes,
        case when skip_expired then settled_to else 0 end
    );
end;
$$;

-- Backwards: up to `batch_size` settled events below a position (null: from the newest).
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
    settled_to bigint := headwater.stable_position(topics);
    ids constant integer[] := headwater.topic_ids(topics);
    below constant bigint := least(coalesce(before, settled_to + 1), settled_to + 1);
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
            from headwater.topic t
            cross join lateral (
                select * from headwater.event h
                where h.topic_id = t.id and h.position < below and h.position > t.expired_to
                order by h.position desc
                limit batch_size
            ) as g
            where t.id = any (ids)
            order by g.position desc
            limit batch_size
        ) as f
    ) as e
    join headwater.topic t on t.id = e.topic_id
    where e.bytes_before < max_bytes
    order by e.position desc;
end;
$$;

-- The position to read after in order to get every event published at or after a time. Found by halving the
-- positions; a second's worth before it is looked at one by one, since clocks and commits interleave.
create or replace function headwater.position_before(topics text[], at_time timestamptz)
returns bigint
language plpgsql
volatile
as $$
declare
    settled_to constant bigint := headwater.stable_position(topics);
    ids constant integer[] := headwater.topic_ids(topics);
    one_topic integer;
    low bigint;
    high bigint;
    middle bigint;
    probe_position bigint;
    probe_time timestamptz;
    result bigint := settled_to;
begin
    foreach one_topic in array ids loop
        low := 0;
        high := settled_to + 1;
        while high - low > 1 loop
            middle := (low + high) / 2;
            select e.position, e.published_at into probe_position, probe_time
            from headwater.event e
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
        from headwater.event e
        where
            e.topic_id = one_topic
            and e.position > low
            and e.position <= settled_to
            and e.published_at >= at_time
        order by e.position
        limit 1;
        result := least(result, probe_position - 1);
    end loop;
    return result;
end;
$$;
