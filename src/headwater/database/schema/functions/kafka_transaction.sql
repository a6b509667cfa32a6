-- Kafka's transactions: records and offsets wait beside the log and enter it as one when the producer commits.

-- Lock a transactional producer and look whether the caller is it. `outcome`: ok, unknown, fenced.
create or replace function headwater.kafka_hold_producer(
    transactional_id text,
    producer_id bigint,
    epoch integer,
    out outcome text,
    out held headwater.kafka_transaction
)
language plpgsql
as $$
begin
    select * into held
    from headwater.kafka_transaction t
    where t.transactional_id = kafka_hold_producer.transactional_id
    for update;
    outcome := case
        when held.producer_id is distinct from kafka_hold_producer.producer_id then 'unknown'
        when held.epoch <> kafka_hold_producer.epoch then 'fenced'
        else 'ok'
    end;
end;
$$;

-- Throw away what an open transaction has gathered. Only the holder of the producer may.
create or replace function headwater.kafka_discard(producer_id bigint)
returns void
language sql
begin atomic
    delete from headwater.kafka_staged s where s.producer_id = kafka_discard.producer_id;
    delete from headwater.kafka_staged_offset s where s.producer_id = kafka_discard.producer_id;
end;

-- Raise a producer's epoch, so that whoever has the present one is fenced; after the last epoch it gets another id. Only
-- the holder of the producer may, when nothing of a transaction is put aside.
create or replace function headwater.kafka_next_epoch(
    transactional_id text,
    asked_itself boolean,
    out producer_id bigint,
    out epoch integer
)
language plpgsql
as $$
begin
    update headwater.kafka_transaction t
    set
        producer_id = case when t.epoch < 32766 then t.producer_id else headwater.kafka_number('headwater.kafka_producer_id') end,
        epoch = case when t.epoch < 32766 then t.epoch + 1 else 0 end,
        former_id = case when asked_itself then t.producer_id end,
        former_epoch = case when asked_itself then t.epoch end,
        updated_at = clock_timestamp()
    where t.transactional_id = kafka_next_epoch.transactional_id
    returning t.producer_id, t.epoch into producer_id, epoch;
end;
$$;

-- Begin the life of a transactional producer: whoever had its name before is fenced, and what it left open is undone.
-- A producer that says who it is (an id of 0 or more) must still be it. `outcome`: ok, unknown, fenced.
create or replace function headwater.kafka_init_transactions(
    transactional_id text,
    timeout_ms integer,
    known_id bigint default -1,
    known_epoch integer default -1,
    out outcome text,
    out producer_id bigint,
    out epoch integer
)
language plpgsql
as $$
declare
    held headwater.kafka_transaction;
begin
    outcome := 'ok';
    insert into headwater.kafka_transaction as t (transactional_id, producer_id, epoch, timeout_ms)
    values (
        kafka_init_transactions.transactional_id, headwater.kafka_number('headwater.kafka_producer_id'), 0,
        kafka_init_transactions.timeout_ms
    )
    on conflict on constraint kafka_transaction_pkey do nothing
    returning * into held;
    if found then
        producer_id := held.producer_id;
        epoch := held.epoch;
        return;
    end if;
    select * into held
    from headwater.kafka_transaction t
    where t.transactional_id = kafka_init_transactions.transactional_id
    for update;
    if known_id >= 0 and (known_id, known_epoch) is distinct from (held.producer_id, held.epoch) then
        outcome := case
            -- The answer to the same request got lost.
            when (known_id, known_epoch) = (held.former_id, held.former_epoch) then 'ok'
            when known_id = held.producer_id then 'fenced'
            else 'unknown'
        end;
        if outcome = 'ok' then
            producer_id := held.producer_id;
            epoch := held.epoch;
        end if;
        return;
    end if;
    perform headwater.kafka_discard(held.producer_id);
    select n.producer_id, n.epoch into producer_id, epoch
    from headwater.kafka_next_epoch(kafka_init_transactions.transactional_id, asked_itself => known_id >= 0) as n;
    update headwater.kafka_transaction t
    set
        timeout_ms = kafka_init_transactions.timeout_ms,
        last_outcome = case when t.began_at is not null then 'aborted' else t.last_outcome end,
        began_at = null
    where t.transactional_id = kafka_init_transactions.transactional_id;
end;
$$;

-- Begin a transaction, unless one is open already. `outcome` is that of kafka_hold_producer.
create or replace function headwater.kafka_begin(transactional_id text, producer_id bigint, epoch integer)
returns text
language plpgsql
as $$
declare
    checked record;
begin
    select * into checked from headwater.kafka_hold_producer(transactional_id, producer_id, epoch);
    if checked.outcome = 'ok' and (checked.held).began_at is null then
        update headwater.kafka_transaction t
        set began_at = clock_timestamp(), updated_at = clock_timestamp()
        where t.transactional_id = kafka_begin.transactional_id;
    end if;
    return checked.outcome;
end;
$$;

-- Put a batch aside for the open transaction of its producer, which it may begin. `outcome`: staged, duplicate, out of
-- order, fenced, unknown, no transaction, reserved.
create or replace function headwater.kafka_stage(
    transactional_id text,
    topic_id integer,
    lane integer,
    batch_size integer,
    producer_id bigint,
    epoch integer,
    first_sequence integer,
    payloads bytea[],
    keys bytea[],
    types text[],
    routing_keys text[],
    headers text[],
    content_types text[],
    produced bigint[],
    record_headers bytea[],
    may_begin boolean
)
returns text
language plpgsql
as $$
declare
    last_sequence constant integer := (first_sequence::bigint + batch_size - 1) % 2147483648;
    checked record;
    sequence_outcome text;
begin
    select * into checked from headwater.kafka_hold_producer(transactional_id, producer_id, epoch);
    if checked.outcome <> 'ok' then
        return checked.outcome;
    elsif (checked.held).began_at is null and not may_begin then
        return 'no transaction';
    end if;
    if exists (select from headwater.topic t where t.id = kafka_stage.topic_id and t.reserved) then
        return 'reserved';
    end if;
    select c.outcome into sequence_outcome
    from headwater.kafka_check_sequence(producer_id, topic_id, lane, epoch, first_sequence, last_sequence) as c;
    if sequence_outcome <> 'append' then
        return sequence_outcome;
    end if;
    perform headwater.kafka_begin(transactional_id, producer_id, epoch);
    perform headwater.kafka_note_batch(producer_id, topic_id, lane, epoch, first_sequence, last_sequence, -1);
    insert into headwater.kafka_staged
        (producer_id, topic_id, partition, payloads, keys, types, routing_keys, headers, content_types, produced,
         record_headers)
    values (
        kafka_stage.producer_id, kafka_stage.topic_id, lane, payloads, keys, types, routing_keys, headers,
        content_types, produced, kafka_stage.record_headers
    );
    return 'staged';
end;
$$;

-- Put offsets of a consumer group aside for the open transaction, which they may begin. `outcome` as above, or ok.
create or replace function headwater.kafka_stage_offsets(
    transactional_id text,
    producer_id bigint,
    epoch integer,
    group_name text,
    topic_ids integer[],
    lanes integer[],
    offsets bigint[],
    leader_epochs integer[],
    metadatas text[],
    may_begin boolean
)
returns text
language plpgsql
as $$
declare
    checked record;
begin
    select * into checked from headwater.kafka_hold_producer(transactional_id, producer_id, epoch);
    if checked.outcome <> 'ok' then
        return checked.outcome;
    elsif (checked.held).began_at is null and not may_begin then
        return 'no transaction';
    end if;
    perform headwater.kafka_begin(transactional_id, producer_id, epoch);
    insert into headwater.kafka_staged_offset
        (producer_id, group_name, topic_id, partition, committed_offset, leader_epoch, metadata)
    select distinct on (c.topic_id, c.lane)
        kafka_stage_offsets.producer_id, kafka_stage_offsets.group_name, c.topic_id, c.lane,
        headwater.kafka_bounded_offset(c.topic_id, c.lane, c.committed_offset, c.leader_epoch), c.leader_epoch, c.metadata
    from unnest(topic_ids, lanes, offsets, leader_epochs, metadatas) with ordinality
        as c (topic_id, lane, committed_offset, leader_epoch, metadata, place)
    join headwater.topic t on t.id = c.topic_id and t.deleted_at is null
    order by c.topic_id, c.lane, c.place desc
    on conflict on constraint kafka_staged_offset_pkey do update
    set
        committed_offset = excluded.committed_offset,
        leader_epoch = excluded.leader_epoch,
        metadata = excluded.metadata;
    return 'ok';
end;
$$;

-- End the open transaction: all of it enters the log and the offsets now, or nothing ever does. A client that asks again
-- hears the same. `outcome`: ok, unknown, fenced, no transaction. Nobody else sees a part of it before the rest.
-- `next_epoch`: the producer goes on with another epoch, which comes back; then what of this transaction is still on its
-- way can never become part of the next, and one that is to be undone may have no part that arrived.
create or replace function headwater.kafka_end_transaction(
    transactional_id text,
    producer_id bigint,
    epoch integer,
    committed boolean,
    next_epoch boolean,
    out outcome text,
    out next_id bigint,
    out raised_epoch integer
)
language plpgsql
set lock_timeout = '5s'
as $$
declare
    wanted constant text := case when committed then 'committed' else 'aborted' end;
    appended_at constant timestamptz := date_trunc('milliseconds', clock_timestamp());
    checked record;
    staged record;
    next_offset bigint;
begin
    select * into checked from headwater.kafka_hold_producer(transactional_id, producer_id, epoch);
    outcome := checked.outcome;
    next_id := (checked.held).producer_id;
    raised_epoch := (checked.held).epoch;
    if next_epoch and (producer_id, epoch) = ((checked.held).former_id, (checked.held).former_epoch) then
        -- The answer to the same request got lost.
        outcome := case
            when (checked.held).began_at is null and (checked.held).last_outcome = wanted then 'ok'
            else 'no transaction'
        end;
        return;
    elsif outcome <> 'ok' then
        return;
    elsif (checked.held).began_at is null and (committed or not next_epoch) then
        outcome := case when not next_epoch and (checked.held).last_outcome = wanted then 'ok' else 'no transaction' end;
        return;
    end if;
    if committed then
        perform headwater.kafka_hold_lanes(array_agg(s.topic_id), array_agg(s.partition))
        from headwater.kafka_staged s
        where s.producer_id = kafka_end_transaction.producer_id;
        for staged in
            select s.*
            from headwater.kafka_staged s
            join headwater.topic t on t.id = s.topic_id and t.deleted_at is null
            where s.producer_id = kafka_end_transaction.producer_id
            order by s.id
        loop
            next_offset := headwater.next_offset(staged.topic_id, staged.partition);
            perform headwater.kafka_write(
                array[staged.topic_id], array[staged.partition], array[cardinality(staged.payloads)],
                array[next_offset], appended_at,
                staged.payloads, staged.keys, staged.types, staged.routing_keys, staged.headers, staged.content_types,
                staged.produced, staged.record_headers
            );
        end loop;
        -- A group that no broker coordinates yet: the next one that is asked for it will.
        insert into headwater.kafka_group (name, coordinator)
        select distinct s.group_name, 0
        from headwater.kafka_staged_offset s
        where s.producer_id = kafka_end_transaction.producer_id
        on conflict (name) do nothing;
        insert into headwater.kafka_offset as o
            (group_name, topic_id, partition, committed_offset, leader_epoch, metadata)
        select s.group_name, s.topic_id, s.partition, s.committed_offset, s.leader_epoch, s.metadata
        from headwater.kafka_staged_offset s
        where s.producer_id = kafka_end_transaction.producer_id
        order by s.group_name, s.topic_id, s.partition
        on conflict on constraint kafka_offset_pkey do update
        set
            committed_offset = excluded.committed_offset,
            leader_epoch = excluded.leader_epoch,
            metadata = excluded.metadata,
            committed_at = clock_timestamp();
    end if;
    perform headwater.kafka_discard(producer_id);
    update headwater.kafka_transaction t
    set began_at = null, last_outcome = wanted, updated_at = clock_timestamp()
    where t.transactional_id = kafka_end_transaction.transactional_id;
    if next_epoch then
        select n.producer_id, n.epoch into next_id, raised_epoch
        from headwater.kafka_next_epoch(transactional_id, asked_itself => true) as n;
    end if;
end;
$$;

-- Undo transactions that are open for longer than their producers said, and fence those producers. Returns how many.
create or replace function headwater.kafka_reap_transactions()
returns integer
language plpgsql
as $$
declare
    late record;
    reaped integer := 0;
begin
    for late in
        select t.* from headwater.kafka_transaction t
        where t.began_at + make_interval(secs => t.timeout_ms / 1000.0) < clock_timestamp()
        for update skip locked
    loop
        perform headwater.kafka_discard(late.producer_id);
        update headwater.kafka_transaction t
        set began_at = null, last_outcome = 'aborted'
        where t.transactional_id = late.transactional_id;
        perform headwater.kafka_next_epoch(late.transactional_id, asked_itself => false);
        reaped := reaped + 1;
    end loop;
    return reaped;
end;
$$;
