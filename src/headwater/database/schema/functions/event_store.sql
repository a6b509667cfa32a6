-- The event store: append under a condition.
--
-- An append holds the lock of the topic's only partition from before its condition is checked until the commit. So
-- nothing can come between the check and the insert, commits follow the order of positions, and any snapshot shows the
-- events without a gap: reading an event store does not need the stable position.
--
-- An append condition is {"query": [...], "after": 17}: no event after this position matches; or {"query": [...],
-- "latest": 17}: the latest match is exactly at this position. Position 0 or null, or no position, means the beginning:
-- no event matches. With "epoch", the epoch in which the position was read, the append is rejected if the log is in
-- another one: the decision may be based on events that are lost. See epoch.sql.

-- The event store of that name; HW004 if it does not exist, HW002 if the topic is not an event store.
create or replace function headwater_internal.find_event_store(name text)
returns headwater_internal.topic
language plpgsql
stable
as $$
declare
    found_topic headwater_internal.topic := headwater_internal.find_topic(name);
begin
    if not found_topic.event_store then
        raise exception 'topic "%" is not an event store', name
            using errcode = 'HW002',
                  detail = json_build_object('topic', name)::text,
                  hint = 'Create an event store under another name: headwater.create_event_store().';
    end if;
    return found_topic;
end;
$$;

-- Create an event store, a topic whose events are found by type and tag, and return it. HW005 if a topic of that name
-- exists, unless `if_missing` is true: then an existing event store is returned unchanged, and HW002 is raised for any
-- other topic.
create or replace function headwater.create_event_store(
    name text,
    max_payload_bytes integer default 1048576,
    max_header_bytes integer default 65536,
    if_missing boolean default false
)
returns headwater_internal.topic
language plpgsql
as $$
declare
    created headwater_internal.topic;
begin
    if if_missing and exists (
        select from headwater_internal.topic t where t.name = create_event_store.name and t.deleted_at is null
    ) then
        return headwater_internal.find_event_store(name);
    end if;
    begin
        created := headwater.create_topic(
            name, 'sequenced', max_payload_bytes => max_payload_bytes, max_header_bytes => max_header_bytes
        );
    exception
        when sqlstate 'HW005' then
            -- It was created concurrently.
            if if_missing then
                return headwater_internal.find_event_store(name);
            end if;
            raise;
    end;
    update headwater_internal.topic t set event_store = true where t.id = created.id returning * into created;
    return created;
end;
$$;

-- Lock an event store until the transaction ends, so that no other transaction appends to it; 40001 after 10 seconds.
create or replace function headwater_internal.hold_store(store headwater_internal.topic)
returns void
language plpgsql
as $$
begin
    -- It is nearly always free; only a waiter needs the handler that explains the timeout.
    if
        current_setting('transaction_isolation') = 'read committed'
        and pg_try_advisory_xact_lock(headwater_internal.partition_lock_key(store.id, 0))
    then
        return;
    end if;
    begin
        perform headwater_internal.lock_partitions(store.id, array[0]);
    exception
        when lock_not_available then
            raise exception 'another transaction has locked the event store "%" for 10 seconds', store.name
                using errcode = '40001',
                      hint = 'A transaction that has appended is still open. Other appends wait until it ends.';
    end;
end;
$$;

-- The last event of an event store and the offset of the next one; 0 and 0 if it is empty. The caller must hold the
-- lock of its partition.
create or replace function headwater_internal.store_tail(topic_id integer)
returns headwater_internal.store_tail
language plpgsql
volatile
as $$
declare
    head constant bigint := headwater.head();
    low bigint;
    found_tail headwater_internal.store_tail;
begin
    -- Both bounds are known before execution starts, so that only the newest segments are opened.
    select s.lo into low from headwater_internal.segment s where s.lo <= head order by s.lo desc limit 1;
    select e.position, e.event_id, e.topic_offset + 1 into found_tail
    from headwater_internal.event e
    where e.topic_id = store_tail.topic_id and e.position >= low and e.position <= head
    order by e.position desc
    limit 1;
    if not found then
        found_tail.next_offset := headwater_internal.next_offset(topic_id, 0);
        select e.position, e.event_id into found_tail.position, found_tail.event_id
        from headwater_internal.event e
        where e.topic_id = store_tail.topic_id
        order by e.position desc
        limit 1;
        found_tail.position := coalesce(found_tail.position, 0);
    end if;
    return found_tail;
end;
$$;

-- HW002 for arrays of different lengths, HW003 for events that are too large for the store.
create or replace function headwater_internal.refuse_bad_events(
    store headwater_internal.topic,
    events bigint,
    event_ids text[],
    types text[],
    tags text[],
    payloads bytea[],
    content_types text[],
    metadata text[]
)
returns void
language plpgsql
as $$
begin
    if events is null or events = 0 or cardinality(event_ids) is distinct from events or cardinality(types) is distinct from events
        or cardinality(tags) is distinct from events or cardinality(payloads) is distinct from events
        or cardinality(content_types) <> events or cardinality(metadata) <> events
    then
        raise exception 'invalid append: expected at least one event, and arrays of equal length' using errcode = 'HW002';
    end if;
    -- If all payloads together are below the limit, so is each.
    if pg_column_size(payloads) > store.max_payload_bytes or pg_column_size(metadata) > store.max_header_bytes then
        perform headwater_internal.refuse_too_large(
            store,
            (select max(octet_length(p)) from unnest(payloads) as p),
            (select max(octet_length(m)) from unnest(metadata) as m)
        );
    end if;
end;
$$;

-- Optimistic append of a group, in one transaction: insert each append up to the first that is in doubt. Event i
-- belongs to append `owners[i]`; owners are ascending. This function does not evaluate queries: the caller lists what
-- would contradict each append (`headwater/eventstore/conflict_cache.py`), and no append of the group may depend on an
-- earlier one.
--
-- An append is in doubt if an event after `above` has all index terms of one of its doubts, or if the event at
-- `seen_at` does not have the index term that was seen there. A caller that knows every event up to `known_to`, whose
-- id is `known_id`, may ask for later events only. That event is the fence: while it is the last event of the store,
-- nothing has to be looked up; otherwise the events after it are checked. If it does not exist, events that the caller
-- knew were lost in a crash of a server that commits asynchronously, and everything is in doubt.
--
-- Returns the last position before the append, and a position for each event; null from the first append in doubt on.
-- An event id that exists is an error (23505), and nothing is appended. Runs as its owner, as append_group() does.
-- `epoch` is the epoch of all positions; if the log is in another one, everything is in doubt.
create or replace function headwater_internal.append_ahead(
    topic text,
    owners integer[],
    event_ids text[],
    types text[],
    tags text[],
    payloads bytea[],
    content_types text[],
    metadata text[],
    doubting integer[],
    doubts integer[],
    index_terms text[],
    above bigint[],
    known_to bigint default null,
    known_id text default null,
    seen_by integer[] default null,
    seen_terms text[] default null,
    seen_at bigint[] default null,
    epoch integer default null,
    out tail bigint,
    out positions bigint[]
)
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
-- A plan made while the store was small must not read all of it when it has grown.
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set lock_timeout = '10s'
as $$
declare
    store headwater_internal.topic;
    before headwater_internal.store_tail;
    in_doubt integer;
    nothing text;
begin
    select * into store
    from headwater_internal.topic t
    where t.name = append_ahead.topic and t.deleted_at is null and t.event_store;
    if not found then
        store := headwater_internal.find_event_store(topic);
    end if;
    -- Assignments: separate PERFORM statements would cost more than most of these calls.
    nothing := headwater_internal.refuse_bad_events(
        store, cardinality(owners), event_ids, types, tags, payloads, content_types, metadata
    );
    nothing := headwater_internal.hold_store(store);
    before := headwater_internal.store_tail(store.id);
    tail := before.position;
    -- A position that was never assigned: only the complete check in append_group() reports it.
    if epoch <> headwater.current_epoch() or (tail < any (above) and headwater.head() < any (above)) then
        return;
    end if;
    if known_id is not null and known_id is distinct from before.event_id and not exists (
        select
        from headwater_internal.event_identity i
        where i.topic_id = store.id and i.event_id = known_id and i.position = known_to
    ) then
        return;
    end if;
    if tail <> any (above) then
        select min(w.owner) into in_doubt
        from (
            select d.owner
            from unnest(doubting, doubts, index_terms, above) as d (owner, doubt, index_term, above)
            group by d.owner, d.doubt
            having bool_and(
                d.above < append_ahead.tail and (
                    d.index_term is null or exists (
                        select
                        from headwater_internal.event_index_term m
                        where m.topic_id = store.id and m.index_term = d.index_term and m.position > d.above
                    )
                )
            )
        ) as w;
    end if;
    if seen_by is not null then
        select least(in_doubt, min(s.owner)) into in_doubt
        from unnest(seen_by, seen_terms, seen_at) as s (owner, index_term, position)
        where not exists (
            select
            from headwater_internal.event_index_term m
            where m.topic_id = store.id and m.index_term = s.index_term and m.position = s.position
        );
    end if;
    if owners[1] >= in_doubt then
        return;
    end if;
    nothing := headwater_internal.advertise_publisher(store.name);
    positions := array(
        select case when o.owner < in_doubt or in_doubt is null then nextval('headwater_internal.position') end
        from unnest(owners) as o (owner)
    );
    nothing := headwater_internal.insert_appended(
        store.id, before.next_offset, positions, event_ids, types, tags, payloads, content_types, metadata
    );
end;
$$;

-- The verdict on an append whose condition does not hold: `moved_to` is the latest match, or `epoch` and
-- `common_position` are set if the condition was read in another epoch. All are null if the condition holds. The caller
-- must hold the lock of the partition; volatile, so that it sees what was committed before the lock was granted.
create or replace function headwater_internal.refuted_by(store_id integer, condition jsonb, present integer)
returns headwater_internal.append_verdict
language plpgsql
volatile
as $$
declare
    query constant jsonb := condition -> 'query';
    exact constant boolean := condition ? 'latest';
    seen constant bigint := coalesce((condition ->> case when exact then 'latest' else 'after' end)::bigint, 0);
    latest bigint;
    verdict headwater_internal.append_verdict;
begin
    if (seen > 0 and (condition ->> 'epoch')::integer <> present) or (seen > headwater.head() and not exact) then
        verdict.epoch := present;
        verdict.common_position := least(
            headwater.common_position((condition ->> 'epoch')::integer, seen), headwater.head()
        );
        return verdict;
    end if;
    latest := headwater_internal.latest_match(
        store_id, query, case when exact then greatest(seen - 1, 0) else seen end
    );
    if latest is distinct from (case when exact then nullif(seen, 0) end) then
        if latest is null then
            latest := headwater_internal.latest_match(store_id, query, 0);
        end if;
        verdict.moved_to := coalesce(latest, 0);
    end if;
    return verdict;
end;
$$;

-- Append a group: each of its appends in order, all in one transaction, each with its own verdict. Append i has the
-- next `sizes[i]` events and the condition `conditions[i]` (null: none). Each element of `tags` is an array as text,
-- without duplicates. A rejected append leaves no events; the others are appended.
--
-- It runs as its owner, since a condition may concern events that the appender may not read.
create or replace function headwater_internal.append_group(
    topic text,
    sizes integer[],
    conditions text[],
    event_ids text[],
    types text[],
    tags text[],
    payloads bytea[],
    content_types text[] default null,
    metadata text[] default null
)
returns setof headwater_internal.append_verdict
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set lock_timeout = '10s'
as $$
declare
    store headwater_internal.topic;
    verdict headwater_internal.append_verdict;
    condition jsonb;
    present constant integer := headwater.current_epoch();
    first integer;
    last integer := 0;
    before headwater_internal.store_tail;
    next_offset bigint;
    found_positions bigint[];
    found_offsets bigint[];
begin
    store := headwater_internal.find_event_store(topic);
    perform headwater_internal.refuse_bad_events(
        store, (select sum(s) from unnest(sizes) as s), event_ids, types, tags, payloads, content_types, metadata
    );
    if cardinality(conditions) is distinct from cardinality(sizes) or 0 >= any (sizes) then
        raise exception 'invalid append: expected at least one event, and arrays of equal length' using errcode = 'HW002';
    end if;
    perform headwater_internal.hold_store(store);
    before := headwater_internal.store_tail(store.id);
    next_offset := before.next_offset;
    for i in 1 .. cardinality(sizes) loop
        first := last + 1;
        last := last + sizes[i];
        verdict := null;
        condition := conditions[i]::jsonb;
        select
            array_agg(d.position order by e.ordinal),
            array_agg(f.topic_offset order by e.ordinal),
            min(e.event_id)
        into found_positions, found_offsets, verdict.taken_id
        from unnest(event_ids[first:last]) with ordinality as e (event_id, ordinal)
        join headwater_internal.event_identity d on d.topic_id = store.id and d.event_id = e.event_id
        left join headwater_internal.event f on f.topic_id = store.id and f.position = d.position;
        if found_positions is not null then
            if found_offsets = array(
                select generate_series(found_offsets[1], found_offsets[1] + sizes[i] - 1)
            ) then
                verdict.positions := found_positions;
                verdict.repeated := true;
                verdict.taken_id := null;
            end if;
            return next verdict;
            continue;
        end if;
        if condition -> 'query' is not null then
            verdict := headwater_internal.refuted_by(store.id, condition, present);
            if verdict.epoch is not null or verdict.moved_to is not null then
                return next verdict;
                continue;
            end if;
        end if;
        perform headwater_internal.advertise_publisher(store.name);
        verdict.positions := array(select nextval('headwater_internal.position') from generate_series(first, last));
        perform headwater_internal.insert_appended(
            store.id, next_offset, verdict.positions, event_ids[first:last], types[first:last], tags[first:last],
            payloads[first:last], content_types[first:last], metadata[first:last]
        );
        next_offset := next_offset + sizes[i];
        return next verdict;
    end loop;
end;
$$;

-- Insert those of these events that have a position, which are the first ones, with their index terms. The caller has
-- done all checks and holds the lock of the partition.
create or replace function headwater_internal.insert_appended(
    topic_id integer,
    next_offset bigint,
    positions bigint[],
    event_ids text[],
    types text[],
    tags text[],
    payloads bytea[],
    content_types text[],
    metadata text[]
)
returns void
language plpgsql
volatile
as $$
begin
    insert into headwater_internal.event
        (position, topic_id, topic_offset, type, headers, content_type, payload, event_id, tags)
    select
        r.position, insert_appended.topic_id, insert_appended.next_offset + r.number - 1, r.type,
        r.metadata::jsonb, r.content_type, r.payload, r.event_id, r.tags::headwater_internal.event_tags
    from unnest(positions, event_ids, types, tags, payloads, content_types, metadata) with ordinality
        as r (position, event_id, type, tags, payload, content_type, metadata, number)
    where r.position is not null;
    insert into headwater_internal.event_index_term (topic_id, index_term, position)
    select insert_appended.topic_id, ':' || r.type, r.position
    from unnest(positions, types) as r (position, type)
    where r.position is not null and r.type is not null
    union all
    select insert_appended.topic_id, '#' || t.tag, r.position
    from unnest(positions, tags) as r (position, tags)
    cross join lateral unnest(r.tags::text[]) as t (tag)
    where r.position is not null;
    insert into headwater_internal.event_identity (topic_id, event_id, position)
    select insert_appended.topic_id, r.event_id, r.position
    from unnest(positions, event_ids) as r (position, event_id)
    where r.position is not null;
    if exists (select from headwater_internal.field_index x where x.topic_id = insert_appended.topic_id) then
        perform headwater_internal.index_fields(topic_id, positions);
    end if;
end;
$$;

-- Append JSON events under a condition: the form for psql and other languages. Each event is {"type": ...} with,
-- optionally, "id", "data", "metadata" and "tags". Returns their positions. HW001 if the condition is false, HW021 if
-- the condition's position belongs to another epoch, HW002 for invalid arguments, HW004 if the event store does not
-- exist.
create or replace function headwater.append(
    topic text,
    events jsonb,
    condition jsonb default null
)
returns bigint[]
language plpgsql
volatile
as $$
declare
    verdict headwater_internal.append_verdict;
begin
    if jsonb_typeof(events) is distinct from 'array' or jsonb_array_length(events) = 0 then
        raise exception 'invalid events: expected a JSON array of at least one event' using errcode = 'HW002';
    end if;
    if exists (select from jsonb_array_elements(events) as e where e ->> 'type' is null) then
        raise exception 'every event of an event store needs a type' using errcode = 'HW002';
    end if;
    -- (`headwater/eventstore/query.py` has the same limit.)
    if exists (
        select
        from jsonb_array_elements(events) as e
        where jsonb_path_exists(
            e -> 'data', 'strict $.**{200 to last} ? (@.type() == "array" || @.type() == "object")', silent => true
        )
    ) then
        raise exception 'invalid data: JSON may be nested up to 200 levels deep' using errcode = 'HW002';
    end if;
    if condition is not null and (
        jsonb_typeof(condition) <> 'object'
        or not condition ? 'query'
        or exists (select from jsonb_object_keys(condition) as k where k not in ('query', 'after', 'latest', 'epoch'))
        or condition ?& array['after', 'latest']
        or jsonb_typeof(coalesce(condition -> 'after', condition -> 'latest')) not in ('number', 'null')
        or coalesce(condition ->> 'after', condition ->> 'latest') !~ '^[0-9]{1,18}$'
        or jsonb_typeof(condition -> 'epoch') not in ('number', 'null')
        or condition ->> 'epoch' !~ '^[0-9]{1,9}$'
    ) then
        raise exception 'invalid append condition: expected a JSON object with a query and a position'
            using errcode = 'HW002',
                  hint = 'Write {"query": [...], "after": 17} or {"query": [...], "latest": 17}, optionally with "epoch".';
    end if;
    perform headwater_internal.refuse_bad_query(condition -> 'query');
    select v.* into verdict
    from (
        select
            array_agg(coalesce(e.event ->> 'id', gen_random_uuid()::text) order by e.ordinal) as event_ids,
            array_agg(e.event ->> 'type' order by e.ordinal) as types,
            array_agg(
                array(select distinct jsonb_array_elements_text(e.event -> 'tags'))::text order by e.ordinal
            ) as tags,
            array_agg(convert_to((e.event -> 'data')::text, 'UTF8') order by e.ordinal) as payloads,
            array_agg(case when e.event ? 'data' then 'application/json' end order by e.ordinal) as content_types,
            array_agg((e.event -> 'metadata')::text order by e.ordinal) as metadata
        from jsonb_array_elements(events) with ordinality as e (event, ordinal)
    ) as a
    cross join lateral headwater_internal.append_group(
        topic, array[jsonb_array_length(events)], array[condition::text], a.event_ids, a.types, a.tags, a.payloads,
        a.content_types, a.metadata
    ) as v;
    if verdict.taken_id is not null then
        raise exception 'event id "%" belongs to another append', verdict.taken_id
            using errcode = 'HW002', detail = json_build_object('event_id', verdict.taken_id)::text;
    end if;
    if verdict.epoch is not null then
        raise exception 'the position of the append condition does not belong to the current epoch %', verdict.epoch
            using errcode = 'HW021',
                  detail = json_build_object(
                      'epoch', verdict.epoch, 'requested_epoch', (condition ->> 'epoch')::integer,
                      'common_position', verdict.common_position
                  )::text,
                  hint = 'Postgres crashed, failed over or was restored. Read the events again and decide again.';
    end if;
    if verdict.moved_to is not null then
        raise exception 'append condition failed: the latest matching event is at position %', verdict.moved_to
            using errcode = 'HW001',
                  detail = json_build_object(
                      'actual_position', verdict.moved_to,
                      'expected_position', coalesce((coalesce(condition ->> 'after', condition ->> 'latest'))::bigint, 0)
                  )::text,
                  hint = 'Read the events again, decide again, and append again.';
    end if;
    return verdict.positions;
end;
$$;

-- Delete the index terms of deleted event stores and dropped indexes, some at a time.
create or replace function headwater_internal.clear_index_terms(sweep_size integer default 50000)
returns bigint
language plpgsql
volatile
as $$
declare
    cleared bigint;
begin
    delete from headwater_internal.event_index_term m
    using (
        select f.topic_id, f.index_term, f.position
        from headwater_internal.topic t
        join headwater_internal.event_index_term f on f.topic_id = t.id
        where t.event_store and t.deleted_at is not null
        limit sweep_size
    ) as gone
    where m.topic_id = gone.topic_id and m.index_term = gone.index_term and m.position = gone.position;
    get diagnostics cleared = row_count;
    delete from headwater_internal.event_index_term m
    using (
        select f.topic_id, f.index_term, f.position
        from headwater_internal.field_index x
        join headwater_internal.event_index_term f
            on f.topic_id = x.topic_id and f.index_term >= '=' || x.id || ':' and f.index_term < '=' || x.id || ';'
        where x.dropped
        limit sweep_size
    ) as gone
    where m.topic_id = gone.topic_id and m.index_term = gone.index_term and m.position = gone.position;
    if not found then
        delete from headwater_internal.field_index x where x.dropped;
    end if;
    return cleared;
end;
$$;
