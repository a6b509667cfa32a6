-- The event store: append under a condition.
--
-- Whoever appends holds the one lane of the topic from before the condition is checked until the commit. So nothing
-- can come between the check and the insert, commits follow the order of positions, and a reader sees events without
-- a gap in whatever snapshot it has: reading an event store needs no settling.
--
-- A condition is {"query": [...], "after": 17}: nothing after this position matches; or {"query": [...], "latest": 17}:
-- the latest match is exactly there. Position 0, null or none at all stands for the beginning: that nothing matches.

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

-- The offset that the next event of an event store gets. Only the holder of its lane may ask.
create or replace function headwater.next_store_offset(topic_id integer)
returns bigint
language plpgsql
volatile
as $$
declare
    head constant bigint := headwater.head();
    low bigint;
    tail bigint;
begin
    -- Both ends are known before the plan starts, so that of all segments it opens the newest.
    select s.lo into low from headwater.segment s where s.lo <= head order by s.lo desc limit 1;
    select e.topic_offset into tail
    from headwater.event e
    where e.topic_id = next_store_offset.topic_id and e.position >= low and e.position <= head
    order by e.position desc
    limit 1;
    return coalesce(tail + 1, headwater.next_offset(topic_id, 0));
end;
$$;

-- What can be known of the conditions of a group before any of its events is there, in one look at the marks. `apart`:
-- no event of an earlier append of the group has the one tag that it asks for. `certain`: besides, it asks for nothing
-- else, and `latest` is its latest match. Of conditions of other shapes nothing is known ahead.
create or replace function headwater.look_ahead(
    topic_id integer,
    sizes integer[],
    conditions text[],
    types text[],
    tags text[],
    out latest bigint[],
    out certain boolean[],
    out apart boolean[]
)
language plpgsql
stable
as $$
begin
    with wish as materialized (
        select
            w.place,
            c.condition,
            c.condition #> '{query,0}' as item,
            coalesce(
                jsonb_array_length(c.condition -> 'query') = 1
                and jsonb_array_length(c.condition #> '{query,0,tags}') = 1
                and not c.condition #> '{query,0}' ? 'fields',
                false
            ) as one_tag,
            c.condition #> '{query,0}' ? 'types' as typed
        from unnest(conditions) with ordinality as w (condition, place)
        cross join lateral (select w.condition::jsonb as condition) as c
    ),
    event as materialized (
        select e.type, e.tags, o.owner
        from unnest(types, tags) with ordinality as e (type, tags, place)
        join (
            select row_number() over (order by s.place, n) as place, s.place as owner
            from unnest(sizes) with ordinality as s (size, place)
            cross join lateral generate_series(1, s.size) as n
        ) as o using (place)
    ),
    first_with as materialized (
        -- Who of the group is the first to append a tag.
        select '#' || t.tag as mark, min(e.owner) as owner
        from event e
        cross join lateral unnest(e.tags::text[]) as t (tag)
        group by t.tag
    )
    select
        array_agg(
            case when w.one_tag and not w.typed then (
                select m.position
                from headwater.event_mark m
                where
                    m.topic_id = look_ahead.topic_id
                    and m.mark = '#' || (w.item #>> '{tags,0}')
                    and m.position > case
                        when w.condition ? 'latest' then greatest((w.condition ->> 'latest')::bigint - 1, 0)
                        else coalesce((w.condition ->> 'after')::bigint, 0)
                    end
                order by m.position desc
                limit 1
            ) end
            order by w.place
        ),
        array_agg(w.one_tag and not w.typed and coalesce(f.owner >= w.place, true) order by w.place),
        array_agg(w.one_tag and coalesce(f.owner >= w.place, true) order by w.place)
    into latest, certain, apart
    from wish w
    left join first_with f on f.mark = '#' || (w.item #>> '{tags,0}');
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
-- A plan made while the store was small must not read all of it when it has grown.
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set lock_timeout = '10s'
as $$
declare
    store headwater.topic;
    events constant integer := coalesce(cardinality(event_ids), 0);
    verdict headwater.append_verdict;
    condition jsonb;
    query jsonb;
    exact boolean;
    seen bigint;
    latest bigint;
    first integer;
    last integer := 0;
    payload_bytes integer;
    metadata_bytes integer;
    -- Whether an id may have been appended before, here or in an earlier append of the group.
    known boolean;
    -- What is known of each condition before the first insert.
    ahead bigint[];
    certain boolean[];
    apart boolean[];
    -- Events that were accepted and not yet inserted: from which on, and where they go.
    waiting_from integer;
    places bigint[] := array_fill(null::bigint, array[events]);
    offsets bigint[] := array_fill(null::bigint, array[events]);
    next_offset bigint;
    found_positions bigint[];
    found_offsets bigint[];
    advertised boolean := false;
begin
    select * into store
    from headwater.topic t
    where t.name = append_group.topic and t.deleted_at is null and t.event_store;
    if not found then
        store := headwater.find_event_store(topic);
    end if;
    if events = 0 or cardinality(types) <> events or cardinality(tags) <> events or cardinality(payloads) <> events
        or cardinality(content_types) <> events or cardinality(metadata) <> events
        or cardinality(conditions) <> cardinality(sizes)
        or (select sum(s) is distinct from events or bool_or(s is null or s < 1) from unnest(sizes) as s)
    then
        raise exception 'an append has 1 event or more, and all of its parts' using errcode = 'HW002';
    end if;
    select max(octet_length(e.payload)), max(octet_length(e.metadata)), count(distinct e.event_id) < events
    into payload_bytes, metadata_bytes, known
    from unnest(payloads, metadata, event_ids) as e (payload, metadata, event_id);
    if payload_bytes > store.max_payload_bytes or metadata_bytes > store.max_header_bytes then
        perform headwater.refuse_too_large(store, payload_bytes, metadata_bytes);
    end if;
    begin
        perform headwater.lock_lanes(store.id, array[0]);
    exception
        when lock_not_available then
            raise exception 'another transaction has held the event store "%" for 10 seconds', topic
                using errcode = '40001',
                      hint = 'Is a transaction open that has appended? Nobody else can append until it ends.';
    end;

    known := known or exists (
        select from headwater.event_identity d where d.topic_id = store.id and d.event_id = any (event_ids)
    );
    next_offset := headwater.next_store_offset(store.id);
    if cardinality(sizes) > 1 and not known then
        select l.latest, l.certain, l.apart into ahead, certain, apart
        from headwater.look_ahead(store.id, sizes, conditions, types, tags) as l;
    end if;
    for i in 1 .. cardinality(sizes) loop
        first := last + 1;
        last := last + sizes[i];
        verdict := null;
        condition := conditions[i]::jsonb;
        query := condition -> 'query';
        -- An insert may wait as long as nobody could find what it inserts.
        if waiting_from is not null and (known or (query is not null and not apart[i])) then
            perform headwater.insert_appended(
                store.id, places[waiting_from:first - 1], offsets[waiting_from:first - 1],
                event_ids[waiting_from:first - 1], types[waiting_from:first - 1], tags[waiting_from:first - 1],
                payloads[waiting_from:first - 1], content_types[waiting_from:first - 1], metadata[waiting_from:first - 1]
            );
            waiting_from := null;
        end if;
        if known then
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
        end if;
        if query is not null then
            exact := condition ? 'latest';
            seen := coalesce((condition ->> case when exact then 'latest' else 'after' end)::bigint, 0);
            if certain[i] then
                latest := ahead[i];
            else
                latest := headwater.latest_match(
                    store.id, query, case when exact then greatest(seen - 1, 0) else seen end
                );
            end if;
            if latest is distinct from (case when exact then nullif(seen, 0) end) then
                if latest is null then
                    latest := headwater.latest_match(store.id, query, 0);
                end if;
                verdict.moved_to := coalesce(latest, 0);
                return next verdict;
                continue;
            end if;
        end if;
        if not advertised then
            perform headwater.advertise_publisher();
            advertised := true;
        end if;
        for k in first .. last loop
            places[k] := nextval('headwater.position');
            offsets[k] := next_offset;
            next_offset := next_offset + 1;
        end loop;
        verdict.positions := places[first:last];
        waiting_from := coalesce(waiting_from, first);
        return next verdict;
    end loop;
    if waiting_from is not null then
        perform headwater.insert_appended(
            store.id, places[waiting_from:], offsets[waiting_from:], event_ids[waiting_from:], types[waiting_from:],
            tags[waiting_from:], payloads[waiting_from:], content_types[waiting_from:], metadata[waiting_from:]
        );
    end if;
end;
$$;

-- Insert those of these events that have a position, with what they are found by. For `append_group`, which has
-- checked what must be checked and holds the lane.
create or replace function headwater.insert_appended(
    topic_id integer,
    places bigint[],
    offsets bigint[],
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
        r.place, insert_appended.topic_id, r.topic_offset, r.type, r.metadata::jsonb, r.content_type, r.payload,
        r.event_id, r.tags::headwater.event_tags
    from unnest(places, offsets, event_ids, types, tags, payloads, content_types, metadata)
        as r (place, topic_offset, event_id, type, tags, payload, content_type, metadata)
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
    if condition is not null and (
        jsonb_typeof(condition) <> 'object'
        or not condition ? 'query'
        or exists (select from jsonb_object_keys(condition) as k where k not in ('query', 'after', 'latest'))
        or condition ?& array['after', 'latest']
        or jsonb_typeof(coalesce(condition -> 'after', condition -> 'latest')) not in ('number', 'null')
    ) then
        raise exception 'a condition is a JSON object with a query and a position'
            using errcode = 'HW002',
                  hint = 'Write {"query": [...], "after": 17} or {"query": [...], "latest": 17}.';
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
