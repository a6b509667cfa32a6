-- Kafka's produce: batches of many requests in one transaction, each producer's batch once.

-- Whether a producer's batch is the next of its lane, one that came before, or neither. Only the holder of the lane
-- may ask. `outcome`: append, duplicate (then with the offset it got), out of order, fenced.
create or replace function headwater.kafka_check_sequence(
    producer_id bigint,
    topic_id integer,
    lane integer,
    epoch integer,
    first_sequence integer,
    last_sequence integer,
    out outcome text,
    out base_offset bigint
)
language plpgsql
stable
as $$
declare
    known headwater.kafka_producer_lane;
    place integer;
    newest integer;
begin
    select * into known
    from headwater.kafka_producer_lane p
    where
        p.producer_id = kafka_check_sequence.producer_id
        and p.topic_id = kafka_check_sequence.topic_id
        and p.partition = lane;
    if not found then
        outcome := 'append';
    elsif epoch < known.epoch then
        outcome := 'fenced';
    elsif epoch > known.epoch then
        outcome := case when first_sequence = 0 then 'append' else 'out of order' end;
    else
        place := array_position(known.first_sequences, first_sequence);
        newest := known.last_sequences[cardinality(known.last_sequences)];
        if place is not null and known.last_sequences[place] = last_sequence then
            outcome := 'duplicate';
            base_offset := known.base_offsets[place];
        -- Sequences start again at 0 after 2147483647.
        elsif first_sequence = (case when newest = 2147483647 then 0 else newest + 1 end) then
            outcome := 'append';
        else
            outcome := 'out of order';
        end if;
    end if;
end;
$$;

-- Note a batch as the newest of its producer in a lane.
create or replace function headwater.kafka_note_batch(
    producer_id bigint,
    topic_id integer,
    lane integer,
    epoch integer,
    first_sequence integer,
    last_sequence integer,
    base_offset bigint
)
returns void
language sql
begin atomic
    insert into headwater.kafka_producer_lane as p
        (producer_id, topic_id, partition, epoch, first_sequences, last_sequences, base_offsets)
    values (
        kafka_note_batch.producer_id, kafka_note_batch.topic_id, lane, kafka_note_batch.epoch,
        array[first_sequence], array[last_sequence], array[kafka_note_batch.base_offset]
    )
    on conflict (producer_id, topic_id, partition) do update
    set
        epoch = excluded.epoch,
        first_sequences = case
            when p.epoch < excluded.epoch then excluded.first_sequences
            else (p.first_sequences || excluded.first_sequences)[greatest(cardinality(p.first_sequences) - 3, 1):]
        end,
        last_sequences = case
            when p.epoch < excluded.epoch then excluded.last_sequences
            else (p.last_sequences || excluded.last_sequences)[greatest(cardinality(p.last_sequences) - 3, 1):]
        end,
        base_offsets = case
            when p.epoch < excluded.epoch then excluded.base_offsets
            else (p.base_offsets || excluded.base_offsets)[greatest(cardinality(p.base_offsets) - 3, 1):]
        end,
        updated_at = clock_timestamp();
end;

-- Write records to lanes that the caller holds. The first three arrays are of batches, a null offset passes over one;
-- the others are of records, in the order of the batches, or null where no record has that part.
create or replace function headwater.kafka_write(
    topic_ids integer[],
    lanes integer[],
    counts integer[],
    base_offsets bigint[],
    appended_at timestamptz,
    payloads bytea[],
    keys bytea[],
    types text[],
    routing_keys text[],
    headers text[],
    content_types text[],
    produced bigint[],
    record_headers bytea[]
)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    record_topics integer[];
    record_lanes integer[];
    record_offsets bigint[];
begin
    if exists (
        select from unnest(topic_ids, base_offsets) as b (topic_id, base_offset)
        join headwater.topic t on t.id = b.topic_id
        where t.reserved and b.base_offset is not null
    ) then
        raise exception 'a topic whose name begins with "headwater." is written by Headwater alone'
            using errcode = 'HW015', hint = 'Produce to a topic of your own.';
    end if;
    perform headwater.advertise_publisher(t.name) from headwater.topic t where t.id = any (topic_ids);
    select array_agg(b.topic_id), array_agg(b.lane), array_agg(b.base_offset + n.place)
    into record_topics, record_lanes, record_offsets
    from unnest(topic_ids, lanes, counts, base_offsets) as b (topic_id, lane, count, base_offset)
    cross join lateral generate_series(0, b.count - 1) as n (place);
    insert into headwater.event
        (position, topic_id, partition, topic_offset, key, type, routing_key, headers, content_type, payload,
         published_at, produced_ms, record_headers)
    select
        nextval('headwater.position'), r.topic_id, r.lane, r.topic_offset, r.key, r.type, r.routing_key, r.headers::jsonb, r.content_type, r.payload,
        appended_at, r.produced, r.record_headers
    from (
        select
            unnest(record_topics) as topic_id,
            unnest(record_lanes) as lane,
            unnest(record_offsets) as topic_offset,
            unnest(keys) as key,
            unnest(types) as type,
            unnest(routing_keys) as routing_key,
            unnest(kafka_write.headers) as headers,
            unnest(content_types) as content_type,
            unnest(payloads) as payload,
            unnest(produced) as produced,
            unnest(kafka_write.record_headers) as record_headers
    ) as r
    where r.topic_offset is not null;
end;
$$;

-- Hold all these lanes to the end of the transaction, in the one order that every publisher keeps within a topic.
create or replace function headwater.kafka_hold_lanes(topic_ids integer[], lanes integer[])
returns void
language plpgsql
as $$
declare
    held record;
begin
    for held in
        select l.topic_id, array_agg(l.lane) as lanes
        from unnest(topic_ids, lanes) as l (topic_id, lane)
        group by l.topic_id
        order by l.topic_id
    loop
        perform headwater.lock_lanes(held.topic_id, held.lanes);
    end loop;
end;
$$;

-- Append batches, of one or many requests, in the order given: the arrays are those of kafka_write, with the producers
-- of the batches (an id below 0: the producer is not idempotent). One row comes back for each batch, in order; its
-- `outcome` is appended, duplicate, out of order, fenced, no topic or reserved. What was appended has positions after
-- `after_position`, and is of `epoch`.
create or replace function headwater.kafka_append(
    topic_ids integer[],
    lanes integer[],
    counts integer[],
    producer_ids bigint[],
    producer_epochs integer[],
    sequences integer[],
    payloads bytea[],
    keys bytea[],
    types text[],
    routing_keys text[],
    headers text[],
    content_types text[],
    produced bigint[],
    record_headers bytea[]
)
returns table (outcome text, base_offset bigint, appended_ms bigint, after_position bigint, epoch integer)
language plpgsql
-- Somebody who publishes to a lane in a long transaction must not stop those who write to others.
set lock_timeout = '1s'
as $$
declare
    appended_at constant timestamptz := date_trunc('milliseconds', clock_timestamp());
    drawn constant bigint := headwater.head();
    outcomes text[] := '{}';
    answers bigint[] := '{}';
    bases bigint[] := '{}';
    -- Where each lane goes on, by the number of its first batch.
    first_of_lane integer[];
    next_offsets bigint[] := '{}';
    checked record;
    lane_number integer;
    last_sequence integer;
begin
    perform headwater.kafka_hold_lanes(topic_ids, lanes);
    select array_agg(f.first_batch order by f.batch) into first_of_lane
    from (
        select b.batch, min(b.batch) over (partition by b.topic_id, b.lane) as first_batch
        from unnest(topic_ids, lanes) with ordinality as b (topic_id, lane, batch)
    ) as f;
    for batch in 1 .. cardinality(topic_ids) loop
        lane_number := first_of_lane[batch];
        if lane_number = batch then
            next_offsets[batch] := case
                when exists (
                    select from headwater.topic t
                    where
                        t.id = topic_ids[batch] and t.deleted_at is null and t.kind = 'sequenced'
                        and not t.event_store and not t.reserved and lanes[batch] < t.partitions
                )
                then headwater.next_offset(topic_ids[batch], lanes[batch])
            end;
        end if;
        if next_offsets[lane_number] is null then
            outcomes[batch] := case
                when exists (select from headwater.topic t where t.id = topic_ids[batch] and t.reserved) then 'reserved'
                else 'no topic'
            end;
            bases[batch] := null;
            answers[batch] := null;
            continue;
        end if;
        if producer_ids[batch] >= 0 then
            last_sequence := (sequences[batch]::bigint + counts[batch] - 1) % 2147483648;
            select c.outcome, c.base_offset into checked
            from headwater.kafka_check_sequence(
                producer_ids[batch], topic_ids[batch], lanes[batch], producer_epochs[batch], sequences[batch], last_sequence
            ) as c;
            if checked.outcome <> 'append' then
                outcomes[batch] := checked.outcome;
                bases[batch] := null;
                answers[batch] := checked.base_offset;
                continue;
            end if;
            perform headwater.kafka_note_batch(
                producer_ids[batch], topic_ids[batch], lanes[batch], producer_epochs[batch], sequences[batch],
                last_sequence, next_offsets[lane_number]
            );
        end if;
        outcomes[batch] := 'appended';
        bases[batch] := next_offsets[lane_number];
        answers[batch] := next_offsets[lane_number];
        next_offsets[lane_number] := next_offsets[lane_number] + counts[batch];
    end loop;
    perform headwater.kafka_write(
        topic_ids, lanes, counts, bases, appended_at,
        payloads, keys, types, routing_keys, headers, content_types, produced, record_headers
    );
    return query
    select
        r.outcome, r.base_offset, (extract(epoch from appended_at) * 1000)::bigint, drawn, headwater.current_epoch()
    from unnest(outcomes, answers) with ordinality as r (outcome, base_offset, batch)
    order by r.batch;
end;
$$;
