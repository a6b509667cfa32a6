-- The event store: append under a condition.
--
-- Whoever appends holds the one lane of the topic from before the condition is checked until the commit. So nothing
-- can come between the check and the insert, commits follow the order of positions, and a reader sees events without
-- a gap in whatever snapshot it has: reading an event store needs no settling.
--
-- A condition is {"query": [...], "after": 17}: nothing after this position matches; or {"query": [...], "latest": 17}:
-- the latest match is exactly there. Position 0, null or none at all stands for the beginning: that nothing matches.
-- With "epoch", the one in which the position was read, the append is refused if the log is in another one: the caller
-- may have decided on events that are lost. See epoch.sql.

-- The event store of that name.
create or replace function headwater.find_event_store(name text)
returns headwater.topic
language plpgsql
stable
as $$
declare
    found_topic headwater.topic := headwater.find_topic(name);
begin
    if not found_topic.event_store then
        raise exception 'topic "%" is no event store', name
            using errcode = 'HW002',
                  detail = json_build_object('topic', name)::text,
                  hint = 'Make one of another name: headwater.create_event_store().';
    end if;
    return found_topic;
end;
$$;

-- Create an event store: a topic whose events are found by type and tag. An existing one is HW005, unless `if_missing`.
create or replace function headwater.create_event_store(
    name text,
    max_payload_bytes integer default 1048576,
    max_header_bytes integer default 65536,
    if_missing boolean default false
)
returns headwater.topic
language plpgsql
as $$
declare
    created headwater.topic;
begin
    if if_missing and exists (
        select from headwater.topic t where t.name = create_event_store.name and t.deleted_at is null
    ) then
        return headwater.find_event_store(name);
    end if;
    begin
        created := headwater.create_topic(
            name, 'sequenced', max_payload_bytes => max_payload_bytes, max_header_bytes => max_header_bytes
        );
    exception
        when sqlstate 'HW005' then
            -- Somebody made it in this moment.
            if if_missing then
                return headwater.find_event_store(name);
            end if;
            raise;
    end;
    update headwater.topic t set event_store = true where t.id = created.id returning * into created;
    return created;
end;
$$;

-- Hold the lane of an event store until the transaction ends, so that nobody else appends to it.
create or replace function headwater.hold_store(store headwater.topic)
returns void
language plpgsql
as $$
begin
    -- Nearly always it is free; only who must wait needs to say why in the end.
    if
        current_setting('transaction_isolation') = 'read committed'
        and pg_try_advisory_xact_lock(headwater.lane_key(store.id, 0))
    then
        return;
    end if;
    begin
        perform headwater.lock_lanes(store.id, array[0]);
    exception
        when lock_not_available then
            raise exception 'another transaction has held the event store "%" for 10 seconds', store.name
                using errcode = '40001',
                      hint = 'Is a transaction open that has appended? Nobody else can append until it ends.';
    end;
end;
$$;

-- The last event of an event store and the offset that the next one gets; 0 and 0 if there is none. Only the holder of
-- its lane may ask.
create or replace function headwater.store_tail(topic_id integer)
returns headwater.store_tail
language plpgsql
volatile
as $$
declare
    head constant bigint := headwater.head();
    low bigint;
    found_tail headwater.store_tail;
begin
    -- Both ends are known before the plan starts, so that of all segments it opens the newest.
    select s.lo into low from headwater.segment s where s.lo <= head order by s.lo desc limit 1;
    select e.position, e.event_id, e.topic_offset + 1 into found_tail
    from headwater.event e
    where e.topic_id = store_tail.topic_id and e.position >= low and e.position <= head
    order by e.position desc
    limit 1;
    if not found then
        found_tail.next_offset := headwater.next_offset(topic_id, 0);
        select e.position, e.event_id into found_tail.position, found_tail.event_id
        from headwater.event e
        where e.topic_id = store_tail.topic_id
        order by e.position desc
        limit 1;
        found_tail.position := coalesce(found_tail.position, 0);
    end if;
    return found_tail;
end;
$$;

-- Refuse arrays that do not belong together, and events that are too large for the store.
create or replace function headwater.refuse_bad_events(
    store headwater.topic,
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
        raise exception 'an append has 1 event or more, and all of its parts' using errcode = 'HW002';
    end if;
    -- Where all together are small enough, so is each.
    if pg_column_size(payloads) > store.max_payload_bytes or pg_column_size(metadata) > store.max_header_bytes then
        perform headwater.refuse_too_large(
            store,
            (select max(octet_length(p)) from unnest(payloads) as p),
            (select max(octet_length(m)) from unnest(metadata) as m)
        );
    end if;
end;
$$;

-- Append what is right for sure of a group, in one transaction: each of its appends up to the first that is in doubt.
-- Event i belongs to append `owners[i]`; owners count up. Nothing is known here of queries: whoever calls says what would
-- speak against an append (`headwater/window.py`), and of the group none may be about what an earlier one appends.
--
-- An append is in doubt if there is an event after `above` that has all marks of one of its doubts, or if the event at
-- `seen_at` has not the mark that was seen there. Whoever knows every event up to `known_to`, which has the id `known_id`,
-- may ask for what comes after that. This is the fence: while the last event of the store is that one, nothing has to be
-- looked for; if others have appended since, this looks at what came. If there is no such event, what was known of was
-- lost in a crash of a server that commits asynchronously, and everything is in doubt.
--
-- Returns the last event before, and a position for each event; null from the first that is in doubt on. An id that is
-- taken is an error (23505), and nothing is appended. It runs as its owner, as `append_group` does. `epoch`: the one that
-- all positions are of; if the log is in another, everything is in doubt.
create or replace function headwater.append_ahead(
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
    marks text[],
    above bigint[],
    known_to bigint default null,
    known_id text default null,
    seen_by integer[] default null,
    seen_marks text[] default null,
    seen_at bigint[] default null,
    epoch integer default null,
    out tail bigint,
    out places bigint[]
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
    store headwater.topic;
    before headwater.store_tail;
    in_doubt integer;
    nothing text;
begin
    select * into store
    from headwater.topic t
    where t.name = append_ahead.topic and t.deleted_at is null and t.event_store;
    if not found then
        store := headwater.find_event_store(topic);
    end if;
    -- Assigned, since a statement of its own for each costs more than most of them do.
    nothing := headwater.refuse_bad_events(
        store, cardinality(owners), event_ids, types, tags, payloads, content_types, metadata
    );
    nothing := headwater.hold_store(store);
    before := headwater.store_tail(store.id);
    tail := before.position;
    -- A position that was never issued: only the check in full says so.
    if epoch <> headwater.current_epoch() or (tail < any (above) and headwater.head() < any (above)) then
        return;
    end if;
    if known_id is not null and known_id is distinct from before.event_id and not exists (
        select
        from headwater.event_identity i
        where i.topic_id = store.id and i.event_id = known_id and i.position = known_to
    ) then
        return;
    end if;
    if tail <> any (above) then
        select min(w.owner) into in_doubt
        from (
            select d.owner
            from unnest(doubting, doubts, marks, above) as d (owner, doubt, mark, above)
            group by d.owner, d.doubt
            having bool_and(
                d.above < append_ahead.tail and (
                    d.mark is null or exists (
                        select
                        from headwater.event_mark m
                        where m.topic_id = store.id and m.mark = d.mark and m.position > d.above
                    )
                )
            )
        ) as w;
    end if;
    if seen_by is not null then
        select least(in_doubt, min(s.owner)) into in_doubt
        from unnest(seen_by, seen_marks, seen_at) as s (owner, mark, place)
        where not exists (
            select
            from headwater.event_mark m
            where m.topic_id = store.id and m.mark = s.mark and m.position = s.place
        );
    end if;
    if owners[1] >= in_doubt then
        return;
    end if;
    nothing := headwater.advertise_publisher(store.name);
    places := array(
        select case when o.owner < in_doubt or in_doubt is null then nextval('headwater.position') end
        from unnest(owners) as o (owner)
    );
    nothing := headwater.insert_appended(
        store.id, before.next_offset, places, event_ids, types, tags, payloads, content_types, metadata
    );
end;
$$;

-- Append a group: each of its appends in order, all in one transaction, each with a verdict of its own. Append i has
-- the next `sizes[i]` of the events, and stands under `conditions[i]`; null: under none. Of `tags` each is an array
-- written as text, without repeats. What is refused leaves nothing, and the others stand.
--
-- It runs as its owner, since a condition may ask for what the appender may not read.
create or replace function headwater.append_group(
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
returns setof headwater.append_verdict
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
    store headwater.topic;
    verdict headwater.append_verdict;
    condition jsonb;
    query jsonb;
    present constant integer := headwater.current_epoch();
    exact boolean;
    seen bigint;
    latest bigint;
    first integer;
    last integer := 0;
    before headwater.store_tail;
    next_offset bigint;
    found_positions bigint[];
    found_offsets bigint[];
begin
    store := headwater.find_event_store(topic);
    perform headwater.refuse_bad_events(
        store, (select sum(s) from unnest(sizes) as s), event_ids, types, tags, payloads, content_types, metadata
    );
    if cardinality(conditions) is distinct from cardinality(sizes) or 0 >= any (sizes) then
        raise exception 'an append has 1 event or more, and all of its parts' using errcode = 'HW002';
    end if;
    perform headwater.hold_store(store);
    before := headwater.store_tail(store.id);
    next_offset := before.next_offset;
    for i in 1 .. cardinality(sizes) loop
        first := last + 1;
        last := last + sizes[i];
        verdict := null;
        condition := conditions[i]::jsonb;
        query := condition -> 'query';
        select
            array_agg(d.position order by e.place),
            array_agg(f.topic_offset order by e.place),
            min(e.event_id)
        into found_positions, found_offsets, verdict.taken_id
        from unnest(event_ids[first:last]) with ordinality as e (event_id, place)
        join headwater.event_identity d on d.topic_id = store.id and d.event_id = e.event_id
        left join headwater.event f on f.topic_id = store.id and f.position = d.position;
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
        if query is not null then
            exact := condition ? 'latest';
            seen := coalesce((condition ->> case when exact then 'latest' else 'after' end)::bigint, 0);
            if
                (seen > 0 and (condition ->> 'epoch')::integer <> present)
                or (seen > headwater.head() and not exact)
            then
                verdict.epoch := present;
                verdict.common_position := least(
                    headwater.common_position((condition ->> 'epoch')::integer, seen), headwater.head()
                );
                return next verdict;
                continue;
            end if;
            latest := headwater.latest_match(
                store.id, query, case when exact then greatest(seen - 1, 0) else seen end
            );
            if latest is distinct from (case when exact then nullif(seen, 0) end) then
                if latest is null then
                    latest := headwater.latest_match(store.id, query, 0);
                end if;
                verdict.moved_to := coalesce(latest, 0);
                return next verdict;
                continue;
            end if;
        end if;
        perform headwater.advertise_publisher(store.name);
        verdict.positions := array(select nextval('headwater.position') from generate_series(first, last));
        perform headwater.insert_appended(
            store.id, next_offset, verdict.positions, event_ids[first:last], types[first:last], tags[first:last],
            payloads[first:last], content_types[first:last], metadata[first:last]
        );
        next_offset := next_offset + sizes[i];
        return next verdict;
    end loop;
end;
$$;

-- Insert those of these events that have a place, which are the first ones, with what they are found by. For whoever
-- has checked what must be checked, and holds the lane.
create or replace function headwater.insert_appended(
    topic_id integer,
    next_offset bigint,
    places bigint[],
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
    insert into headwater.event
        (position, topic_id, topic_offset, type, headers, content_type, payload, event_id, tags)
    select
        r.place, insert_appended.topic_id, insert_appended.next_offset + r.number - 1, r.type,
        r.metadata::jsonb, r.content_type, r.payload, r.event_id, r.tags::headwater.event_tags
    from unnest(places, event_ids, types, tags, payloads, content_types, metadata) with ordinality
        as r (place, event_id, type, tags, payload, content_type, metadata, number)
    where r.place is not null;
    insert into headwater.event_mark (topic_id, mark, position)
    select insert_appended.topic_id, ':' || r.type, r.place
    from unnest(places, types) as r (place, type)
    where r.place is not null and r.type is not null
    union all
    select insert_appended.topic_id, '#' || t.tag, r.place
    from unnest(places, tags) as r (place, tags)
    cross join lateral unnest(r.tags::text[]) as t (tag)
    where r.place is not null;
    insert into headwater.event_identity (topic_id, event_id, position)
    select insert_appended.topic_id, r.event_id, r.place
    from unnest(places, event_ids) as r (place, event_id)
    where r.place is not null;
    if exists (select from headwater.field_index x where x.topic_id = insert_appended.topic_id) then
        perform headwater.mark_fields(topic_id, places);
    end if;
end;
$$;

-- Append JSON events under a condition: the form for psql and other languages. Each event is {"type": ...} with, if it
-- has them, "id", "data", "metadata" and "tags". Returns their positions; a condition that is false is HW001.
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
    verdict headwater.append_verdict;
begin
    if jsonb_typeof(events) is distinct from 'array' or jsonb_array_length(events) = 0 then
        raise exception 'events are a JSON array of one or more' using errcode = 'HW002';
    end if;
    if exists (select from jsonb_array_elements(events) as e where e ->> 'type' is null) then
        raise exception 'every event of an event store has a type' using errcode = 'HW002';
    end if;
    -- (The same in `headwater/query.py`.)
    if exists (
        select
        from jsonb_array_elements(events) as e
        where jsonb_path_exists(
            e -> 'data', 'strict $.**{200 to last} ? (@.type() == "array" || @.type() == "object")', silent => true
        )
    ) then
        raise exception 'JSON is up to 200 levels deep' using errcode = 'HW002';
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
        raise exception 'a condition is a JSON object with a query and a position'
            using errcode = 'HW002',
                  hint = 'Write {"query": [...], "after": 17} or {"query": [...], "latest": 17}, with "epoch" beside it.';
    end if;
    perform headwater.refuse_bad_query(condition -> 'query');
    select v.* into verdict
    from (
        select
            array_agg(coalesce(e.event ->> 'id', gen_random_uuid()::text) order by e.place) as event_ids,
            array_agg(e.event ->> 'type' order by e.place) as types,
            array_agg(
                array(select distinct jsonb_array_elements_text(e.event -> 'tags'))::text order by e.place
            ) as tags,
            array_agg(convert_to((e.event -> 'data')::text, 'UTF8') order by e.place) as payloads,
            array_agg(case when e.event ? 'data' then 'application/json' end order by e.place) as content_types,
            array_agg((e.event -> 'metadata')::text order by e.place) as metadata
        from jsonb_array_elements(events) with ordinality as e (event, place)
    ) as a
    cross join lateral headwater.append_group(
        topic, array[jsonb_array_length(events)], array[condition::text], a.event_ids, a.types, a.tags, a.payloads,
        a.content_types, a.metadata
    ) as v;
    if verdict.taken_id is not null then
        raise exception 'the event id "%" belongs to another append', verdict.taken_id
            using errcode = 'HW002', detail = json_build_object('event_id', verdict.taken_id)::text;
    end if;
    if verdict.epoch is not null then
        raise exception 'the position of the condition is not of the present history, epoch %', verdict.epoch
            using errcode = 'HW021',
                  detail = json_build_object(
                      'epoch', verdict.epoch, 'requested_epoch', (condition ->> 'epoch')::integer,
                      'common_position', verdict.common_position
                  )::text,
                  hint = 'Postgres crashed, failed over or was restored. Read the context again, decide again.';
    end if;
    if verdict.moved_to is not null then
        raise exception 'the context of this append moved: its latest match is at %', verdict.moved_to
            using errcode = 'HW001',
                  detail = json_build_object(
                      'actual_position', verdict.moved_to,
                      'expected_position', coalesce((coalesce(condition ->> 'after', condition ->> 'latest'))::bigint, 0)
                  )::text,
                  hint = 'Read the context again, decide again, append again.';
    end if;
    return verdict.positions;
end;
$$;

-- Give back the room of the marks of event stores and of indexes that are gone, some at a time.
create or replace function headwater.clear_marks(sweep_size integer default 50000)
returns bigint
language plpgsql
volatile
as $$
declare
    cleared bigint;
begin
    delete from headwater.event_mark m
    using (
        select f.topic_id, f.mark, f.position
        from headwater.topic t
        join headwater.event_mark f on f.topic_id = t.id
        where t.event_store and t.deleted_at is not null
        limit sweep_size
    ) as gone
    where m.topic_id = gone.topic_id and m.mark = gone.mark and m.position = gone.position;
    get diagnostics cleared = row_count;
    delete from headwater.event_mark m
    using (
        select f.topic_id, f.mark, f.position
        from headwater.field_index x
        join headwater.event_mark f
            on f.topic_id = x.topic_id and f.mark >= '=' || x.id || ':' and f.mark < '=' || x.id || ';'
        where x.dropped
        limit sweep_size
    ) as gone
    where m.topic_id = gone.topic_id and m.mark = gone.mark and m.position = gone.position;
    if not found then
        delete from headwater.field_index x where x.dropped;
    end if;
    return cleared;
end;
$$;
