-- Kafka produce: batches of many requests in one transaction, each idempotent producer's batch exactly once.

-- Whether a producer's batch is the next of its partition, a duplicate, or out of order. The caller must hold the lock
-- of the partition. `outcome`: append, duplicate (then with its offset), out of order, fenced.
create or replace function headwater_internal.kafka_check_sequence(
    producer_id bigint,
    topic_id integer,
    partition integer,
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
    known headwater_internal.kafka_producer_partition;
    found_index integer;
    newest integer;
begin
    select * into known
    from headwater_internal.kafka_producer_partition p
    where
        p.producer_id = kafka_check_sequence.producer_id
        and p.topic_id = kafka_check_sequence.topic_id
        and p.partition = kafka_check_sequence.partition;
    if not found then
        outcome := 'append';
    elsif epoch < known.epoch then
        outcome := 'fenced';
    elsif epoch > known.epoch then
        outcome := case when first_sequence = 0 then 'append' else 'out of order' end;
    else
        found_index := array_position(known.first_sequences, first_sequence);
        newest := known.last_sequences[cardinality(known.last_sequences)];
        if found_index is not null and known.last_sequences[found_index] = last_sequence then
            outcome := 'duplicate';
            base_offset := known.base_offsets[found_index];
        -- Sequence numbers restart at 0 after 2147483647.
        elsif first_sequence = (case when newest = 2147483647 then 0 else newest + 1 end) then
            outcome := 'append';
        else
            outcome := 'out of order';
        end if;
    end if;
end;
$$;

-- Record a batch as the newest of its producer in a partition.
create or replace function headwater_internal.kafka_note_batch(
    producer_id bigint,
    topic_id integer,
    partition integer,
    epoch integer,
    first_sequence integer,
    last_sequence integer,
    base_offset bigint
)
returns void
language sql
begin atomic
    insert into headwater_internal.kafka_producer_partition as p
        (producer_id, topic_id, partition, epoch, first_sequences, last_sequences, base_offsets)
    values (
        kafka_note_batch.producer_id, kafka_note_batch.topic_id, kafka_note_batch.partition, kafka_note_batch.epoch,
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

-- Write records to partitions that the caller has locked. The first three arrays describe batches, a null offset skips
-- one; the others describe records, in the order of the batches, or are null if no record has that field. HW015 for a
-- reserved topic.
create or replace function headwater_internal.kafka_write(
    topic_ids integer[],
    partitions integer[],
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
    record_partitions integer[];
    record_offsets bigint[];
begin
    if exists (
        select from unnest(topic_ids, base_offsets) as b (topic_id, base_offset)
        join headwater_internal.topic t on t.id = b.topic_id
        where t.reserved and b.base_offset is not null
    ) then
        raise exception 'topics whose names begin with "headwater." are reserved: only Headwater writes to them'
            using errcode = 'HW015', hint = 'Produce to a topic with another name.';
    end if;
    perform headwater_internal.advertise_publisher(t.name) from headwater_internal.topic t where t.id = any (topic_ids);
    select array_agg(b.topic_id), array_agg(b.partition), array_agg(b.base_offset + n.record_number)
    into record_topics, record_partitions, record_offsets
    from unnest(topic_ids, partitions, counts, base_offsets) as b (topic_id, partition, count, base_offset)
    cross join lateral generate_series(0, b.count - 1) as n (record_number);
    insert into headwater_internal.event
        (position, topic_id, partition, topic_offset, key, type, routing_key, headers, content_type, payload,
         published_at, produced_ms, record_headers)
    select
        nextval('headwater_internal.position'), r.topic_id, r.partition, r.topic_offset, r.key, r.type, r.routing_key, r.headers::jsonb, r.content_type, r.payload,
        appended_at, r.produced, r.record_headers
    from (
        select
            unnest(record_topics) as topic_id,
            unnest(record_partitions) as partition,
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

-- Lock all these partitions until the transaction ends, in the same order as every publisher: by topic, then partition.
create or replace function headwater_internal.kafka_hold_partitions(topic_ids integer[], partitions integer[])
returns void
language plpgsql
as $$
declare
    held record;
begin
    for held in
        select l.topic_id, array_agg(l.partition) as partitions
        from unnest(topic_ids, partitions) as l (topic_id, partition)
        group by l.topic_id
        order by l.topic_id
    loop
        perform headwater_internal.lock_partitions(held.topic_id, held.partitions);
    end loop;
end;
$$;

-- Append batches of one or many requests, in the order given: the arrays are those of kafka_write(), with the producers
-- of the batches (an id below 0: not idempotent). Returns one row for each batch, in order; `outcome` is appended,
-- duplicate, out of order, fenced, no topic or reserved. Appended events have positions after `after_position`, in
-- `epoch`.
create or replace function headwater_internal.kafka_append(
    topic_ids integer[],
    partitions integer[],
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
-- A long transaction that publishes to one partition must not block producers to others.
set lock_timeout = '1s'
as $$
declare
    appended_at constant timestamptz := date_trunc('milliseconds', clock_timestamp());
    head constant bigint := headwater.head();
    outcomes text[] := '{}';
    answers bigint[] := '{}';
    bases bigint[] := '{}';
    -- The next offset of each partition, indexed by its first batch.
    first_of_partition integer[];
    next_offsets bigint[] := '{}';
    checked record;
    partition_number integer;
    last_sequence integer;
begin
    perform headwater_internal.kafka_hold_partitions(topic_ids, partitions);
    select array_agg(f.first_batch order by f.batch) into first_of_partition
    from (
        select b.batch, min(b.batch) over (partition by b.topic_id, b.partition) as first_batch
        from unnest(topic_ids, partitions) with ordinality as b (topic_id, partition, batch)
    ) as f;
    for batch in 1 .. cardinality(topic_ids) loop
        partition_number := first_of_partition[batch];
        if partition_number = batch then
            next_offsets[batch] := case
                when exists (
                    select from headwater_internal.topic t
                    where
                        t.id = topic_ids[batch] and t.deleted_at is null and t.kind = 'sequenced'
                        and not t.event_store and not t.reserved and kafka_append.partitions[batch] < t.partitions
                )
                then headwater_internal.next_offset(topic_ids[batch], partitions[batch])
            end;
        end if;
        if next_offsets[partition_number] is null then
            outcomes[batch] := case
                when exists (select from headwater_internal.topic t where t.id = topic_ids[batch] and t.reserved) then 'reserved'
                else 'no topic'
            end;
            bases[batch] := null;
            answers[batch] := null;
            continue;
        end if;
        if producer_ids[batch] >= 0 then
            last_sequence := (sequences[batch]::bigint + counts[batch] - 1) % 2147483648;
            select c.outcome, c.base_offset into checked
            from headwater_internal.kafka_check_sequence(
                producer_ids[batch], topic_ids[batch], partitions[batch], producer_epochs[batch], sequences[batch], last_sequence
            ) as c;
            if checked.outcome <> 'append' then
                outcomes[batch] := checked.outcome;
                bases[batch] := null;
                answers[batch] := checked.base_offset;
                continue;
            end if;
            perform headwater_internal.kafka_note_batch(
                producer_ids[batch], topic_ids[batch], partitions[batch], producer_epochs[batch], sequences[batch],
                last_sequence, next_offsets[partition_number]
            );
        end if;
        outcomes[batch] := 'appended';
        bases[batch] := next_offsets[partition_number];
        answers[batch] := next_offsets[partition_number];
        next_offsets[partition_number] := next_offsets[partition_number] + counts[batch];
    end loop;
    perform headwater_internal.kafka_write(
        topic_ids, partitions, counts, bases, appended_at,
        payloads, keys, types, routing_keys, headers, content_types, produced, record_headers
    );
    return query
    select
        r.outcome, r.base_offset, (extract(epoch from appended_at) * 1000)::bigint, head, headwater.current_epoch()
    from unnest(outcomes, answers) with ordinality as r (outcome, base_offset, batch)
    order by r.batch;
end;
$$;
