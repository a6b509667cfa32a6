-- Kafka brokers and consumer groups: which brokers are alive, which coordinates a group, and committed offsets.

-- A number that was never assigned before, for a broker or a producer: a failover can set a sequence back, so the epoch
-- is put in front of its value.
create or replace function headwater_internal.kafka_number(sequence_name text)
returns bigint
language sql
volatile
return (headwater.current_epoch()::bigint << 32) | (nextval(sequence_name::regclass) & 4294967295);

-- Whether a broker's registration belongs to the current epoch. A broker of an earlier epoch registers again, which
-- ends the generations of its groups: their members may be at offsets of lost events, and must look up where to
-- continue.
create or replace function headwater_internal.kafka_is_present(incarnation bigint)
returns boolean
language sql
volatile
return incarnation >> 32 = headwater.current_epoch();

-- The offset to commit for a client that has read in a leader epoch. For an earlier epoch it is at most the end of that
-- epoch: later events may differ from those that the client has read. A number below that of the first epoch means that
-- the client does not know epochs.
create or replace function headwater_internal.kafka_bounded_offset(
    topic_id integer, partition integer, committed_offset bigint, leader_epoch integer
)
returns bigint
language sql
volatile
return case
    when
        leader_epoch < headwater.current_epoch() and leader_epoch >= (select min(e.number) from headwater_internal.epoch e)
    then least(
        committed_offset, (select e.end_offset from headwater_internal.kafka_epoch_end(topic_id, kafka_bounded_offset.partition, leader_epoch) as e)
    )
    else committed_offset
end;

-- Register a broker process. An earlier broker with this address has died, since only one process can listen on it: its
-- node id is reused.
create or replace function headwater_internal.kafka_register(
    host text,
    port integer,
    lease_seconds double precision,
    out node_id integer,
    out incarnation bigint
)
language plpgsql
as $$
begin
    -- One at a time, or two would get the same number. Lock tag: see locks.sql.
    perform pg_advisory_xact_lock(29291::bigint << 48);
    incarnation := headwater_internal.kafka_number('headwater_internal.kafka_incarnation');
    delete from headwater_internal.kafka_broker b where b.expires_at < clock_timestamp() - interval '1 hour';
    select b.node_id into node_id
    from headwater_internal.kafka_broker b
    where b.host = kafka_register.host and b.port = kafka_register.port
    order by b.node_id
    limit 1;
    if node_id is null then
        select min(n.number) into node_id
        from generate_series(1, (select count(*) + 1 from headwater_internal.kafka_broker)) as n (number)
        where not exists (select from headwater_internal.kafka_broker b where b.node_id = n.number);
    end if;
    insert into headwater_internal.kafka_broker as b (node_id, incarnation, host, port, expires_at)
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

-- Extend a broker's lease. False: another broker has its number, or the epoch has changed. A lease of 0 releases it.
create or replace function headwater_internal.kafka_renew(incarnation bigint, lease_seconds double precision)
returns boolean
language plpgsql
as $$
begin
    update headwater_internal.kafka_broker b
    set expires_at = clock_timestamp() + make_interval(secs => lease_seconds), leased_at = clock_timestamp()
    where
        b.incarnation = kafka_renew.incarnation
        and (lease_seconds = 0 or headwater_internal.kafka_is_present(kafka_renew.incarnation));
    return found;
end;
$$;

-- The brokers with a valid lease.
create or replace view headwater.kafka_live_broker as
select b.node_id, b.incarnation, b.host, b.port
from headwater_internal.kafka_broker b
where b.expires_at > clock_timestamp();

-- The broker that coordinates a group: the current one while it is alive, otherwise the one that is to become the
-- coordinator when a member joins. Nothing is written: looking up a group does not create it. Null: no broker is alive.
create or replace function headwater_internal.kafka_coordinator(group_name text)
returns integer
language sql
stable
return coalesce(
    (
        select b.node_id
        from headwater_internal.kafka_group g
        join headwater.kafka_live_broker b on b.incarnation = g.coordinator
        where g.name = group_name
    ),
    (
        select b.node_id
        from headwater.kafka_live_broker b
        -- By a hash of both names (rendezvous hashing), so that groups are spread, and most keep their coordinator when
        -- a broker joins or leaves.
        order by hashtextextended(group_name || ':' || b.node_id, 0)
        limit 1
    )
);

-- Become the coordinator of a group. Returns the generation to continue from; null: another broker coordinates it.
create or replace function headwater_internal.kafka_take_up(group_name text, incarnation bigint)
returns integer
language plpgsql
as $$
declare
    last_generation integer;
begin
    if not headwater_internal.kafka_is_present(incarnation) then
        return null;
    end if;
    insert into headwater_internal.kafka_group as g (name, coordinator)
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

-- Record a new generation of a group. False: the broker no longer coordinates it.
create or replace function headwater_internal.kafka_note_generation(
    group_name text,
    incarnation bigint,
    generation integer,
    protocol_type text
)
returns boolean
language plpgsql
as $$
begin
    update headwater_internal.kafka_group g
    set
        generation = kafka_note_generation.generation,
        protocol_type = kafka_note_generation.protocol_type,
        updated_at = clock_timestamp()
    where g.name = group_name and g.coordinator = incarnation and headwater_internal.kafka_is_present(incarnation);
    return found;
end;
$$;

-- Commit offsets of a group, as its coordinator. False: the broker no longer coordinates it, and nothing was written.
-- Offsets of deleted topics are ignored.
create or replace function headwater_internal.kafka_commit_offsets(
    group_name text,
    incarnation bigint,
    topic_ids integer[],
    partitions integer[],
    offsets bigint[],
    leader_epochs integer[],
    metadatas text[]
)
returns boolean
language plpgsql
as $$
begin
    -- Held until the commit, so that no other broker takes over the group in between.
    perform from headwater_internal.kafka_group g where g.name = group_name and g.coordinator = incarnation for share;
    if not found or not headwater_internal.kafka_is_present(incarnation) then
        return false;
    end if;
    insert into headwater_internal.kafka_offset as o
        (group_name, topic_id, partition, committed_offset, leader_epoch, metadata)
    select distinct on (c.topic_id, c.partition)
        kafka_commit_offsets.group_name, c.topic_id, c.partition,
        headwater_internal.kafka_bounded_offset(c.topic_id, c.partition, c.committed_offset, c.leader_epoch), c.leader_epoch, c.metadata
    from unnest(topic_ids, partitions, offsets, leader_epochs, metadatas) with ordinality
        as c (topic_id, partition, committed_offset, leader_epoch, metadata, ordinal)
    join headwater_internal.topic t on t.id = c.topic_id and t.deleted_at is null
    order by c.topic_id, c.partition, c.ordinal desc
    on conflict on constraint kafka_offset_pkey do update
    set
        committed_offset = excluded.committed_offset,
        leader_epoch = excluded.leader_epoch,
        metadata = excluded.metadata,
        committed_at = clock_timestamp();
    return true;
end;
$$;

-- The committed offsets of groups.
create or replace view headwater.kafka_committed as
select o.group_name, t.name as topic, t.id as topic_id, o.partition, o.committed_offset, o.leader_epoch, o.metadata,
       o.committed_at
from headwater_internal.kafka_offset o
join headwater_internal.topic t on t.id = o.topic_id and t.deleted_at is null;

-- Delete offsets of a group. False: the broker no longer coordinates it.
create or replace function headwater_internal.kafka_forget_offsets(
    group_name text,
    incarnation bigint,
    topic_ids integer[],
    partitions integer[]
)
returns boolean
language plpgsql
as $$
begin
    perform from headwater_internal.kafka_group g where g.name = group_name and g.coordinator = incarnation for share;
    if not found then
        return false;
    end if;
    delete from headwater_internal.kafka_offset o
    using unnest(topic_ids, partitions) as d (topic_id, partition)
    where o.group_name = kafka_forget_offsets.group_name and o.topic_id = d.topic_id and o.partition = d.partition;
    return true;
end;
$$;

-- Delete a group with its offsets. False: this broker coordinates no group of that name.
create or replace function headwater_internal.kafka_delete_group(group_name text, incarnation bigint)
returns boolean
language plpgsql
as $$
begin
    delete from headwater_internal.kafka_group g where g.name = group_name and g.coordinator = incarnation;
    return found;
end;
$$;

-- Record that groups have members, so that their offsets do not expire. Their coordinator calls it periodically, far
-- more often than offsets expire.
create or replace function headwater_internal.kafka_note_alive(group_names text[], incarnation bigint)
returns void
language sql
begin atomic
    update headwater_internal.kafka_group g
    set updated_at = clock_timestamp()
    where g.name = any (group_names) and g.coordinator = kafka_note_alive.incarnation;
end;

-- Delete groups that have had no members and committed nothing for longer than the setting allows, and equally old
-- offsets of groups without members. Returns the number of groups deleted.
create or replace function headwater_internal.kafka_expire_groups()
returns integer
language plpgsql
as $$
declare
    oldest constant timestamptz := clock_timestamp() - (select s.kafka_offsets_kept from headwater_internal.setting s);
    forgotten integer;
begin
    delete from headwater_internal.kafka_offset o
    using headwater_internal.kafka_group g
    where g.name = o.group_name and g.updated_at < oldest and o.committed_at < oldest;
    delete from headwater_internal.kafka_group g
    where
        g.updated_at < oldest
        and not exists (select from headwater_internal.kafka_offset o where o.group_name = g.name)
        and not exists (select from headwater_internal.kafka_staged_offset s where s.group_name = g.name);
    get diagnostics forgotten = row_count;
    return forgotten;
end;
$$;

-- Delete producers, including transactional ones, that were inactive for a week, as Kafka does.
create or replace function headwater_internal.kafka_maintenance()
returns void
language sql
begin atomic
    delete from headwater_internal.kafka_producer_partition p
    where p.updated_at < clock_timestamp() - interval '7 days';
    delete from headwater_internal.kafka_transactional_producer t
    where
        t.updated_at < clock_timestamp() - interval '7 days' and t.began_at is null
        and not exists (select from headwater_internal.kafka_staged s where s.producer_id = t.producer_id)
        and not exists (select from headwater_internal.kafka_staged_offset s where s.producer_id = t.producer_id);
end;
