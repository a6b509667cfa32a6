-- Kafka's brokers and consumer groups: who is alive, who coordinates a group, and the offsets it has committed.

-- A number that was never issued before, for a broker or a producer: a failover can take a sequence back, so the epoch
-- stands before its value.
create or replace function headwater.kafka_number(sequence_name text)
returns bigint
language sql
volatile
return (headwater.current_epoch()::bigint << 32) | (nextval(sequence_name::regclass) & 4294967295);

-- Whether a broker's registration is of the present epoch. One of an earlier epoch registers again, which ends its groups'
-- generations: their members may be at offsets of events that were lost, and must ask where to go on.
create or replace function headwater.kafka_is_present(incarnation bigint)
returns boolean
language sql
volatile
return incarnation >> 32 = headwater.current_epoch();

-- An offset to be committed by a client that has read in a leader epoch. Of an earlier epoch, it is at most where that
-- epoch ends: what comes after may be other events than the client has read. A number below that of the first epoch says
-- that the client knows of none.
create or replace function headwater.kafka_bounded_offset(
    topic_id integer, lane integer, committed_offset bigint, leader_epoch integer
)
returns bigint
language sql
volatile
return case
    when
        leader_epoch < headwater.current_epoch() and leader_epoch >= (select min(e.number) from headwater.epoch e)
    then least(
        committed_offset, (select e.end_offset from headwater.kafka_epoch_end(topic_id, lane, leader_epoch) as e)
    )
    else committed_offset
end;

-- Register a broker process. One that had this address before is dead, since the address is taken by one alone: its
-- node id goes to the new one.
create or replace function headwater.kafka_register(
    host text,
    port integer,
    lease_seconds double precision,
    out node_id integer,
    out incarnation bigint
)
language plpgsql
as $$
begin
    -- One at a time, or two would take the same number.
    perform pg_advisory_xact_lock(29291::bigint << 48);
    incarnation := headwater.kafka_number('headwater.kafka_incarnation');
    delete from headwater.kafka_broker b where b.expires_at < clock_timestamp() - interval '1 hour';
    select b.node_id into node_id
    from headwater.kafka_broker b
    where b.host = kafka_register.host and b.port = kafka_register.port
    order by b.node_id
    limit 1;
    if node_id is null then
        select min(n.number) into node_id
        from generate_series(1, (select count(*) + 1 from headwater.kafka_broker)) as n (number)
        where not exists (select from headwater.kafka_broker b where b.node_id = n.number);
    end if;
    insert into headwater.kafka_broker as b (node_id, incarnation, host, port, expires_at)
    values (
        kafka_register.node_id, kafka_register.incarnation, kafka_register.host, kafka_register.port,
        clock_timestamp() + make_interval(secs => lease_seconds)
    )
    on conflict on constraint kafka_broker_pkey do update
    set
        incarnation = excluded.incarnation,
        host = excluded.host,
        port = excluded.port,
        expires_at = excluded.expires_at,
        leased_at = excluded.leased_at;
end;
$$;

-- Renew a broker's lease. False: another broker took its number, or the epoch has changed. A lease of 0 gives it up.
create or replace function headwater.kafka_renew(incarnation bigint, lease_seconds double precision)
returns boolean
language plpgsql
as $$
begin
    update headwater.kafka_broker b
    set expires_at = clock_timestamp() + make_interval(secs => lease_seconds), leased_at = clock_timestamp()
    where
        b.incarnation = kafka_renew.incarnation
        and (lease_seconds = 0 or headwater.kafka_is_present(kafka_renew.incarnation));
    return found;
end;
$$;

-- The brokers that are alive.
create or replace view headwater.kafka_live_broker as
select b.node_id, b.incarnation, b.host, b.port
from headwater.kafka_broker b
where b.expires_at > clock_timestamp();

-- The broker that coordinates a group: the one that does, while it is alive; else the one of the living that is to take it
-- up when somebody joins it. Nothing is noted: to ask for a group does not make one. Null: no broker lives.
create or replace function headwater.kafka_coordinator(group_name text, protocol_type text default '')
returns integer
language sql
stable
return coalesce(
    (
        select b.node_id
        from headwater.kafka_group g
        join headwater.kafka_live_broker b on b.incarnation = g.coordinator
        where g.name = group_name
    ),
    (
        select b.node_id
        from headwater.kafka_live_broker b
        -- By a hash of both names, so that groups are spread and most stay where they are when a broker comes or goes.
        order by hashtextextended(group_name || ':' || b.node_id, 0)
        limit 1
    )
);

-- Take up a group as its coordinator. Returns the generation to count on from, or null: another broker coordinates it.
create or replace function headwater.kafka_take_up(group_name text, incarnation bigint)
returns integer
language plpgsql
as $$
declare
    last_generation integer;
begin
    if not headwater.kafka_is_present(incarnation) then
        return null;
    end if;
    insert into headwater.kafka_group as g (name, coordinator)
    select group_name, b.incarnation
    from headwater.kafka_live_broker b
    where b.incarnation = kafka_take_up.incarnation
    on conflict (name) do update
        set coordinator = excluded.coordinator
        where
            g.coordinator = excluded.coordinator
            or not exists (select from headwater.kafka_live_broker b where b.incarnation = g.coordinator)
    returning g.generation into last_generation;
    return last_generation;
end;
$$;

-- Note that a group has a new generation. False: the broker does not coordinate it any more.
create or replace function headwater.kafka_note_generation(
    group_name text,
    incarnation bigint,
    generation integer,
    protocol_type text
)
returns boolean
language plpgsql
as $$
begin
    update headwater.kafka_group g
    set
        generation = kafka_note_generation.generation,
        protocol_type = kafka_note_generation.protocol_type,
        updated_at = clock_timestamp()
    where g.name = group_name and g.coordinator = incarnation and headwater.kafka_is_present(incarnation);
    return found;
end;
$$;

-- Commit offsets of a group, as its coordinator. False: the broker does not coordinate it any more, and nothing was
-- written. Offsets of topics that are gone are passed over.
create or replace function headwater.kafka_commit_offsets(
    group_name text,
    incarnation bigint,
    topic_ids integer[],
    lanes integer[],
    offsets bigint[],
    leader_epochs integer[],
    metadatas text[]
)
returns boolean
language plpgsql
as $$
begin
    -- Held to the end, so that nobody takes the group over in between.
    perform from headwater.kafka_group g where g.name = group_name and g.coordinator = incarnation for share;
    if not found or not headwater.kafka_is_present(incarnation) then
        return false;
    end if;
    insert into headwater.kafka_offset as o
        (group_name, topic_id, partition, committed_offset, leader_epoch, metadata)
    select distinct on (c.topic_id, c.lane)
        kafka_commit_offsets.group_name, c.topic_id, c.lane,
        headwater.kafka_bounded_offset(c.topic_id, c.lane, c.committed_offset, c.leader_epoch), c.leader_epoch, c.metadata
    from unnest(topic_ids, lanes, offsets, leader_epochs, metadatas) with ordinality
        as c (topic_id, lane, committed_offset, leader_epoch, metadata, place)
    join headwater.topic t on t.id = c.topic_id and t.deleted_at is null
    order by c.topic_id, c.lane, c.place desc
    on conflict on constraint kafka_offset_pkey do update
    set
        committed_offset = excluded.committed_offset,
        leader_epoch = excluded.leader_epoch,
        metadata = excluded.metadata,
        committed_at = clock_timestamp();
    return true;
end;
$$;

-- The offsets that a group has committed.
create or replace view headwater.kafka_committed as
select o.group_name, t.name as topic, t.id as topic_id, o.partition, o.committed_offset, o.leader_epoch, o.metadata,
       o.committed_at
from headwater.kafka_offset o
join headwater.topic t on t.id = o.topic_id and t.deleted_at is null;

-- Forget offsets of a group. False: the broker does not coordinate it any more.
create or replace function headwater.kafka_forget_offsets(
    group_name text,
    incarnation bigint,
    topic_ids integer[],
    lanes integer[]
)
returns boolean
language plpgsql
as $$
begin
    perform from headwater.kafka_group g where g.name = group_name and g.coordinator = incarnation for share;
    if not found then
        return false;
    end if;
    delete from headwater.kafka_offset o
    using unnest(topic_ids, lanes) as d (topic_id, lane)
    where o.group_name = kafka_forget_offsets.group_name and o.topic_id = d.topic_id and o.partition = d.lane;
    return true;
end;
$$;

-- Delete a group with its offsets. False: there is none of that name that this broker coordinates.
create or replace function headwater.kafka_delete_group(group_name text, incarnation bigint)
returns boolean
language plpgsql
as $$
begin
    delete from headwater.kafka_group g where g.name = group_name and g.coordinator = incarnation;
    return found;
end;
$$;

-- Note that groups have members, so that their offsets are kept however old they are. Their coordinator does so now and
-- then, far more often than offsets expire.
create or replace function headwater.kafka_note_alive(group_names text[], incarnation bigint)
returns void
language sql
begin atomic
    update headwater.kafka_group g
    set updated_at = clock_timestamp()
    where g.name = any (group_names) and g.coordinator = kafka_note_alive.incarnation;
end;

-- Forget groups that have had no members, and committed nothing, for longer than the log's settings say; and offsets that
-- old of those that have none. Returns how many groups went.
create or replace function headwater.kafka_expire_groups()
returns integer
language plpgsql
as $$
declare
    oldest constant timestamptz := clock_timestamp() - (select s.kafka_offsets_kept from headwater.setting s);
    forgotten integer;
begin
    delete from headwater.kafka_offset o
    using headwater.kafka_group g
    where g.name = o.group_name and g.updated_at < oldest and o.committed_at < oldest;
    delete from headwater.kafka_group g
    where
        g.updated_at < oldest
        and not exists (select from headwater.kafka_offset o where o.group_name = g.name)
        and not exists (select from headwater.kafka_staged_offset s where s.group_name = g.name);
    get diagnostics forgotten = row_count;
    return forgotten;
end;
$$;

-- Forget producers, transactional ones too, that were silent for a week, as Kafka does.
create or replace function headwater.kafka_upkeep()
returns void
language sql
begin atomic
    delete from headwater.kafka_producer_lane p
    where p.updated_at < clock_timestamp() - interval '7 days';
    delete from headwater.kafka_transaction t
    where
        t.updated_at < clock_timestamp() - interval '7 days' and t.began_at is null
        and not exists (select from headwater.kafka_staged s where s.producer_id = t.producer_id)
        and not exists (select from headwater.kafka_staged_offset s where s.producer_id = t.producer_id);
end;
