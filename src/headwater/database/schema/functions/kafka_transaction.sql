-- Kafka transactions: records and offsets are staged, and enter the log atomically when the producer commits.

-- The transactional producers. `began_at` is when the open transaction began, null if none is open; `timeout_ms` is how
-- long a transaction may stay open; `last_outcome` is how the previous one ended: committed or aborted.
create or replace view headwater.kafka_transaction as
select t.transactional_id, t.producer_id, t.timeout_ms, t.began_at, t.last_outcome
from headwater_internal.kafka_transactional_producer t;

-- Lock a transactional producer and verify its id and epoch. `outcome`: ok, unknown, fenced.
create or replace function headwater_internal.kafka_hold_producer(
    transactional_id text,
    producer_id bigint,
    epoch integer,
    out outcome text,
    out held headwater_internal.kafka_transactional_producer
)
language plpgsql
as $$
begin
    select * into held
    from headwater_internal.kafka_transactional_producer t
    where t.transactional_id = kafka_hold_producer.transactional_id
    for update;
    outcome := case
        when held.producer_id is distinct from kafka_hold_producer.producer_id then 'unknown'
        when held.epoch <> kafka_hold_producer.epoch then 'fenced'
        else 'ok'
    end;
end;
$$;

-- Discard what an open transaction has staged. The caller must hold the lock of the producer.
create or replace function headwater_internal.kafka_discard(producer_id bigint)
returns void
language sql
begin atomic
    delete from headwater_internal.kafka_staged s where s.producer_id = kafka_discard.producer_id;
    delete from headwater_internal.kafka_staged_offset s where s.producer_id = kafka_discard.producer_id;
end;

-- Increment a producer's epoch, which fences the current one; after the last epoch it gets a new id. The caller must
-- hold the lock of the producer, and nothing may be staged.
create or replace function headwater_internal.kafka_next_epoch(
    transactional_id text,
    asked_itself boolean,
    out producer_id bigint,
    out epoch integer
)
language plpgsql
as $$
begin
    update headwater_internal.kafka_transactional_producer t
    set
        producer_id = case when t.epoch < 32766 then t.producer_id else headwater_internal.kafka_number('headwater_internal.kafka_producer_id') end,
        epoch = case when t.epoch < 32766 then t.epoch + 1 else 0 end,
        former_id = case when asked_itself then t.producer_id end,
        former_epoch = case when asked_itself then t.epoch end,
        updated_at = clock_timestamp()
    where t.transactional_id = kafka_next_epoch.transactional_id
    returning t.producer_id, t.epoch into producer_id, epoch;
end;
$$;

-- Initialize a transactional producer: an earlier one with its name is fenced, and its open transaction is aborted. A
-- producer that sends its id (0 or more) must not have been fenced. `outcome`: ok, unknown, fenced.
create or replace function headwater_internal.kafka_init_transactions(
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
    held headwater_internal.kafka_transactional_producer;
begin
    outcome := 'ok';
    insert into headwater_internal.kafka_transactional_producer as t (transactional_id, producer_id, epoch, timeout_ms)
    values (
        kafka_init_transactions.transactional_id, headwater_internal.kafka_number('headwater_internal.kafka_producer_id'), 0,
        kafka_init_transactions.timeout_ms
    )
    on conflict on constraint kafka_transactional_producer_pkey do nothing
    returning * into held;
    if found then
        producer_id := held.producer_id;
        epoch := held.epoch;
        return;
    end if;
    select * into held
    from headwater_internal.kafka_transactional_producer t
    where t.transactional_id = kafka_init_transactions.transactional_id
    for update;
    if known_id >= 0 and (known_id, known_epoch) is distinct from (held.producer_id, held.epoch) then
        outcome := case
            -- A repeated request whose response was lost.
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
    perform headwater_internal.kafka_discard(held.producer_id);
    select n.producer_id, n.epoch into producer_id, epoch
    from headwater_internal.kafka_next_epoch(kafka_init_transactions.transactional_id, asked_itself => known_id >= 0) as n;
    update headwater_internal.kafka_transactional_producer t
    set
        timeout_ms = kafka_init_transactions.timeout_ms,
        last_outcome = case when t.began_at is not null then 'aborted' else t.last_outcome end,
        began_at = null
    where t.transactional_id = kafka_init_transactions.transactional_id;
end;
$$;

-- Begin a transaction, unless one is open already. `outcome` as in kafka_hold_producer().
create or replace function headwater_internal.kafka_begin(transactional_id text, producer_id bigint, epoch integer)
returns text
language plpgsql
as $$
declare
    checked record;
begin
    select * into checked from headwater_internal.kafka_hold_producer(transactional_id, producer_id, epoch);
    if checked.outcome = 'ok' and (checked.held).began_at is null then
        update headwater_internal.kafka_transactional_producer t
        set began_at = clock_timestamp(), updated_at = clock_timestamp()
        where t.transactional_id = kafka_begin.transactional_id;
    end if;
    return checked.outcome;
end;
$$;

-- Stage a batch for the open transaction of its producer; begins one if necessary. `outcome`: staged, duplicate, out of
-- order, fenced, unknown, no transaction, reserved.
create or replace function headwater_internal.kafka_stage(
    transactional_id text,
    topic_id integer,
    partition integer,
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
    select * into checked from headwater_internal.kafka_hold_producer(transactional_id, producer_id, epoch);
    if checked.outcome <> 'ok' then
        return checked.outcome;
    elsif (checked.held).began_at is null and not may_begin then
        return 'no transaction';
    end if;
    if exists (select from headwater_internal.topic t where t.id = kafka_stage.topic_id and t.reserved) then
        return 'reserved';
    end if;
    select c.outcome into sequence_outcome
    from headwater_internal.kafka_check_sequence(producer_id, topic_id, kafka_stage.partition, epoch, first_sequence, last_sequence) as c;
    if sequence_outcome <> 'append' then
        return sequence_outcome;
    end if;
    perform headwater_internal.kafka_begin(transactional_id, producer_id, epoch);
    perform headwater_internal.kafka_note_batch(producer_id, topic_id, kafka_stage.partition, epoch, first_sequence, last_sequence, -1);
    insert into headwater_internal.kafka_staged
        (producer_id, topic_id, partition, payloads, keys, types, routing_keys, headers, content_types, produced,
         record_headers)
    values (
        kafka_stage.producer_id, kafka_stage.topic_id, kafka_stage.partition, payloads, keys, types, routing_keys, headers,
        content_types, produced, kafka_stage.record_headers
    );
    return 'staged';
end;
$$;

-- Stage offsets of a consumer group for the open transaction; begins one if necessary. `outcome` as above, or ok.
create or replace function headwater_internal.kafka_stage_offsets(
    transactional_id text,
    producer_id bigint,
    epoch integer,
    group_name text,
    topic_ids integer[],
    partitions integer[],
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
    select * into checked from headwater_internal.kafka_hold_producer(transactional_id, producer_id, epoch);
    if checked.outcome <> 'ok' then
        return checked.outcome;
    elsif (checked.held).began_at is null and not may_begin then
        return 'no transaction';
    end if;
    perform headwater_internal.kafka_begin(transactional_id, producer_id, epoch);
    insert into headwater_internal.kafka_staged_offset
        (producer_id, group_name, topic_id, partition, committed_offset, leader_epoch, metadata)
    select distinct on (c.topic_id, c.partition)
        kafka_stage_offsets.producer_id, kafka_stage_offsets.group_name, c.topic_id, c.partition,
        headwater_internal.kafka_bounded_offset(c.topic_id, c.partition, c.committed_offset, c.leader_epoch), c.leader_epoch, c.metadata
    from unnest(topic_ids, partitions, offsets, leader_epochs, metadatas) with ordinality
        as c (topic_id, partition, committed_offset, leader_epoch, metadata, ordinal)
    join headwater_internal.topic t on t.id = c.topic_id and t.deleted_at is null
    order by c.topic_id, c.partition, c.ordinal desc
    on conflict on constraint kafka_staged_offset_pkey do update
    set
        committed_offset = excluded.committed_offset,
        leader_epoch = excluded.leader_epoch,
        metadata = excluded.metadata;
    return 'ok';
end;
$$;

-- End the open transaction: everything staged enters the log and the offsets atomically, or is discarded. A repeated
-- request gets the same result. `outcome`: ok, unknown, fenced, no transaction. With `next_epoch` the producer
-- continues with a new epoch, which is returned: requests of this transaction that are still in flight cannot become
-- part of the next one, and a transaction to be aborted may have no staged part.
create or replace function headwater_internal.kafka_end_transaction(
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
    select * into checked from headwater_internal.kafka_hold_producer(transactional_id, producer_id, epoch);
    outcome := checked.outcome;
    next_id := (checked.held).producer_id;
    raised_epoch := (checked.held).epoch;
    if next_epoch and (producer_id, epoch) = ((checked.held).former_id, (checked.held).former_epoch) then
        -- A repeated request whose response was lost.
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
        perform headwater_internal.kafka_hold_partitions(array_agg(s.topic_id), array_agg(s.partition))
        from headwater_internal.kafka_staged s
        where s.producer_id = kafka_end_transaction.producer_id;
        for staged in
            select s.*
            from headwater_internal.kafka_staged s
            join headwater_internal.topic t on t.id = s.topic_id and t.deleted_at is null
            where s.producer_id = kafka_end_transaction.producer_id
            order by s.id
        loop
            next_offset := headwater_internal.next_offset(staged.topic_id, staged.partition);
            perform headwater_internal.kafka_write(
                array[staged.topic_id], array[staged.partition], array[cardinality(staged.payloads)],
                array[next_offset], appended_at,
                staged.payloads, staged.keys, staged.types, staged.routing_keys, staged.headers, staged.content_types,
                staged.produced, staged.record_headers
            );
        end loop;
        -- A group without a coordinator: the next broker that is asked for it will coordinate it.
        insert into headwater_internal.kafka_group (name, coordinator)
        select distinct s.group_name, 0
        from headwater_internal.kafka_staged_offset s
        where s.producer_id = kafka_end_transaction.producer_id
        on conflict (name) do nothing;
        insert into headwater_internal.kafka_offset as o
            (group_name, topic_id, partition, committed_offset, leader_epoch, metadata)
        select s.group_name, s.topic_id, s.partition, s.committed_offset, s.leader_epoch, s.metadata
        from headwater_internal.kafka_staged_offset s
        where s.producer_id = kafka_end_transaction.producer_id
        order by s.group_name, s.topic_id, s.partition
        on conflict on constraint kafka_offset_pkey do update
        set
            committed_offset = excluded.committed_offset,
            leader_epoch = excluded.leader_epoch,
            metadata = excluded.metadata,
            committed_at = clock_timestamp();
    end if;
    perform headwater_internal.kafka_discard(producer_id);
    update headwater_internal.kafka_transactional_producer t
    set began_at = null, last_outcome = wanted, updated_at = clock_timestamp()
    where t.transactional_id = kafka_end_transaction.transactional_id;
    if next_epoch then
        select n.producer_id, n.epoch into next_id, raised_epoch
        from headwater_internal.kafka_next_epoch(transactional_id, asked_itself => true) as n;
    end if;
end;
$$;

-- Abort transactions that are open longer than their producers' timeouts, and fence those producers. Returns their
-- number.
create or replace function headwater_internal.kafka_reap_transactions()
returns integer
language plpgsql
as $$
declare
    late record;
    reaped integer := 0;
begin
    for late in
        select t.* from headwater_internal.kafka_transactional_producer t
        where t.began_at + make_interval(secs => t.timeout_ms / 1000.0) < clock_timestamp()
        for update skip locked
    loop
        perform headwater_internal.kafka_discard(late.producer_id);
        update headwater_internal.kafka_transactional_producer t
        set began_at = null, last_outcome = 'aborted'
        where t.transactional_id = late.transactional_id;
        perform headwater_internal.kafka_next_epoch(late.transactional_id, asked_itself => false);
        reaped := reaped + 1;
    end loop;
    return reaped;
end;
$$;
