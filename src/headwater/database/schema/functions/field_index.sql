-- Indexes on fields of the data of an event store: declared and dropped while events are appended.

-- Whether a value has the form that an index is of. (The same in `headwater/field_index.py`.)
create or replace function headwater.is_of_kind(value text, kind text)
returns boolean
language sql
immutable
return case kind
    when 'text' then true
    when 'numeric' then
        value ~ '^[+-]?([0-9]{1,100}(\.[0-9]{0,100})?|\.[0-9]{1,100})([eE][+-]?[0-9]{1,3})?$'
    when 'boolean' then value in ('true', 'false')
    else
        value ~ (
            '^[0-9]{4}-[0-9]{2}-[0-9]{2}([T ][0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]+)?)?(Z|[+-][0-9]{2}(:?[0-9]{2})?)?)?$'
        )
end;

-- Whether a value stands to another as an operator says: as text for = and !=, else as numbers where both are numbers.
create or replace function headwater.value_compares(value text, operator text, other text)
returns boolean
language sql
immutable
return case
    when operator = '=' then value = other
    when operator = '!=' then value <> other
    when headwater.is_of_kind(value, 'numeric') and headwater.is_of_kind(other, 'numeric') then
        case operator
            when '<' then value::numeric < other::numeric
            when '<=' then value::numeric <= other::numeric
            when '>' then value::numeric > other::numeric
            when '>=' then value::numeric >= other::numeric
        end
    else
        case operator
            when '<' then value < other collate "C"
            when '<=' then value <= other collate "C"
            when '>' then value > other collate "C"
            when '>=' then value >= other collate "C"
        end
end;

-- A field of the data as text; null: it is no scalar, or there is none.
create or replace function headwater.field_value(data jsonb, field text)
returns text
language sql
immutable
return case when jsonb_typeof(data -> field) in ('string', 'number', 'boolean') then data ->> field end;

-- The mark of an event with this data, or of an item that asks for these values; null: it is not in the index. That is
-- the same question: if the values that are asked for are in the index, so is every event that has them.
create or replace function headwater.field_mark(
    index_id integer,
    fields text[],
    kinds text[],
    conditions jsonb,
    combine text,
    data jsonb
)
returns text
language plpgsql
immutable
as $$
declare
    value text;
    joined text;
begin
    for i in 1 .. cardinality(fields) loop
        value := headwater.field_value(data, fields[i]);
        if value is null or (kinds[i] <> 'text' and not headwater.is_of_kind(value, kinds[i])) then
            return null;
        end if;
        joined := concat_ws(',', joined, length(value) || ':' || value);
    end loop;
    if conditions <> '[]' and not coalesce((
        select case when combine = 'or' then bool_or(h.held) else bool_and(h.held) end
        from jsonb_array_elements(conditions) as c
        cross join lateral (
            select coalesce(
                headwater.value_compares(headwater.field_value(data, c ->> 'field'), c ->> 'operator', c ->> 'value'),
                false
            ) as held
        ) as h
    ), false) then
        return null;
    end if;
    return '=' || index_id || ':' || md5(joined);
end;
$$;

-- Give events of a store the marks of its indexes. Runs as its owner: whoever publishes may not read what others did.
create or replace function headwater.mark_fields(topic_id integer, positions bigint[])
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    -- Each payload is read once, however many indexes there are.
    with d as materialized (
        select e.topic_id, e.position, headwater.as_json(e.payload, e.content_type) as data
        from headwater.event e
        where e.topic_id = mark_fields.topic_id and e.position = any (positions)
    )
    insert into headwater.event_mark (topic_id, mark, position)
    select d.topic_id, m.mark, d.position
    from d
    join headwater.field_index x on x.topic_id = d.topic_id and not x.dropped
    cross join lateral (
        select headwater.field_mark(x.id, x.fields, x.kinds, x.conditions, x.combine, d.data) as mark
        offset 0
    ) as m
    where m.mark is not null
    on conflict do nothing;
end;
$$;

-- Declare an index. From now on appends write its marks; `fill_field_index` writes those of the events before. One of
-- that name with the same fields is left as it is, with others it is HW002.
create or replace function headwater.create_field_index(
    topic text,
    name text,
    fields text[],
    kinds text[] default null,
    conditions jsonb default '[]',
    combine text default 'and'
)
returns void
language plpgsql
volatile
as $$
declare
    store constant headwater.topic := headwater.find_event_store(topic);
    known headwater.field_index;
begin
    kinds := coalesce(kinds, array_fill('text'::text, array[cardinality(fields)]));
    if jsonb_typeof(conditions) <> 'array' or exists (
        select
        from jsonb_array_elements(conditions) as c
        where
            jsonb_typeof(c) <> 'object' or jsonb_typeof(c -> 'field') is distinct from 'string'
            or jsonb_typeof(c -> 'value') is distinct from 'string'
            or (c ->> 'operator' in ('=', '!=', '<', '<=', '>', '>=')) is not true
    ) then
        raise exception 'conditions of an index are a JSON array'
            using errcode = 'HW002',
                  hint = 'Write [{"field": "amount", "operator": ">=", "value": "100"}]. Operators: = != < <= > >=.';
    end if;
    if cardinality(fields) > (select count(distinct f) from unnest(fields) as f) then
        raise exception 'an index names each field once' using errcode = 'HW002';
    end if;
    -- Whoever appends holds the lane, so that there is a last event without a mark.
    perform headwater.lock_lanes(store.id, array[0]);
    select * into known
    from headwater.field_index x
    where x.topic_id = store.id and x.name = create_field_index.name and not x.dropped;
    if found then
        if (known.fields, known.kinds, known.conditions, known.combine) is distinct from
            (create_field_index.fields, create_field_index.kinds, create_field_index.conditions, create_field_index.combine)
        then
            raise exception 'the index "%" has other fields: %', name, array_to_string(known.fields, ', ')
                using errcode = 'HW002', hint = 'Drop it first, or choose another name.';
        end if;
        return;
    end if;
    insert into headwater.field_index (topic_id, name, fields, kinds, conditions, combine, fill_to)
    values (
        store.id, create_field_index.name, create_field_index.fields, create_field_index.kinds,
        create_field_index.conditions, create_field_index.combine, headwater.event_store_head(topic)
    );
end;
$$;

-- Write the marks of the next events from before the index was declared; returns whether any are left.
create or replace function headwater.fill_field_index(topic text, name text, batch_size integer default 1000)
returns boolean
language plpgsql
volatile
-- As the functions that append: a plan for these very positions is made anew for every batch, and looks at more.
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
    store constant headwater.topic := headwater.find_event_store(topic);
    filling headwater.field_index;
    positions bigint[];
begin
    select * into filling
    from headwater.field_index x
    where x.topic_id = store.id and x.name = fill_field_index.name and not x.dropped
    for update;
    if not found then
        raise exception 'event store "%" has no index "%"', topic, name
            using errcode = 'HW002', hint = 'Create it: headwater.create_field_index().';
    end if;
    if filling.filled_to >= filling.fill_to then
        return false;
    end if;
    positions := array(
        select e.position
        from headwater.event e
        where e.topic_id = store.id and e.position > filling.filled_to and e.position <= filling.fill_to
        order by e.position
        limit batch_size
    );
    perform headwater.mark_fields(store.id, positions);
    update headwater.field_index x
    set filled_to = coalesce(positions[cardinality(positions)], filling.fill_to)
    where x.id = filling.id;
    return true;
end;
$$;

-- Drop an index: nobody uses it from now on, and upkeep clears its marks away. Returns whether there was one.
create or replace function headwater.drop_field_index(topic text, name text)
returns boolean
language plpgsql
volatile
as $$
declare
    store constant headwater.topic := headwater.find_event_store(topic);
begin
    -- Nobody is just writing its marks.
    perform headwater.lock_lanes(store.id, array[0]);
    update headwater.field_index x
    set dropped = true
    where x.topic_id = store.id and x.name = drop_field_index.name and not x.dropped;
    return found;
end;
$$;

-- The indexes of event stores. Until one is ready, queries do without it.
create or replace view headwater.field_index_overview as
select t.name as topic, x.name, x.fields, x.filled_to >= x.fill_to as ready, x.kinds, x.conditions, x.combine
from headwater.field_index x
join headwater.topic t on t.id = x.topic_id
where not x.dropped and t.deleted_at is null;
