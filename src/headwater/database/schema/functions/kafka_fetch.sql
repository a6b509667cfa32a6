-- Kafka fetch: where partitions begin and end, and the events of a partition from an offset on.

-- The timestamp of an event for Kafka: the producer's, or the time at which it was published. (STABLE like the
-- functions that it calls, or Postgres would not inline it, and a call for each event costs more than reading it.)
create or replace function headwater_internal.kafka_time(produced_ms bigint, published_at timestamptz)
returns bigint
language sql
stable
return coalesce(produced_ms, floor(extract(epoch from published_at) * 1000)::bigint);

-- The bounds of partitions: the offset before which everything was removed, and the one after the last that can be
-- read; with their index in the arrays and the kind of their topic. No row for a partition that does not exist. Read
-- events below `end_offset` in a later statement. A partition begins where its recorded start is: events removed by
-- compaction are gaps, also at the beginning. A consumer may be at any offset up to `max_offset`: an open topic ends at
-- its stable position, but positions up to the head were assigned, so a consumer there waits.
create or replace function headwater_internal.kafka_bounds(topic_ids integer[], partitions integer[])
returns table (
    topic_id integer, partition integer, start_offset bigint, end_offset bigint, ordinal integer, kind text, max_offset bigint
)
language plpgsql
volatile
as $$
declare
    stable_to bigint;
    stable_topic integer;
    asked record;
begin
    for asked in
        select
            t.id, t.name, t.kind, t.expired_to, l.partition, l.ordinal, coalesce(b.start_offset, 0) as begin_at
        from unnest(topic_ids, partitions) with ordinality as l (topic_id, partition, ordinal)
        join headwater_internal.topic t on t.id = l.topic_id and t.deleted_at is null and l.partition between 0 and t.partitions - 1
        left join headwater_internal.kafka_partition b on b.topic_id = t.id and b.partition = l.partition
    loop
        topic_id := asked.id;
        kafka_bounds.partition := asked.partition;
        ordinal := asked.ordinal;
        kind := asked.kind;
        if asked.kind = 'open' then
            if asked.id is distinct from stable_topic then
                stable_to := headwater.stable_position(array[asked.name]);
                stable_topic := asked.id;
            end if;
            start_offset := greatest(asked.expired_to + 1, asked.begin_at);
            end_offset := greatest(stable_to + 1, start_offset);
            max_offset := greatest(headwater.head() + 1, end_offset);
        else
            end_offset := headwater_internal.next_offset(asked.id, asked.partition);
            start_offset := asked.begin_at;
            max_offset := end_offset;
        end if;
        return next;
    end loop;
end;
$$;

-- Leader epochs are the epochs of the log. Returns the epoch of the event at an offset; if there is none, that of the
-- next event, or else the current epoch.
create or replace function headwater_internal.kafka_epoch_at(topic_id integer, partition integer, at_offset bigint)
returns integer
language plpgsql
volatile
as $$
declare
    event_position bigint;
begin
    if (select t.kind from headwater_internal.topic t where t.id = kafka_epoch_at.topic_id) = 'open' then
        return headwater_internal.epoch_of(at_offset);
    end if;
    select e.position into event_position
    from headwater_internal.event e
    where e.topic_id = kafka_epoch_at.topic_id and e.partition = kafka_epoch_at.partition and e.topic_offset >= at_offset
    order by e.topic_offset
    limit 1;
    return case
        when event_position is null then headwater.current_epoch() else headwater_internal.epoch_of(event_position)
    end;
end;
$$;

-- The end of a leader epoch in a partition: the offset after its last event, by which a consumer that has read in that
-- epoch detects whether its offset still belongs to the same event. `epoch` is the latest one that is not after the
-- requested one, `present` the current one. Both -1: the partition does not exist (then `present` is null), or the
-- epoch has not begun.
create or replace function headwater_internal.kafka_epoch_end(
    topic_id integer,
    partition integer,
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
    select b.* into bounds from headwater_internal.kafka_bounds(array[topic_id], array[kafka_epoch_end.partition]) as b;
    if not found then
        return;
    end if;
    present := headwater.current_epoch();
    if asked_epoch = present then
        epoch := present;
        end_offset := bounds.end_offset;
    elsif asked_epoch between 0 and present then
        epoch := coalesce((select max(e.number) from headwater_internal.epoch e where e.number <= asked_epoch), asked_epoch);
        common := headwater.common_position(asked_epoch, 9223372036854775806);
        if bounds.kind = 'open' then
            end_offset := common + 1;
        else
            select e.topic_offset into end_offset
            from headwater_internal.event e
            where e.topic_id = kafka_epoch_end.topic_id and e.partition = kafka_epoch_end.partition and e.position > common
            order by e.topic_offset
            limit 1;
            end_offset := coalesce(end_offset, bounds.end_offset);
        end if;
        -- Events removed by retention belong to no epoch any more: a consumer that goes back goes to the first that
        -- exists.
        end_offset := greatest(end_offset, bounds.start_offset);
    end if;
end;
$$;

-- How much of a fetch limit an event uses: its fields, and the overhead of a record.
create or replace function headwater_internal.kafka_size(e headwater_internal.event)
returns integer
language sql
stable
return 12 + coalesce(octet_length(e.payload), 0) + coalesce(octet_length(e.key), 0)
    + coalesce(pg_column_size(e.headers), 0) + coalesce(octet_length(e.record_headers), 0);

-- A page of a sequenced partition: up to `max_events` events from an offset on and below `end_offset`, until
-- `max_bytes` are reached; at least one event, whatever its size. Within a partition, positions grow with offsets:
-- `after_position`, that of an earlier event or 0, avoids reading older segments. All null: there is no event.
create or replace function headwater_internal.kafka_page(
    topic_id integer,
    partition integer,
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
        select e.topic_offset, e.position, headwater_internal.kafka_size(e) as bytes
        from headwater_internal.event e
        where
            e.topic_id = kafka_page.topic_id and e.partition = kafka_page.partition
            and e.topic_offset >= from_offset and e.topic_offset < end_offset and e.position > after_position
        order by e.topic_offset
        limit max_events
    ) as f;
    if bytes > max_bytes then
        -- Only now with a running sum, which costs three times as much.
        select max(g.topic_offset), max(g.position) into last_offset, last_position
        from (
            select
                f.topic_offset,
                f.position,
                sum(f.bytes) over (order by f.topic_offset rows between unbounded preceding and 1 preceding) as before
            from (
                select e.topic_offset, e.position, headwater_internal.kafka_size(e) as bytes
                from headwater_internal.event e
                where
                    e.topic_id = kafka_page.topic_id and e.partition = kafka_page.partition
                    and e.topic_offset >= from_offset and e.topic_offset < end_offset and e.position > after_position
                order by e.topic_offset
                limit max_events
            ) as f
        ) as g
        where coalesce(g.before < max_bytes, true);
    end if;
end;
$$;

-- The time at which the event at an offset was published, in milliseconds. Null: there is none after the position,
-- which must be below its own.
create or replace function headwater_internal.kafka_published_ms(
    topic_id integer,
    partition integer,
    topic_offset bigint,
    after_position bigint
)
returns bigint
language sql
stable
return (
    select headwater_internal.kafka_time(null, e.published_at)
    from headwater_internal.event e
    where
        e.topic_id = kafka_published_ms.topic_id
        and e.partition = kafka_published_ms.partition
        and e.topic_offset = kafka_published_ms.topic_offset
        and e.position > kafka_published_ms.after_position
);

-- The epoch of the first event of a page.
create or replace function headwater_internal.kafka_page_epoch(
    topic_id integer, partition integer, from_offset bigint, after_position bigint
)
returns integer
language sql
volatile
return headwater_internal.epoch_of((
    select e.position
    from headwater_internal.event e
    where
        e.topic_id = kafka_page_epoch.topic_id and e.partition = kafka_page_epoch.partition
        and e.topic_offset >= from_offset and e.position > kafka_page_epoch.after_position
    order by e.topic_offset
    limit 1
));

-- Everything that a fetch needs before it reads. For each requested partition, by its number: its bounds; if wanted,
-- the page from an offset on, with the time at which its last event was published; and the same time for other events,
-- each given by the number of its partition, its offset and a position below its own, by which a broker validates its
-- cache of the partition. No row for a partition that does not exist. If `max_bytes` is null the events are not read:
-- the page, then called plain, is the next `max_events` offsets. All events of a page belong to one epoch,
-- `page_epoch`; `present` is the current epoch.
create or replace function headwater_internal.kafka_look(
    topic_ids integer[],
    partitions integer[],
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
    -- Events after this position belong to the current epoch.
    present_after constant bigint := pg_sequence_last_value('headwater_internal.epoch_start');
    common bigint;
    bounds record;
begin
    present := present_epoch;
    for bounds in select * from headwater_internal.kafka_bounds(topic_ids, partitions) loop
        number := bounds.ordinal;
        start_offset := bounds.start_offset;
        end_offset := bounds.end_offset;
        max_offset := bounds.max_offset;
        page_epoch := present_epoch;
        last_offset := null;
        last_position := null;
        last_ms := null;
        plain := max_bytes[number] is null;
        kept_ms := '{}';
        if bounds.kind = 'sequenced' and from_offsets[number] >= start_offset and from_offsets[number] < end_offset then
            if plain then
                select e.topic_offset, e.position, headwater_internal.kafka_time(null, e.published_at)
                into last_offset, last_position, last_ms
                from headwater_internal.event e
                where
                    e.topic_id = bounds.topic_id and e.partition = bounds.partition
                    and e.topic_offset = least(from_offsets[number] + max_events[number], end_offset) - 1
                    and e.position > after_positions[number];
            else
                select p.last_offset, p.last_position into last_offset, last_position
                from headwater_internal.kafka_page(
                    bounds.topic_id, bounds.partition, from_offsets[number], end_offset, after_positions[number],
                    max_events[number], max_bytes[number]
                ) as p;
                last_ms := headwater_internal.kafka_published_ms(bounds.topic_id, bounds.partition, last_offset, last_position - 1);
            end if;
            if last_position is not null and after_positions[number] < present_after then
                page_epoch := headwater_internal.kafka_page_epoch(
                    bounds.topic_id, bounds.partition, from_offsets[number], after_positions[number]
                );
                common := headwater.common_position(page_epoch, last_position);
                if common < last_position then
                    select e.topic_offset, e.position, headwater_internal.kafka_time(null, e.published_at)
                    into last_offset, last_position, last_ms
                    from headwater_internal.event e
                    where
                        e.topic_id = bounds.topic_id and e.partition = bounds.partition
                        and e.topic_offset >= from_offsets[number] and e.topic_offset <= last_offset
                        and e.position > after_positions[number] and e.position <= common
                    order by e.topic_offset desc
                    limit 1;
                end if;
            end if;
        end if;
        if number = any (kept_numbers) then
            kept_ms := array(
                select headwater_internal.kafka_published_ms(bounds.topic_id, bounds.partition, k.kept_offset, k.kept_after)
                from unnest(kept_numbers, kept_offsets, kept_after)
                    with ordinality as k (partition_number, kept_offset, kept_after, ordinal)
                where k.partition_number = number
                order by k.ordinal
            );
        end if;
        return next;
    end loop;
end;
$$;

-- The events of a page of a sequenced partition, which lies between the two positions. Fields that few events have are
-- in `parts`: headers, type, routing key, content type and id.
create or replace function headwater_internal.kafka_fetch_sequenced(
    topic_id integer,
    partition integer,
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
        e.topic_offset, headwater_internal.kafka_time(e.produced_ms, e.published_at), e.key, e.payload, e.record_headers,
        case
            when num_nonnulls(e.headers, e.type, e.routing_key, e.content_type, e.event_id) > 0
            then jsonb_build_array(e.headers, e.type, e.routing_key, e.content_type, e.event_id)
        end
    from headwater_internal.event e
    where
        e.topic_id = kafka_fetch_sequenced.topic_id
        and e.partition = kafka_fetch_sequenced.partition
        and e.topic_offset >= from_offset
        and e.topic_offset <= kafka_fetch_sequenced.last_offset
        and e.position > after_position
        and e.position <= kafka_fetch_sequenced.last_position
    order by e.topic_offset
    -- Offsets are dense. The limit makes Postgres read them in index order.
    limit kafka_fetch_sequenced.last_offset - from_offset + 1;
end;

-- The same for a page that is assumed to be plain: only the fields that each event has, only of events without other
-- fields, and whose key and payload have up to `max_part` bytes each. If the number of rows equals the number of
-- offsets, the page was plain.
create or replace function headwater_internal.kafka_fetch_plain(
    topic_id integer,
    partition integer,
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
    select headwater_internal.kafka_time(e.produced_ms, e.published_at), e.key, e.payload
    from headwater_internal.event e
    where
        e.topic_id = kafka_fetch_plain.topic_id
        and e.partition = kafka_fetch_plain.partition
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

-- The same for an open topic, whose offsets are its positions, below `end_offset`, which the caller knows to be stable:
-- a page and its events.
create or replace function headwater_internal.kafka_fetch_open(
    topic_id integer,
    partition integer,
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
        p.position, headwater_internal.kafka_time(p.produced_ms, p.published_at), p.key, p.payload, p.record_headers,
        case
            when num_nonnulls(p.headers, p.type, p.routing_key, p.content_type, p.event_id) > 0
            then jsonb_build_array(p.headers, p.type, p.routing_key, p.content_type, p.event_id)
        end
    from (
        select
            e.*,
            sum(e.size) over (order by e.position rows between unbounded preceding and 1 preceding) as bytes_before
        from (
            select f.*, headwater_internal.kafka_size(f) as size
            from headwater_internal.event f
            where
                f.topic_id = kafka_fetch_open.topic_id
                and f.partition = kafka_fetch_open.partition
                and f.position >= from_offset
                and f.position < end_offset
            order by f.position
            limit max_events
        ) as e
    ) as p
    where coalesce(p.bytes_before < max_bytes, true)
    order by p.position;
end;

-- The first event of a partition at or after a time (null: the one with the latest time), as its offset and its time.
-- Producers send timestamps in any order, so the whole partition is scanned.
create or replace function headwater_internal.kafka_offset_at(topic_id integer, partition integer, at_ms bigint, before_offset bigint)
returns table (topic_offset bigint, time_ms bigint)
language sql
stable
begin atomic
    select o.topic_offset, o.time_ms
    from (
        select
            coalesce(e.topic_offset, e.position) as topic_offset,
            headwater_internal.kafka_time(e.produced_ms, e.published_at) as time_ms
        from headwater_internal.event e
        join headwater_internal.topic t on t.id = e.topic_id
        where
            e.topic_id = kafka_offset_at.topic_id
            and e.partition = kafka_offset_at.partition
            and e.position > t.expired_to
            and coalesce(e.topic_offset, e.position) < before_offset
    ) as o
    where at_ms is null or o.time_ms >= at_ms
    order by case when at_ms is null then -o.time_ms end, o.topic_offset
    limit 1;
end;
