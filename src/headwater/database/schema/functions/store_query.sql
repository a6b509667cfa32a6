-- Queries of an event store: which events match, and reading them.
--
-- A query is a JSON array of items and matches what any of them matches; an empty one matches everything. An item is
-- {"types": [...], "tags": [...], "fields": {...}}: one of the types, all of the tags, and all of the fields, which are
-- top-level scalars of the data compared as text. What an item does not name it does not ask for.

-- Whether the fields of an item are those of the data. What is no JSON has none.
create or replace function headwater.fields_match(payload bytea, content_type text, fields jsonb)
returns boolean
language plpgsql
immutable
as $$
declare
    data constant jsonb := headwater.as_json(payload, content_type);
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
-- with `backwards` the last. It goes through the events of the rarest tag, or of the types
-- if these are rarer, and only without either through all.
create or replace function headwater.item_matches(
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
        -- An index leads to events as a tag does.
        tags := tags || array(
            select m.mark
            from headwater.field_index x
            cross join lateral (
                select headwater.field_mark(x.id, x.fields, x.kinds, x.conditions, x.combine, asked) as mark
            ) as m
            where
                x.topic_id = item_matches.topic_id and not x.dropped and x.filled_to >= x.fill_to
                and m.mark is not null
        );
    end if;
    if cardinality(tags) + least(cardinality(types), 1) > 1 then
        -- Counting a few tells what is rare from what is common. The types together are one way.
        select
            array_agg(w.mark order by w.few) filter (where w.mark not like ':%'),
            coalesce(sum(w.few) filter (where w.mark like ':%') < min(w.few) filter (where w.mark not like ':%'), false)
        into tags, types_are_rarer
        from (
            select
                u.mark,
                (
                    select count(*)
                    from (
                        select
                        from headwater.event_mark m
                        where
                            m.topic_id = item_matches.topic_id and m.mark = u.mark
                            and m.position > above and m.position < below
                        limit 256
                    ) as f
                ) as few
            from (select distinct v as mark from unnest(tags || types) as v) as u
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
        from headwater.event e
        where
            e.topic_id = item_matches.topic_id and e.position > above and e.position < below
            and (asked is null or headwater.fields_match(e.payload, e.content_type, asked))
        order by e.position desc
        limit max_rows;
        return;
    else
        return query
        select e.position
        from headwater.event e
        where
            e.topic_id = item_matches.topic_id and e.position > above and e.position < below
            and (asked is null or headwater.fields_match(e.payload, e.content_type, asked))
        order by e.position
        limit max_rows;
        return;
    end if;
    -- The same twice but for the order, which no parameter can turn round.
    if backwards then
        return query
        select f.position
        from unnest(ways) as w (mark)
        cross join lateral (
            select m.position
            from headwater.event_mark m
            where
                m.topic_id = item_matches.topic_id and m.mark = w.mark
                and m.position > above and m.position < below
                and (cardinality(types) = 0 or exists (
                    select
                    from headwater.event_mark n
                    where n.topic_id = item_matches.topic_id and n.mark = any (types) and n.position = m.position
                ))
                and (cardinality(tags) = 0 or not exists (
                    select
                    from unnest(tags) as t (mark)
                    where not exists (
                        select
                        from headwater.event_mark n
                        where n.topic_id = item_matches.topic_id and n.mark = t.mark and n.position = m.position
                    )
                ))
                and (asked is null or exists (
                    select
                    from headwater.event e
                    where
                        e.topic_id = item_matches.topic_id and e.position = m.position
                        and headwater.fields_match(e.payload, e.content_type, asked)
                ))
            order by m.position desc
            limit max_rows
        ) as f
        order by f.position desc
        limit max_rows;
    else
        return query
        select f.position
        from unnest(ways) as w (mark)
        cross join lateral (
            select m.position
            from headwater.event_mark m
            where
                m.topic_id = item_matches.topic_id and m.mark = w.mark
                and m.position > above and m.position < below
                and (cardinality(types) = 0 or exists (
                    select
                    from headwater.event_mark n
                    where n.topic_id = item_matches.topic_id and n.mark = any (types) and n.position = m.position
                ))
                and (cardinality(tags) = 0 or not exists (
                    select
                    from unnest(tags) as t (mark)
                    where not exists (
                        select
                        from headwater.event_mark n
                        where n.topic_id = item_matches.topic_id and n.mark = t.mark and n.position = m.position
                    )
                ))
                and (asked is null or exists (
                    select
                    from headwater.event e
                    where
                        e.topic_id = item_matches.topic_id and e.position = m.position
                        and headwater.fields_match(e.payload, e.content_type, asked)
                ))
            order by m.position
            limit max_rows
        ) as f
        order by f.position
        limit max_rows;
    end if;
end;
$$;

-- The position of the latest event above a position that a query matches; null: there is none.
create or replace function headwater.latest_match(topic_id integer, query jsonb, above bigint)
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
        -- An empty list asks for as little as none.
        typed := coalesce(jsonb_array_length(item -> 'types'), 0) > 0;
        searched := false;
        if jsonb_array_length(item -> 'tags') = 1 and coalesce(item -> 'fields', '{}') = '{}' then
            -- Nearly every condition is of this shape, and few events have the tag. Where many have it and none of the
            -- last has a type, the types may be the better way.
            select m.position into found_position
            from (
                select n.position
                from headwater.event_mark n
                where
                    n.topic_id = latest_match.topic_id
                    and n.mark = '#' || (item #>> '{tags,0}')
                    and n.position > greatest(above, latest)
                order by n.position desc
                limit 64
            ) as m
            where
                not typed or exists (
                    select
                    from jsonb_array_elements_text(item -> 'types') as t (type)
                    join headwater.event_mark n
                        on n.topic_id = latest_match.topic_id and n.mark = ':' || t.type and n.position = m.position
                )
            order by m.position desc
            limit 1;
            searched := found_position is not null or not typed or not exists (
                select
                from headwater.event_mark n
                where
                    n.topic_id = latest_match.topic_id
                    and n.mark = '#' || (item #>> '{tags,0}')
                    and n.position > greatest(above, latest)
                order by n.position desc
                offset 64
                limit 1
            );
        end if;
        if not searched then
            select m into found_position
            from headwater.item_matches(topic_id, item, greatest(above, latest), 9223372036854775807, 1, true) as m;
        end if;
        latest := greatest(latest, found_position);
    end loop;
    return latest;
end;
$$;

-- Refuse what is no query.
create or replace function headwater.refuse_bad_query(query jsonb)
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
            -- What no event can have would make a condition true for ever. (The limits of `headwater/query.py`.)
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
        raise exception 'a query is a JSON array of items'
            using errcode = 'HW002',
                  hint = 'An item is {"types": [...], "tags": [...], "fields": {...}}, each of them optional: '
                      'types and tags are texts, fields are texts, numbers or booleans.';
    end if;
end;
$$;

-- Events of an event store that a query matches, between two positions, both excluded: the first `batch_size`, or with
-- `backwards` the last, newest first; fewer if they come to `max_bytes`, but one whatever its size. With the epoch that
-- the positions are of, HW021 if the log is in another.
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
    store constant headwater.topic := headwater.find_event_store(topic);
    turn constant integer := case when backwards then -1 else 1 end;
    found_positions bigint[];
begin
    perform headwater.refuse_bad_query(query);
    if epoch is not null then
        perform headwater.refuse_other_epoch(
            epoch, case when backwards then least(before - 1, headwater.head()) else after end
        );
    end if;
    if batch_size < 1 then
        raise exception 'a batch is 1 event or more' using errcode = 'HW002';
    end if;
    found_positions := array(
        select distinct turn * m
        from jsonb_array_elements(case when jsonb_array_length(query) = 0 then '[{}]'::jsonb else query end) as item
        cross join lateral headwater.item_matches(store.id, item, after, before, batch_size, backwards) as m
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
            p.place,
            sum(s.bytes) over (order by p.place rows unbounded preceding) - s.bytes as bytes_before
        from unnest(found_positions) with ordinality as p (turned, place)
        join headwater.event f on f.topic_id = store.id and f.position = turn * p.turned
        cross join lateral (
            -- All of its parts. (The same in `headwater/query.py`.)
            select
                coalesce(octet_length(f.payload), 0) + coalesce(octet_length(f.headers::jsonb::text), 0)
                + coalesce(octet_length(array_to_string(f.tags, '')), 0) + coalesce(octet_length(f.type), 0)
                + coalesce(octet_length(f.event_id), 0) + coalesce(octet_length(f.content_type), 0) as bytes
        ) as s
    ) as e
    where e.bytes_before < max_bytes or e.place = 1
    order by e.place;
end;
$$;

-- The events of an event store at these positions, in order.
create or replace function headwater.read_at(topic text, positions bigint[])
returns setof headwater.store_event
language sql
stable
begin atomic
    select
        e.position, e.topic_offset::bigint, e.event_id::text, e.type::text, e.tags, e.headers::jsonb,
        e.content_type::text, e.payload::bytea, e.published_at
    from headwater.event e
    where e.topic_id = (headwater.find_event_store(topic)).id and e.position = any (positions)
    order by e.position;
end;

-- How many events of an event store a query matches, between two positions, both excluded.
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
    store constant headwater.topic := headwater.find_event_store(topic);
begin
    perform headwater.refuse_bad_query(query);
    return (
        select count(distinct m)
        from jsonb_array_elements(case when jsonb_array_length(query) = 0 then '[{}]'::jsonb else query end) as item
        cross join lateral headwater.item_matches(store.id, item, after, before, null, false) as m
    );
end;
$$;

-- For each item of a query, in order, its latest event, with the item's place from 1 on. Items without one have no row.
create or replace function headwater.latest_matching(
    topic text,
    query jsonb,
    out place bigint,
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
    perform headwater.refuse_bad_query(query);
    return query
    select i.place, e.*
    from jsonb_array_elements(query) with ordinality as i (item, place)
    cross join lateral headwater.read_matching(
        topic, jsonb_build_array(i.item), batch_size => 1, backwards => true
    ) as e
    order by i.place;
end;
$$;

-- The last position of an event store; 0: it is empty.
create or replace function headwater.event_store_head(topic text)
returns bigint
language sql
stable
return coalesce((
    select e.position
    from headwater.event e
    where e.topic_id = (headwater.find_event_store(topic)).id
    order by e.position desc
    limit 1
), 0);
