-- Kafka's fetch: where lanes begin and end, and the events of one from an offset on.

-- When an event happened, for Kafka: as its producer says, or as the log does. (As `stable` as what it calls, or Postgres
-- would not put it into the queries that use it, and a call for each event costs more than reading it.)
create or replace function headwater.kafka_time(produced_ms bigint, published_at timestamptz)
returns bigint
language sql
stable
return coalesce(produced_ms, floor(extract(epoch from published_at) * 1000)::bigint);

-- Where lanes begin and end: the offset up to which all was taken, and the one after the last that can be read; with their
-- place in the arrays, and the kind of their topic. No row for a lane that does not exist. Events below `end_offset` are
-- read in a later statement. A lane begins where it is noted to: what compaction took is a gap like others, also at the
-- beginning. A consumer may be at any offset up to `max_offset`: an open topic ends at its stable position, and positions
-- up to the head of the log were issued, so a consumer there waits.
create or replace function headwater.kafka_bounds(topic_ids integer[], lanes integer[])
returns table (
    topic_id integer, lane integer, start_offset bigint, end_offset bigint, place integer, kind text, max_offset bigint
)
language plpgsql
volatile
as $$
declare
    settled_to bigint;
    stable_topic integer;
    asked record;
begin
    for asked in
        select
            t.id, t.name, t.kind, t.expired_to, l.lane, l.place, coalesce(b.start_offset, 0) as begin_at
        from unnest(topic_ids, lanes) with ordinality as l (topic_id, lane, place)
        join headwater.topic t on t.id = l.topic_id and t.deleted_at is null and l.lane between 0 and t.partitions - 1
        left join headwater.kafka_lane b on b.topic_id = t.id and b.partition = l.lane
    loop
        topic_id := asked.id;
        lane := asked.lane;
        place := asked.place;
        kind := asked.kind;
        if asked.kind = 'open' then
            if asked.id is distinct from stable_topic then
                settled_to := headwater.stable_position(array[asked.name]);
                stable_topic := asked.id;
            end if;
            start_offset := greatest(asked.expired_to + 1, asked.begin_at);
            end_offset := greatest(settled_to + 1, start_offset);
            max_offset := greatest(headwater.head() + 1, end_offset);
        else
            end_offset := headwater.next_offset(asked.id, asked.lane);
            start_offset := asked.begin_at;
            max_offset := end_offset;
        end if;
        return next;
    end loop;
end;
$$;

-- Leader epochs are the epochs of the log. The epoch of the event at an offset; where there is none, of the next one, or
-- else the present epoch.
create or replace function headwater.kafka_epoch_at(topic_id integer, lane integer, at_offset bigint)
returns integer
language plpgsql
volatile
as $$
declare
    event_position bigint;
begin
    if (select t.kind from headwater.topic t where t.id = kafka_epoch_at.topic_id) = 'open' then
        return headwater.epoch_of(at_offset);
    end if;
    select e.position into event_position
    from headwater.event e
    where e.topic_id = kafka_epoch_at.topic_id and e.partition = lane and e.topic_offset >= at_offset
    order by e.topic_offset
    limit 1;
    return case
        when event_position is null then headwater.current_epoch() else headwater.epoch_of(event_position)
    end;
end;
$$;

-- Where a leader epoch ends in a lane: the offset after its last event, by which a consumer that has read in that epoch
-- sees whether its offset is still that of the same event. `epoch` is the latest one that is not after the one asked
-- for, `present` the present one. Both -1: the lane does not exist (`present` is null then), or the epoch has not begun.
create or replace function headwater.kafka_epoch_end(
    topic_id integer,
    lane integer,
    asked_epoch integer,
    out epoch integer,
    out end_offset bigint,
    out present integer
)
language plpgsql
volatile
as $$
declare
    bounds record;
    common bigint;
begin
    epoch := -1;
    end_offset := -1;
    select b.* into bounds from headwater.kafka_bounds(array[topic_id], array[lane]) as b;
    if not found then
        return;
    end if;
    present := headwater.current_epoch();
    if asked_epoch = present then
        epoch := present;
        end_offset := bounds.end_offset;
    elsif asked_epoch between 0 and present then
        epoch := coalesce((select max(e.number) from headwater.epoch e where e.number <= asked_epoch), asked_epoch);
        common := headwater.common_position(asked_epoch, 9223372036854775806);
        if bounds.kind = 'open' then
            end_offset := common + 1;
        else
            select e.topic_offset into end_offset
            from headwater.event e
            where e.topic_id = kafka_epoch_end.topic_id and e.partition = lane and e.position > common
            order by e.topic_offset
            limit 1;
            end_offset := coalesce(end_offset, bounds.end_offset);
        end if;
        -- What retention took is of no epoch any more: a consumer that goes back goes to what there is.
        end_offset := greatest(end_offset, bounds.start_offset);
    end if;
end;
$$;

-- How much of a fetch's limit an event takes: its parts, and what a record has besides.
create or replace function headwater.kafka_size(e headwater.event)
returns integer
language sql
stable
return 12 + coalesce(octet_length(e.payload), 0) + coalesce(octet_length(e.key), 0)
    + coalesce(pg_column_size(e.headers), 0) + coalesce(octet_length(e.record_headers), 0);

-- A page of a sequenced lane: up to `max_events` events from an offset on and below `end_offset`, until `max_bytes` are
-- reached; one event comes whatever its size. In a lane, positions grow with offsets: `after_position`, that of an
-- earlier event or 0, spares the look into older segments. All null: there is no event.
create or replace function headwater.kafka_page(
    topic_id integer,
    lane integer,
    from_offset bigint,
    end_offset bigint,
    after_position bigint,
    max_events integer,
    max_bytes bigint,
    out last_offset bigint,
    out last_position bigint
)
language plpgsql
stable
as $$
declare
    bytes bigint;
begin
    select max(f.topic_offset), max(f.position), sum(f.bytes) into last_offset, last_position, bytes
    from (
        select e.topic_offset, e.position, headwater.kafka_size(e) as bytes
        from headwater.event e
        where
            e.topic_id = kafka_page.topic_id and e.partition = lane
            and e.topic_offset >= from_offset and e.topic_offset < end_offset and e.position > after_position
        order by e.topic_offset
        limit max_events
    ) as f;
    if bytes > max_bytes then
        -- Only now by a running sum, which costs three times as much.
        select max(g.topic_offset), max(g.position) into last_offset, last_position
        from (
            select
                f.topic_offset,
                f.position,
                sum(f.bytes) over (order by f.topic_offset rows between unbounded preceding and 1 preceding) as before
            from (
                select e.topic_offset, e.position, headwater.kafka_size(e) as bytes
                from headwater.event e
                where
                    e.topic_id = kafka_page.topic_id and e.partition = lane
                    and e.topic_offset >= from_offset and e.topic_offset < end_offset and e.position > after_position
                order by e.topic_offset
                limit max_events
            ) as f
        ) as g
        where coalesce(g.before < max_bytes, true);
    end if;
end;
$$;

-- When the event at an offset was published, in milliseconds. Null: there is none, or not after the position, which must
-- be below its own.
create or replace function headwater.kafka_published_ms(
    topic_id integer,
    lane integer,
    topic_offset bigint,
    after_position bigint
)
returns bigint
language sql
stable
return (
    select headwater.kafka_time(null, e.published_at)
    from headwater.event e
    where
        e.topic_id = kafka_published_ms.topic_id
        and e.partition = kafka_published_ms.lane
        and e.topic_offset = kafka_published_ms.topic_offset
        and e.position > kafka_published_ms.after_position
);

-- The epoch of the first event of a page.
create or replace function headwater.kafka_page_epoch(
    topic_id integer, lane integer, from_offset bigint, after_position bigint
)
returns integer
language sql
volatile
return headwater.epoch_of((
    select e.position
    from headwater.event e
    where
        e.topic_id = kafka_page_epoch.topic_id and e.partition = kafka_page_epoch.lane
        and e.topic_offset >= from_offset and e.position > kafka_page_epoch.after_position
    order by e.topic_offset
    limit 1
));

-- What a fetch must know before it reads. For each lane asked for, by its number: its bounds; the page from an offset on,
-- if one is wanted, with the time at which its last event was published; and the same of other events, each given by the
-- number of its lane, its offset and a position below its own, by which a broker sees whether what it remembers of the
-- lane is still true. No row for a lane that does not exist. Where `max_bytes` is null the events are not looked at: the
-- page, then called plain, is the next `max_events` offsets. All events of a page are of one epoch, `page_epoch`;
-- `present` is the present epoch.
create or replace function headwater.kafka_look(
    topic_ids integer[],
    lanes integer[],
    from_offsets bigint[],
    after_positions bigint[],
    max_events integer[],
    max_bytes bigint[],
    kept_numbers integer[],
    kept_offsets bigint[],
    kept_after bigint[]
)
returns table (
    number integer,
    start_offset bigint,
    end_offset bigint,
    last_offset bigint,
    last_position bigint,
    last_ms bigint,
    plain boolean,
    kept_ms bigint[],
    max_offset bigint,
    page_epoch integer,
    present integer
)
language plpgsql
volatile
as $$
declare
    present_epoch constant integer := headwater.current_epoch();
    -- Events after this position are of the present epoch.
    present_after constant bigint := pg_sequence_last_value('headwater.epoch_start');
    common bigint;
    lane record;
begin
    present := present_epoch;
    for lane in select * from headwater.kafka_bounds(topic_ids, lanes) loop
        number := lane.place;
        start_offset := lane.start_offset;
        end_offset := lane.end_offset;
        max_offset := lane.max_offset;
        page_epoch := present_epoch;
        last_offset := null;
        last_position := null;
        last_ms := null;
        plain := max_bytes[number] is null;
        kept_ms := '{}';
        if lane.kind = 'sequenced' and from_offsets[number] >= start_offset and from_offsets[number] < end_offset then
            if plain then
                select e.topic_offset, e.position, headwater.kafka_time(null, e.published_at)
                into last_offset, last_position, last_ms
                from headwater.event e
                where
                    e.topic_id = lane.topic_id and e.partition = lane.lane
                    and e.topic_offset = least(from_offsets[number] + max_events[number], end_offset) - 1
                    and e.position > after_positions[number];
            else
                select p.last_offset, p.last_position into last_offset, last_position
                from headwater.kafka_page(
                    lane.topic_id, lane.lane, from_offsets[number], end_offset, after_positions[number],
                    max_events[number], max_bytes[number]
                ) as p;
                last_ms := headwater.kafka_published_ms(lane.topic_id, lane.lane, last_offset, last_position - 1);
            end if;
            if last_position is not null and after_positions[number] < present_after then
                page_epoch := headwater.kafka_page_epoch(
                    lane.topic_id, lane.lane, from_offsets[number], after_positions[number]
                );
                common := headwater.common_position(page_epoch, last_position);
                if common < last_position then
                    select e.topic_offset, e.position, headwater.kafka_time(null, e.published_at)
                    into last_offset, last_position, last_ms
                    from headwater.event e
                    where
                        e.topic_id = lane.topic_id and e.partition = lane.lane
                        and e.topic_offset >= from_offsets[number] and e.topic_offset <= last_offset
                        and e.position > after_positions[number] and e.position <= common
                    order by e.topic_offset desc
                    limit 1;
                end if;
            end if;
        end if;
        if number = any (kept_numbers) then
            kept_ms := array(
                select headwater.kafka_published_ms(lane.topic_id, lane.lane, k.kept_offset, k.kept_after)
                from unnest(kept_numbers, kept_offsets, kept_after)
                    with ordinality as k (lane_number, kept_offset, kept_after, place)
                where k.lane_number = number
                order by k.place
            );
        end if;
        return next;
    end loop;
end;
$$;

-- The events of a page of a sequenced lane, which lies between the two positions. What few events have is in `parts`:
-- headers, type, routing key, content type and id.
create or replace function headwater.kafka_fetch_sequenced(
    topic_id integer,
    lane integer,
    from_offset bigint,
    last_offset bigint,
    after_position bigint,
    last_position bigint
)
returns table (
    topic_offset bigint,
    time_ms bigint,
    key bytea,
    payload bytea,
    record_headers bytea,
    parts jsonb
)
language sql
stable
begin atomic
    select
        e.topic_offset, headwater.kafka_time(e.produced_ms, e.published_at), e.key, e.payload, e.record_headers,
        case
            when num_nonnulls(e.headers, e.type, e.routing_key, e.content_type, e.event_id) > 0
            then jsonb_build_array(e.headers, e.type, e.routing_key, e.content_type, e.event_id)
        end
    from headwater.event e
    where
        e.topic_id = kafka_fetch_sequenced.topic_id
        and e.partition = kafka_fetch_sequenced.lane
        and e.topic_offset >= from_offset
        and e.topic_offset <= kafka_fetch_sequenced.last_offset
        and e.position > after_position
        and e.position <= kafka_fetch_sequenced.last_position
    order by e.topic_offset
    -- Offsets are numbered one by one. That there are not more tells Postgres to read them in their order.
    limit kafka_fetch_sequenced.last_offset - from_offset + 1;
end;

-- The same of a page that is taken to be plain: only what each event has, and only of events that have no more, and
-- whose key and payload have up to `max_part` bytes each. If there are as many as offsets, then the page was plain.
create or replace function headwater.kafka_fetch_plain(
    topic_id integer,
    lane integer,
    from_offset bigint,
    last_offset bigint,
    after_position bigint,
    last_position bigint,
    max_part integer
)
returns table (time_ms bigint, key bytea, payload bytea)
language sql
stable
begin atomic
    select headwater.kafka_time(e.produced_ms, e.published_at), e.key, e.payload
    from headwater.event e
    where
        e.topic_id = kafka_fetch_plain.topic_id
        and e.partition = kafka_fetch_plain.lane
        and e.topic_offset >= from_offset
        and e.topic_offset <= kafka_fetch_plain.last_offset
        and e.position > after_position
        and e.position <= kafka_fetch_plain.last_position
        and num_nonnulls(e.headers, e.type, e.routing_key, e.content_type, e.event_id, e.record_headers) = 0
        and coalesce(octet_length(e.payload), 0) <= max_part
        and coalesce(octet_length(e.key), 0) <= max_part
    order by e.topic_offset
    limit kafka_fetch_plain.last_offset - from_offset + 1;
end;

-- The same of an open topic, whose offsets are its positions, below `end_offset`, which the caller knows to be settled:
-- a page and its events.
create or replace function headwater.kafka_fetch_open(
    topic_id integer,
    lane integer,
    from_offset bigint,
    end_offset bigint,
    max_events integer,
    max_bytes bigint
)
returns table (
    topic_offset bigint,
    time_ms bigint,
    key bytea,
    payload bytea,
    record_headers bytea,
    parts jsonb
)
language sql
stable
begin atomic
    select
        p.position, headwater.kafka_time(p.produced_ms, p.published_at), p.key, p.payload, p.record_headers,
        case
            when num_nonnulls(p.headers, p.type, p.routing_key, p.content_type, p.event_id) > 0
            then jsonb_build_array(p.headers, p.type, p.routing_key, p.content_type, p.event_id)
        end
    from (
        select
            e.*,
            sum(e.size) over (order by e.position rows between unbounded preceding and 1 preceding) as bytes_before
        from (
            select f.*, headwater.kafka_size(f) as size
            from headwater.event f
            where
                f.topic_id = kafka_fetch_open.topic_id
                and f.partition = kafka_fetch_open.lane
                and f.position >= from_offset
                and f.position < end_offset
            order by f.position
            limit max_events
        ) as e
    ) as p
    where coalesce(p.bytes_before < max_bytes, true)
    order by p.position;
end;

-- The first event of a lane at or after a time (null: the one with the latest time), as its offset and its time.
-- Producers give times in any order, so the lane is looked through.
create or replace function headwater.kafka_offset_at(topic_id integer, lane integer, at_ms bigint, before_offset bigint)
returns table (topic_offset bigint, time_ms bigint)
language sql
stable
begin atomic
    select o.topic_offset, o.time_ms
    from (
        select
            coalesce(e.topic_offset, e.position) as topic_offset,
            headwater.kafka_time(e.produced_ms, e.published_at) as time_ms
        from headwater.event e
        join headwater.topic t on t.id = e.topic_id
        where
            e.topic_id = kafka_offset_at.topic_id
            and e.partition = kafka_offset_at.lane
            and e.position > t.expired_to
            and coalesce(e.topic_offset, e.position) < before_offset
    ) as o
    where at_ms is null or o.time_ms >= at_ms
    order by case when at_ms is null then -o.time_ms end, o.topic_offset
    limit 1;
end;
