-- Publish: on the caller's connection, inside the caller's transaction.
--
-- The functions run as their owner: a publisher may call them, but can neither choose positions nor write to the
-- tables. They advertise the topic before they assign positions, and never rely on the default of the position column.

-- Kafka's key hash (murmur2), made positive, so that every protocol puts a key into the same partition.
create or replace function headwater_internal.key_hash(key bytea)
returns bigint
language plpgsql
immutable strict parallel safe
as $$
declare
    m constant bigint := 1540483477;
    mask constant bigint := 4294967295;
    size constant integer := octet_length(key);
    tail constant integer := size & ~3;
    h bigint := 2538058380 # size;
    k bigint;
begin
    for i in 0 .. tail - 4 by 4 loop
        k := get_byte(key, i) + (get_byte(key, i + 1) << 8) + (get_byte(key, i + 2) << 16)
             + (get_byte(key, i + 3)::bigint << 24);
        k := (k * m) & mask;
        k := ((k # (k >> 24)) * m) & mask;
        h := ((h * m) & mask) # k;
    end loop;
    if size > tail then
        for i in reverse size - 1 .. tail loop
            h := h # (get_byte(key, i)::bigint << (8 * (i - tail)));
        end loop;
        h := (h * m) & mask;
    end if;
    h := ((h # (h >> 13)) * m) & mask;
    return (h # (h >> 15)) & 2147483647;
end;
$$;

-- The partition of an event: by its key, or, without a key, the partition that the call chose for all such events.
create or replace function headwater_internal.partition_of(key bytea, partitions integer, keyless integer)
returns integer
language sql
immutable
return case
    when partitions = 1 then 0
    when key is null then keyless
    else headwater_internal.key_hash(key) % partitions
end;

-- HW003 if a payload or its headers exceed the limits of the topic; called before anything is written.
create or replace function headwater_internal.refuse_too_large(topic headwater_internal.topic, payload_bytes integer, header_bytes integer)
returns void
language plpgsql
immutable
as $$
begin
    if payload_bytes > topic.max_payload_bytes then
        raise exception 'payload of % bytes exceeds the limit of % bytes of topic "%"',
            payload_bytes, topic.max_payload_bytes, topic.name
            using errcode = 'HW003',
                  detail = json_build_object('bytes', payload_bytes, 'limit', topic.max_payload_bytes)::text,
                  hint = 'Raise the limit: headwater topic alter --max-payload-bytes.';
    end if;
    if header_bytes > topic.max_header_bytes then
        raise exception 'headers of % bytes exceed the limit of % bytes of topic "%"',
            header_bytes, topic.max_header_bytes, topic.name
            using errcode = 'HW003',
                  detail = json_build_object('bytes', header_bytes, 'limit', topic.max_header_bytes)::text,
                  hint = 'Raise the limit: headwater topic alter --max-header-bytes.';
    end if;
end;
$$;

-- The key of the advisory lock of a partition.
create or replace function headwater_internal.partition_lock_key(topic_id integer, partition integer)
returns bigint
language sql
immutable
return (29287::bigint << 48) | (topic_id::bigint << 16) | partition_lock_key.partition;

-- Lock partitions of a sequenced topic until the transaction ends, so that commit order is offset order. They are
-- locked in ascending order, so that two calls cannot deadlock. HW012 outside of READ COMMITTED.
create or replace function headwater_internal.lock_partitions(topic_id integer, partitions integer[])
returns void
language plpgsql
as $$
declare
    partition integer;
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        raise exception 'a sequenced topic can be written only at READ COMMITTED'
            using errcode = 'HW012',
                  hint = 'Use a READ COMMITTED transaction (the default): an older snapshot does not see the offsets of other transactions.';
    end if;
    for partition in select distinct l from unnest(partitions) as l order by l loop
        perform pg_advisory_xact_lock(headwater_internal.partition_lock_key(topic_id, partition));
    end loop;
end;
$$;

-- The offset of the next event of a partition. The caller must hold the lock of the partition.
create or replace function headwater_internal.next_offset(topic_id integer, partition integer)
returns bigint
language plpgsql
volatile
as $$
declare
    tail bigint;
begin
    -- The last event is nearly always in the newest segments; all segments are searched only for a partition without
    -- recent events.
    select e.topic_offset into tail
    from headwater_internal.event e
    where
        e.topic_id = next_offset.topic_id
        and e.partition = next_offset.partition
        and e.topic_offset is not null
        and e.position >= (
            select max(s.lo) from headwater_internal.segment s where s.lo <= headwater.head()
        )
    order by e.topic_offset desc
    limit 1;
    if tail is null then
        select e.topic_offset into tail
        from headwater_internal.event e
        where e.topic_id = next_offset.topic_id and e.partition = next_offset.partition and e.topic_offset is not null
        order by e.topic_offset desc
        limit 1;
    end if;
    return coalesce(
        tail + 1,
        (select l.next_offset from headwater_internal.partition_tail l where l.topic_id = next_offset.topic_id and l.partition = next_offset.partition),
        0
    );
end;
$$;

-- Long for speed: the common case, an open topic without event ids, is handled inline, since a further function with
-- settings of its own costs 7 us for each call.
--
-- Publish a batch to one topic, atomically and in the order given. Returns the positions in that order; an event whose
-- id was published before gets the position of the first one and is not stored again. Each array is as long as
-- `payloads`, or null if no event has that field. HW004 if the topic does not exist, HW003 if an event is too large,
-- HW002 for invalid arrays or partitions.
create or replace function headwater.publish_batch(
    topic text,
    payloads bytea[],
    keys bytea[] default null,
    types text[] default null,
    routing_keys text[] default null,
    headers text[] default null,
    content_types text[] default null,
    event_ids text[] default null,
    partitions integer[] default null
)
returns bigint[]
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    destination headwater_internal.topic;
    size constant integer := coalesce(cardinality(payloads), 0);
    keyless integer := 0;
    chosen_partitions integer[];
    offsets bigint[];
    positions bigint[];
    -- The position of each event in the log: its own, or that of the first event with its id.
    first_positions bigint[];
begin
    destination := headwater_internal.topic_to_publish(topic);
    if size = 0 then
        return '{}';
    end if;
    if cardinality(keys) <> size or cardinality(types) <> size or cardinality(routing_keys) <> size
        or cardinality(headers) <> size or cardinality(content_types) <> size
        or cardinality(event_ids) <> size or cardinality(partitions) <> size
    then
        raise exception 'invalid batch: every array must be as long as payloads' using errcode = 'HW002';
    end if;
    if headers is not null or destination.max_payload_bytes < (select max(octet_length(p)) from unnest(payloads) as p) then
        perform headwater_internal.refuse_too_large(
            destination,
            (select max(octet_length(p)) from unnest(payloads) as p),
            case when headers is not null then (select max(octet_length(h)) from unnest(headers) as h) end
        );
    end if;
    if destination.partitions > 1 then
        keyless := floor(random() * destination.partitions);
        if exists (select from unnest(partitions) as p where p not between 0 and destination.partitions - 1) then
            raise exception 'invalid partition: topic "%" has the partitions 0 to %', topic, destination.partitions - 1
                using errcode = 'HW002';
        end if;
    elsif partitions is not null and exists (select from unnest(partitions) as p where p <> 0) then
        raise exception 'invalid partition: topic "%" has only partition 0', topic using errcode = 'HW002';
    end if;

    if destination.kind = 'open' and event_ids is null then
        -- Positions are assigned ahead and unnested next to the events: cheaper than INSERT ... RETURNING.
        perform headwater_internal.advertise_publisher(destination.name);
        positions := array(select nextval('headwater_internal.position') from generate_series(1, size));
        insert into headwater_internal.event
            (position, topic_id, partition, key, type, routing_key, headers, content_type, payload)
        select
            r.position, destination.id,
            coalesce(r.partition, headwater_internal.partition_of(r.key, destination.partitions, keyless)),
            r.key, r.type, r.routing_key, r.headers::jsonb, r.content_type, r.payload
        from (
            select
                unnest(positions) as position,
                unnest(payloads) as payload,
                unnest(keys) as key,
                unnest(types) as type,
                unnest(routing_keys) as routing_key,
                unnest(publish_batch.headers) as headers,
                unnest(content_types) as content_type,
                unnest(partitions) as partition
        ) as r;
        return positions;
    end if;

    select array_agg(
        coalesce(r.partition, headwater_internal.partition_of(r.key, destination.partitions, keyless)) order by r.ordinal
    )
    into chosen_partitions
    from unnest(payloads, keys, partitions) with ordinality as r (payload, key, partition, ordinal);
    if destination.kind = 'sequenced' then
        perform headwater_internal.lock_partitions(destination.id, chosen_partitions);
    end if;
    perform headwater_internal.advertise_publisher(destination.name);
    select array_agg(nextval('headwater_internal.position')) into positions from generate_series(1, size);

    if event_ids is not null then
        -- In the order of the ids, so that two batches that share some cannot deadlock.
        insert into headwater_internal.event_identity (topic_id, event_id, position)
        select destination.id, r.event_id, r.position
        from unnest(event_ids, positions) as r (event_id, position)
        where r.event_id is not null
        order by r.event_id, r.position
        on conflict do nothing;
        select array_agg(case when r.event_id is null then r.position else i.position end order by r.ordinal)
        into first_positions
        from unnest(event_ids, positions) with ordinality as r (event_id, position, ordinal)
        left join headwater_internal.event_identity i on i.topic_id = destination.id and i.event_id = r.event_id;
    else
        first_positions := positions;
    end if;
    if destination.kind = 'sequenced' then
        select array_agg(s.next_offset + r.fresh_before order by r.ordinal)
        into offsets
        from (
            select
                u.partition,
                u.ordinal,
                count(*) filter (where u.first_position = u.position)
                    over (partition by u.partition order by u.ordinal) - 1 as fresh_before
            from unnest(chosen_partitions, positions, first_positions) with ordinality
                as u (partition, position, first_position, ordinal)
        ) as r
        join (
            select d.partition, headwater_internal.next_offset(destination.id, d.partition) as next_offset
            from (select distinct l as partition from unnest(chosen_partitions) as l) as d
        ) as s on s.partition = r.partition;
    end if;

    insert into headwater_internal.event
        (position, topic_id, partition, topic_offset, key, type, routing_key, headers, content_type, payload, event_id)
    select
        r.position, destination.id, r.partition, r.topic_offset,
        r.key, r.type, r.routing_key, r.headers::jsonb, r.content_type, r.payload, r.event_id
    from unnest(
        payloads, keys, types, routing_keys, headers, content_types, event_ids, chosen_partitions, offsets, positions, first_positions
    ) as r (
        payload, key, type, routing_key, headers, content_type, event_id, partition, topic_offset, position, first_position
    )
    where r.first_position = r.position;
    if destination.event_store then
        -- An event store finds its events by their index terms, whichever way they were published.
        insert into headwater_internal.event_index_term (topic_id, index_term, position)
        select destination.id, ':' || r.type, r.position
        from unnest(types, positions, first_positions) as r (type, position, first_position)
        where r.first_position = r.position and r.type is not null;
        perform headwater_internal.index_fields(destination.id, positions);
    end if;
    return first_positions;
end;
$$;

-- Publish one event given as bytes. Returns its position, or null if `deliver_at` is in the future: then the event is
-- scheduled. HW004 if the topic does not exist, HW003 if the event is too large, HW015 if the topic is reserved.
create or replace function headwater.publish_bytes(
    topic text,
    payload bytea,
    key bytea default null,
    type text default null,
    routing_key text default null,
    headers jsonb default null,
    content_type text default null,
    event_id text default null,
    deliver_at timestamptz default null
)
returns bigint
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    published bigint;
    nothing text;
begin
    if deliver_at > clock_timestamp() then
        published := headwater.schedule_bytes(
            topic, payload, deliver_at, key, type, routing_key, headers, content_type, event_id
        );
        return null;
    end if;
    if event_id is null then
        -- The common case in one statement. If it inserts nothing, publish_batch() publishes the event or raises the
        -- error.
        nothing := headwater_internal.advertise_publisher(topic);
        insert into headwater_internal.event
            (position, topic_id, partition, key, type, routing_key, headers, content_type, payload)
        select
            nextval('headwater_internal.position'),
            t.id,
            case
                when t.partitions = 1 then 0
                else headwater_internal.partition_of(publish_bytes.key, t.partitions, floor(random() * t.partitions)::integer)
            end,
            publish_bytes.key, publish_bytes.type, publish_bytes.routing_key, publish_bytes.headers,
            publish_bytes.content_type, publish_bytes.payload
        from headwater_internal.topic t
        where
            t.name = publish_bytes.topic
            and t.deleted_at is null
            and t.kind = 'open'
            and not t.reserved
            and coalesce(octet_length(publish_bytes.payload) <= t.max_payload_bytes, true)
            and coalesce(octet_length(publish_bytes.headers::text) <= t.max_header_bytes, true)
        returning position into published;
        if found then
            return published;
        end if;
    end if;
    return (headwater.publish_batch(
        topic,
        array[payload],
        array[key],
        array[type],
        array[routing_key],
        array[headers::text],
        array[content_type],
        case when event_id is not null then array[event_id] end
    ))[1];
end;
$$;

-- Publish one JSON event: the form for psql, triggers and other languages. Returns its position, or null if it is
-- scheduled by `deliver_at` or `delay`. Errors as for publish_bytes().
create or replace function headwater.publish(
    topic text,
    payload jsonb,
    key text default null,
    type text default null,
    routing_key text default null,
    headers jsonb default null,
    event_id text default null,
    deliver_at timestamptz default null,
    delay interval default null
)
returns bigint
language sql
return headwater.publish_bytes(
    topic,
    convert_to(payload::text, 'UTF8'),
    convert_to(key, 'UTF8'),
    type,
    routing_key,
    headers,
    'application/json',
    event_id,
    coalesce(deliver_at, clock_timestamp() + delay)
);

-- The target of a plain INSERT or COPY: each row is published as by publish_bytes(), with the same checks and errors.
--   insert into headwater.new_event (topic, payload) values ('orders', '{"id": 1}');
--   copy headwater.new_event (topic, key, payload) from stdin;
create or replace view headwater.new_event as
select
    t.name as topic, e.payload::bytea as payload, e.key::bytea as key, e.type::text as type,
    e.routing_key::text as routing_key, e.headers::jsonb as headers, e.content_type::text as content_type,
    e.event_id::text as event_id
from headwater_internal.event e
join headwater_internal.topic t on t.id = e.topic_id
where false;

create or replace function headwater_internal.publish_new_event()
returns trigger
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    nothing bigint;
begin
    if new.topic is null then
        raise exception 'an event needs a topic' using errcode = 'HW002', hint = 'Set the column "topic".';
    end if;
    nothing := headwater.publish_bytes(
        new.topic, new.payload, new.key, new.type, new.routing_key, new.headers, new.content_type, new.event_id
    );
    return new;
end;
$$;

create or replace trigger publish instead of insert on headwater.new_event
    for each row execute function headwater_internal.publish_new_event();
