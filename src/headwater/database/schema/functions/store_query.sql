-- Queries of an event store: which events match, and reading them.
--
-- A query is a JSON array of items and matches what any of them matches; an empty one matches everything. An item is
-- {"types": [...], "tags": [...], "fields": {...}}: one of the types, all of the tags, and all of the fields, which are
-- top-level scalars of the data compared as text. A part that an item omits is not restricted.

-- Whether the data has the fields of an item. A payload that is not JSON has none.
create or replace function headwater_internal.fields_match(payload bytea, content_type text, fields jsonb)
returns boolean
language plpgsql
immutable
as $$
declare
    data constant jsonb := headwater_internal.as_json(payload, content_type);
begin
    return not exists (
        select
        from jsonb_each_text(fields) as f
        where
            case when jsonb_typeof(data -> f.key) in ('string', 'number', 'boolean') then data ->> f.key end
            is distinct from f.value
    );
end;
$$;

-- The positions between two, both excluded, of the events that one item of a query matches: the first `max_rows`, or
-- with `backwards` the last. It scans the events of the rarest tag, or those of the types if these are rarer, and all
-- events only if there is neither. Long, since each direction needs a query of its own.
create or replace function headwater_internal.item_matches(
    topic_id integer,
    item jsonb,
    above bigint,
    below bigint,
    max_rows bigint,
    backwards boolean
)
returns setof bigint
language plpgsql
stable
as $$
declare
    tags text[] := array(select '#' || t from jsonb_array_elements_text(item -> 'tags') as t);
    types text[] := array(select distinct ':' || t from jsonb_array_elements_text(item -> 'types') as t);
    asked constant jsonb := nullif(item -> 'fields', '{}'::jsonb);
    ways text[];
    types_are_rarer boolean := false;
begin
    if asked is not null then
        -- A field index leads to events as a tag does.
        tags := tags || array(
            select m.index_term
            from headwater_internal.field_index x
            cross join lateral (
                select headwater_internal.field_index_term(x.id, x.fields, x.kinds, x.conditions, x.combine, asked) as index_term
            ) as m
            where
                x.topic_id = item_matches.topic_id and not x.dropped and x.filled_to >= x.fill_to
                and m.index_term is not null
        );
    end if;
    if cardinality(tags) + least(cardinality(types), 1) > 1 then
        -- Counting a few is enough to find which is rare. The types together count as one.
        select
            array_agg(w.index_term order by w.few) filter (where w.index_term not like ':%'),
            coalesce(sum(w.few) filter (where w.index_term like ':%') < min(w.few) filter (where w.index_term not like ':%'), false)
        into tags, types_are_rarer
        from (
            select
                u.index_term,
                (
                    select count(*)
                    from (
                        select
                        from headwater_internal.event_index_term m
                        where
                            m.topic_id = item_matches.topic_id and m.index_term = u.index_term
                            and m.position > above and m.position < below
                        limit 256
                    ) as f
                ) as few
            from (select distinct v as index_term from unnest(tags || types) as v) as u
        ) as w;
    end if;
    if cardinality(tags) > 0 and not types_are_rarer then
        ways := tags[1:1];
        tags := tags[2:];
    elsif cardinality(types) > 0 then
        ways := types;
        types := '{}';
    elsif backwards then
        return query
        select e.position
        from headwater_internal.event e
        where
            e.topic_id = item_matches.topic_id and e.position > above and e.position < below
            and (asked is null or headwater_internal.fields_match(e.payload, e.content_type, asked))
        order by e.position desc
        limit max_rows;
        return;
    else
        return query
        select e.position
        from headwater_internal.event e
        where
            e.topic_id = item_matches.topic_id and e.position > above and e.position < below
            and (asked is null or headwater_internal.fields_match(e.payload, e.content_type, asked))
        order by e.position
        limit max_rows;
        return;
    end if;
    -- The same twice except for the order, which cannot be a parameter.
    if backwards then
        return query
        select f.position
        from unnest(ways) as w (index_term)
        cross join lateral (
            select m.position
            from headwater_internal.event_index_term m
            where
                m.topic_id = item_matches.topic_id and m.index_term = w.index_term
                and m.position > above and m.position < below
                and (cardinality(types) = 0 or exists (
                    select
                    from headwater_internal.event_index_term n
                    where n.topic_id = item_matches.topic_id and n.index_term = any (types) and n.position = m.position
                ))
                and (cardinality(tags) = 0 or not exists (
                    select
                    from unnest(tags) as t (index_term)
                    where not exists (
                        select
                        from headwater_internal.event_index_term n
                        where n.topic_id = item_matches.topic_id and n.index_term = t.index_term and n.position = m.position
                    )
                ))
                and (asked is null or exists (
                    select
                    from headwater_internal.event e
                    where
                        e.topic_id = item_matches.topic_id and e.position = m.position
                        and headwater_internal.fields_match(e.payload, e.content_type, asked)
                ))
            order by m.position desc
            limit max_rows
        ) as f
        order by f.position desc
        limit max_rows;
    else
        return query
        select f.position
        from unnest(ways) as w (index_term)
        cross join lateral (
            select m.position
            from headwater_internal.event_index_term m
            where
                m.topic_id = item_matches.topic_id and m.index_term = w.index_term
                and m.position > above and m.position < below
                and (cardinality(types) = 0 or exists (
                    select
                    from headwater_internal.event_index_term n
                    where n.topic_id = item_matches.topic_id and n.index_term = any (types) and n.position = m.position
                ))
                and (cardinality(tags) = 0 or not exists (
                    select
                    from unnest(tags) as t (index_term)
                    where not exists (
                        select
                        from headwater_internal.event_index_term n
                        where n.topic_id = item_matches.topic_id and n.index_term = t.index_term and n.position = m.position
                    )
                ))
                and (asked is null or exists (
                    select
                    from headwater_internal.event e
                    where
                        e.topic_id = item_matches.topic_id and e.position = m.position
                        and headwater_internal.fields_match(e.payload, e.content_type, asked)
                ))
            order by m.position
            limit max_rows
        ) as f
        order by f.position
        limit max_rows;
    end if;
end;
$$;

-- The position of the latest event above a position that a query matches; null if there is none.
create or replace function headwater_internal.latest_match(topic_id integer, query jsonb, above bigint)
returns bigint
language plpgsql
stable
as $$
declare
    item jsonb;
    found_position bigint;
    latest bigint;
    typed boolean;
    searched boolean;
begin
    for i in 0 .. greatest(jsonb_array_length(query) - 1, 0) loop
        item := coalesce(query -> i, '{}');
        -- An empty list means the same as no list.
        typed := coalesce(jsonb_array_length(item -> 'types'), 0) > 0;
        searched := false;
        if jsonb_array_length(item -> 'tags') = 1 and coalesce(item -> 'fields', '{}') = '{}' then
            -- Nearly every condition has this form, and few events have the tag. If many have it and none of the latest
            -- has a type, searching by type may be faster.
            select m.position into found_position
            from (
                select n.position
                from headwater_internal.event_index_term n
                where
                    n.topic_id = latest_match.topic_id
                    and n.index_term = '#' || (item #>> '{tags,0}')
                    and n.position > greatest(above, latest)
                order by n.position desc
                limit 64
            ) as m
            where
                not typed or exists (
                    select
                    from jsonb_array_elements_text(item -> 'types') as t (type)
                    join headwater_internal.event_index_term n
                        on n.topic_id = latest_match.topic_id and n.index_term = ':' || t.type and n.position = m.position
                )
            order by m.position desc
            limit 1;
            searched := found_position is not null or not typed or not exists (
                select
                from headwater_internal.event_index_term n
                where
                    n.topic_id = latest_match.topic_id
                    and n.index_term = '#' || (item #>> '{tags,0}')
                    and n.position > greatest(above, latest)
                order by n.position desc
                offset 64
                limit 1
            );
        end if;
        if not searched then
            select m into found_position
            from headwater_internal.item_matches(topic_id, item, greatest(above, latest), 9223372036854775807, 1, true) as m;
        end if;
        latest := greatest(latest, found_position);
    end loop;
    return latest;
end;
$$;

-- HW002 for an invalid query.
create or replace function headwater_internal.refuse_bad_query(query jsonb)
returns void
language plpgsql
immutable
as $$
begin
    if query is null then
        return;
    end if;
    if jsonb_typeof(query) <> 'array' or exists (
        select
        from jsonb_array_elements(query) as item
        where
            jsonb_typeof(item) <> 'object'
            or exists (select from jsonb_object_keys(item) as k where k not in ('types', 'tags', 'fields'))
            or jsonb_typeof(item -> 'types') <> 'array'
            or jsonb_typeof(item -> 'tags') <> 'array'
            or jsonb_typeof(item -> 'fields') <> 'object'
            -- A value that no event can have would make a condition always true. (The limits of
            -- `headwater/eventstore/query.py`.)
            or jsonb_path_exists(
                item,
                'strict $.types[*] ? (@.type() != "string" || !(@ like_regex "^.{1,200}$" flag "s"))',
                silent => true
            )
            or jsonb_path_exists(
                item,
                'strict $.tags[*] ? (@.type() != "string" || !(@ like_regex "^.{1,255}$" flag "s"))',
                silent => true
            )
            or jsonb_path_exists(
                item,
                'strict $.fields.* ? (@.type() == "null" || @.type() == "array" || @.type() == "object")',
                silent => true
            )
    ) then
        raise exception 'invalid query: expected a JSON array of items'
            using errcode = 'HW002',
                  hint = 'An item is {"types": [...], "tags": [...], "fields": {...}}, each part optional: '
                      'types and tags are strings, fields are strings, numbers or booleans.';
    end if;
end;
$$;

-- The events of an event store between two positions, both excluded, that a query matches: the first `batch_size`, or
-- with `backwards` the last, newest first; fewer if `max_bytes` is reached, but at least one. With the epoch of the
-- positions, HW021 if the log is in another one. HW004 if the event store does not exist, HW002 for an invalid query.
create or replace function headwater.read_matching(
    topic text,
    query jsonb default '[]',
    after bigint default 0,
    before bigint default 9223372036854775807,
    batch_size integer default 100,
    max_bytes bigint default 16777216,
    backwards boolean default false,
    epoch integer default null
)
returns setof headwater.store_event
language plpgsql
stable
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
as $$
declare
    store constant headwater_internal.topic := headwater_internal.find_event_store(topic);
    turn constant integer := case when backwards then -1 else 1 end;
    found_positions bigint[];
begin
    perform headwater_internal.refuse_bad_query(query);
    if epoch is not null then
        perform headwater_internal.refuse_other_epoch(
            epoch, case when backwards then least(before - 1, headwater.head()) else after end
        );
    end if;
    if batch_size < 1 then
        raise exception 'invalid batch_size: expected at least 1' using errcode = 'HW002';
    end if;
    found_positions := array(
        select distinct turn * m
        from jsonb_array_elements(case when jsonb_array_length(query) = 0 then '[{}]'::jsonb else query end) as item
        cross join lateral headwater_internal.item_matches(store.id, item, after, before, batch_size, backwards) as m
        order by 1
        limit batch_size
    );
    return query
    select
        e.position, e.topic_offset::bigint, e.event_id::text, e.type::text, e.tags, e.headers::jsonb,
        e.content_type::text, e.payload::bytea, e.published_at
    from (
        select
            f.*,
            p.ordinal,
            sum(s.bytes) over (order by p.ordinal rows unbounded preceding) - s.bytes as bytes_before
        from unnest(found_positions) with ordinality as p (turned, ordinal)
        join headwater_internal.event f on f.topic_id = store.id and f.position = turn * p.turned
        cross join lateral (
            -- The size of all parts of the event. (The same in `headwater/eventstore/query.py`.)
            select
                coalesce(octet_length(f.payload), 0) + coalesce(octet_length(f.headers::jsonb::text), 0)
                + coalesce(octet_length(array_to_string(f.tags, '')), 0) + coalesce(octet_length(f.type), 0)
                + coalesce(octet_length(f.event_id), 0) + coalesce(octet_length(f.content_type), 0) as bytes
        ) as s
    ) as e
    where e.bytes_before < max_bytes or e.ordinal = 1
    order by e.ordinal;
end;
$$;

-- The events of an event store at these positions, in order.
create or replace function headwater_internal.read_at(topic text, positions bigint[])
returns setof headwater.store_event
language sql
stable
begin atomic
    select
        e.position, e.topic_offset::bigint, e.event_id::text, e.type::text, e.tags, e.headers::jsonb,
        e.content_type::text, e.payload::bytea, e.published_at
    from headwater_internal.event e
    where e.topic_id = (headwater_internal.find_event_store(topic)).id and e.position = any (positions)
    order by e.position;
end;

-- The number of events of an event store between two positions, both excluded, that a query matches. HW004 if the event
-- store does not exist, HW002 for an invalid query.
create or replace function headwater.count_matching(
    topic text,
    query jsonb default '[]',
    after bigint default 0,
    before bigint default 9223372036854775807
)
returns bigint
language plpgsql
stable
as $$
declare
    store constant headwater_internal.topic := headwater_internal.find_event_store(topic);
begin
    perform headwater_internal.refuse_bad_query(query);
    return (
        select count(distinct m)
        from jsonb_array_elements(case when jsonb_array_length(query) = 0 then '[{}]'::jsonb else query end) as item
        cross join lateral headwater_internal.item_matches(store.id, item, after, before, null, false) as m
    );
end;
$$;

-- For each item of a query, in order, its latest event, with the number of the item, from 1, in `item_number`. Items without
-- a match have no row. HW004 if the event store does not exist, HW002 for an invalid query.
create or replace function headwater.latest_matching(
    topic text,
    query jsonb,
    out item_number bigint,
    out "position" bigint,
    out topic_offset bigint,
    out event_id text,
    out type text,
    out tags text[],
    out metadata jsonb,
    out content_type text,
    out payload bytea,
    out published_at timestamptz
)
returns setof record
language plpgsql
stable
as $$
begin
    perform headwater_internal.refuse_bad_query(query);
    return query
    select i.item_number, e.*
    from jsonb_array_elements(query) with ordinality as i (item, item_number)
    cross join lateral headwater.read_matching(
        topic, jsonb_build_array(i.item), batch_size => 1, backwards => true
    ) as e
    order by i.item_number;
end;
$$;

-- The last position of an event store; 0 if it is empty. HW004 if it does not exist.
create or replace function headwater.event_store_head(topic text)
returns bigint
language sql
stable
return coalesce((
    select e.position
    from headwater_internal.event e
    where e.topic_id = (headwater_internal.find_event_store(topic)).id
    order by e.position desc
    limit 1
), 0);
