-- Kafka's fetch: where lanes begin and end, and the events of one from an offset on.

-- When an event happened, for Kafka: as its producer says, or as the log does.
create or replace function headwater.kafka_time(produced_ms bigint, published_at timestamptz)
returns bigint
language sql
immutable
return coalesce(produced_ms, floor(extract(epoch from published_at) * 1000)::bigint);

-- Where lanes begin and end: the first offset that is kept, and the one after the last that can be read. No row for a
-- lane that does not exist. Events below `end_offset` are read in a later statement.
create or replace function headwater.kafka_bounds(topic_ids integer[], lanes integer[])
returns table (topic_id integer, lane integer, start_offset bigint, end_offset bigint)
language plpgsql
volatile
as $$
declare
    settled_to bigint;
    asked record;
begin
    for asked in
        select t.id, t.kind, t.expired_to, l.lane, coalesce(k.compacted, false) as compacted,
            coalesce(b.start_offset, 0) as begin_at
        from unnest(topic_ids, lanes) as l (topic_id, lane)
        join headwater.topic t on t.id = l.topic_id and t.deleted_at is null and l.lane between 0 and t.partitions - 1
        left join headwater.kafka_topic k on k.topic_id = t.id
        left join headwater.kafka_lane b on b.topic_id = t.id and b.partition = l.lane
    loop
        topic_id := asked.id;
        lane := asked.lane;
        if asked.kind = 'open' then
            settled_to := coalesce(settled_to, headwater.settled());
            start_offset := greatest(asked.expired_to + 1, asked.begin_at);
            end_offset := greatest(settled_to + 1, start_offset);
        else
            end_offset := headwater.next_offset(asked.id, asked.lane);
            select e.topic_offset into start_offset
            from headwater.event e
            where
                e.topic_id = asked.id and e.partition = asked.lane and e.topic_offset is not null
                and e.position > asked.expired_to
            order by e.topic_offset
            limit 1;
            -- What compaction took is a gap like others: the lane begins where it did.
            start_offset := case
                when asked.compacted and asked.expired_to = 0 then 0
                else coalesce(start_offset, end_offset)
            end;
            start_offset := greatest(start_offset, asked.begin_at);
        end if;
        return next;
    end loop;
end;
$$;

-- The last offset of a page of a sequenced lane: up to `max_events` events from an offset on, until `max_bytes` are
-- reached; one event comes whatever its size. In a lane, positions grow with offsets: `after_position`, that of an
-- earlier event or 0, spares the look into older segments.
create or replace function headwater.kafka_page_end(
    topic_id integer,
    lane integer,
    from_offset bigint,
    after_position bigint,
    max_events integer,
    max_bytes bigint
)
returns bigint
language plpgsql
stable
as $$
declare
    last_offset bigint;
    bytes bigint;
begin
    select max(f.topic_offset), sum(f.bytes) into last_offset, bytes
    from (
        select e.topic_offset, coalesce(octet_length(e.payload), 0) + coalesce(octet_length(e.key), 0) as bytes
        from headwater.event e
        where
            e.topic_id = kafka_page_end.topic_id and e.partition = lane and e.topic_offset >= from_offset
            and e.position > after_position
        order by e.topic_offset
        limit max_events
    ) as f;
    if bytes > max_bytes then
        -- Only now by a running sum, which costs three times as much.
        select max(g.topic_offset) into last_offset
        from (
            select
                f.topic_offset,
                sum(f.bytes) over (order by f.topic_offset rows between unbounded preceding and 1 preceding) as before
            from (
                select e.topic_offset, coalesce(octet_length(e.payload), 0) + coalesce(octet_length(e.key), 0) as bytes
                from headwater.event e
                where
                    e.topic_id = kafka_page_end.topic_id and e.partition = lane and e.topic_offset >= from_offset
                    and e.position > after_position
                order by e.topic_offset
                limit max_events
            ) as f
        ) as g
        where coalesce(g.before < max_bytes, true);
    end if;
    return last_offset;
end;
$$;

-- The events of such a page.
create or replace function headwater.kafka_fetch_sequenced(
    topic_id integer,
    lane integer,
    from_offset bigint,
    after_position bigint,
    max_events integer,
    max_bytes bigint
)
returns table (
    topic_offset bigint,
    "position" bigint,
    time_ms bigint,
    key bytea,
    payload bytea,
    record_headers bytea,
    headers jsonb,
    type text,
    routing_key text,
    content_type text,
    event_id text
)
language sql
stable
begin atomic
    select
        e.topic_offset, e.position, headwater.kafka_time(e.produced_ms, e.published_at), e.key, e.payload,
        e.record_headers, e.headers, e.type, e.routing_key, e.content_type, e.event_id
    from headwater.event e
    where
        e.topic_id = kafka_fetch_sequenced.topic_id
        and e.partition = kafka_fetch_sequenced.lane
        and e.topic_offset >= from_offset
        and e.topic_offset <= (
            select headwater.kafka_page_end(
                kafka_fetch_sequenced.topic_id, kafka_fetch_sequenced.lane, from_offset, after_position, max_events, max_bytes
            )
        )
        and e.position > after_position
    order by e.topic_offset;
end;

-- The same of an open topic, whose offsets are its positions, below `end_offset`, which the caller knows to be settled.
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
    "position" bigint,
    time_ms bigint,
    key bytea,
    payload bytea,
    record_headers bytea,
    headers jsonb,
    type text,
    routing_key text,
    content_type text,
    event_id text
)
language sql
stable
begin atomic
    select
        p.position, p.position, headwater.kafka_time(p.produced_ms, p.published_at), p.key, p.payload,
        p.record_headers, p.headers, p.type, p.routing_key, p.content_type, p.event_id
    from (
        select
            e.*,
            sum(coalesce(octet_length(e.payload), 0) + coalesce(octet_length(e.key), 0))
                over (order by e.position rows between unbounded preceding and 1 preceding) as bytes_before
        from (
            select * from headwater.event f
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
