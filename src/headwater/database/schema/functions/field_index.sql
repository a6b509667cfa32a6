-- Field indexes: indexes on fields of the data of an event store, created and dropped while events are appended.

-- Whether a value has the type of an index. (The same in `headwater/eventstore/field_index.py`.)
create or replace function headwater_internal.is_of_kind(value text, kind text)
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

-- Whether two values satisfy an operator: compared as text for = and !=, otherwise as numbers if both are numbers.
create or replace function headwater_internal.value_compares(value text, operator text, other text)
returns boolean
language sql
immutable
return case
    when operator = '=' then value = other
    when operator = '!=' then value <> other
    when headwater_internal.is_of_kind(value, 'numeric') and headwater_internal.is_of_kind(other, 'numeric') then
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

-- A field of the data as text; null if it is missing or not a scalar.
create or replace function headwater_internal.field_value(data jsonb, field text)
returns text
language sql
immutable
return case when jsonb_typeof(data -> field) in ('string', 'number', 'boolean') then data ->> field end;

-- The index term of an event with this data, or of a query item with these values; null if it is not in the index. Both
-- are the same computation: if the requested values are in the index, so is every event that has them.
create or replace function headwater_internal.field_index_term(
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
        value := headwater_internal.field_value(data, fields[i]);
        if value is null or (kinds[i] <> 'text' and not headwater_internal.is_of_kind(value, kinds[i])) then
            return null;
        end if;
        joined := concat_ws(',', joined, length(value) || ':' || value);
    end loop;
    if conditions <> '[]' and not coalesce((
        select case when combine = 'or' then bool_or(h.held) else bool_and(h.held) end
        from jsonb_array_elements(conditions) as c
        cross join lateral (
            select coalesce(
                headwater_internal.value_compares(headwater_internal.field_value(data, c ->> 'field'), c ->> 'operator', c ->> 'value'),
                false
            ) as held
        ) as h
    ), false) then
        return null;
    end if;
    return '=' || index_id || ':' || md5(joined);
end;
$$;

-- Write the index terms of a store's field indexes for these events. Runs as its owner: a publisher may not read
-- events.
create or replace function headwater_internal.index_fields(topic_id integer, positions bigint[])
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    -- Each payload is parsed once, however many indexes there are.
    with d as materialized (
        select e.topic_id, e.position, headwater_internal.as_json(e.payload, e.content_type) as data
        from headwater_internal.event e
        where e.topic_id = index_fields.topic_id and e.position = any (positions)
    )
    insert into headwater_internal.event_index_term (topic_id, index_term, position)
    select d.topic_id, m.index_term, d.position
    from d
    join headwater_internal.field_index x on x.topic_id = d.topic_id and not x.dropped
    cross join lateral (
        select headwater_internal.field_index_term(x.id, x.fields, x.kinds, x.conditions, x.combine, d.data) as index_term
        offset 0
    ) as m
    where m.index_term is not null
    on conflict do nothing;
end;
$$;

-- Create a field index. From now on appends write its index terms; `fill_field_index` writes those of earlier events.
-- An equal index of that name is left unchanged; a different one is HW002. HW004 if the event store does not exist.
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
    store constant headwater_internal.topic := headwater_internal.find_event_store(topic);
    known headwater_internal.field_index;
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
        raise exception 'invalid conditions of an index: expected a JSON array of objects'
            using errcode = 'HW002',
                  hint = 'Write [{"field": "amount", "operator": ">=", "value": "100"}]. Operators: = != < <= > >=.';
    end if;
    if cardinality(fields) > (select count(distinct f) from unnest(fields) as f) then
        raise exception 'an index must not name a field twice' using errcode = 'HW002';
    end if;
    -- Holding the partition's lock keeps appends out, so that the last event without index terms is known.
    perform headwater_internal.lock_partitions(store.id, array[0]);
    select * into known
    from headwater_internal.field_index x
    where x.topic_id = store.id and x.name = create_field_index.name and not x.dropped;
    if found then
        if (known.fields, known.kinds, known.conditions, known.combine) is distinct from
            (create_field_index.fields, create_field_index.kinds, create_field_index.conditions, create_field_index.combine)
        then
            raise exception 'index "%" already exists and has other fields: %', name, array_to_string(known.fields, ', ')
                using errcode = 'HW002', hint = 'Drop it first, or choose another name.';
        end if;
        return;
    end if;
    insert into headwater_internal.field_index (topic_id, name, fields, kinds, conditions, combine, fill_to)
    values (
        store.id, create_field_index.name, create_field_index.fields, create_field_index.kinds,
        create_field_index.conditions, create_field_index.combine, headwater.event_store_head(topic)
    );
end;
$$;

-- Write the index terms of the next batch of events from before the index was created; returns whether any are left.
-- HW002 if the index does not exist.
create or replace function headwater_internal.fill_field_index(topic text, name text, batch_size integer default 1000)
returns boolean
language plpgsql
volatile
-- As in the functions that append: a plan for the actual positions would be made for every batch, and read more.
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
    store constant headwater_internal.topic := headwater_internal.find_event_store(topic);
    filling headwater_internal.field_index;
    positions bigint[];
begin
    select * into filling
    from headwater_internal.field_index x
    where x.topic_id = store.id and x.name = fill_field_index.name and not x.dropped
    for update;
    if not found then
        raise exception 'event store "%" has no field index "%"', topic, name
            using errcode = 'HW002', hint = 'Create it: headwater.create_field_index().';
    end if;
    if filling.filled_to >= filling.fill_to then
        return false;
    end if;
    positions := array(
        select e.position
        from headwater_internal.event e
        where e.topic_id = store.id and e.position > filling.filled_to and e.position <= filling.fill_to
        order by e.position
        limit batch_size
    );
    perform headwater_internal.index_fields(store.id, positions);
    update headwater_internal.field_index x
    set filled_to = coalesce(positions[cardinality(positions)], filling.fill_to)
    where x.id = filling.id;
    return true;
end;
$$;

-- Drop a field index: queries no longer use it, and maintenance deletes its index terms. Returns whether it existed.
-- HW004 if the event store does not exist.
create or replace function headwater.drop_field_index(topic text, name text)
returns boolean
language plpgsql
volatile
as $$
declare
    store constant headwater_internal.topic := headwater_internal.find_event_store(topic);
begin
    -- Keeps appends out that are writing its index terms.
    perform headwater_internal.lock_partitions(store.id, array[0]);
    update headwater_internal.field_index x
    set dropped = true
    where x.topic_id = store.id and x.name = drop_field_index.name and not x.dropped;
    return found;
end;
$$;

-- The field indexes of event stores. Queries do not use an index until it is ready.
create or replace view headwater.field_index_overview as
select t.name as topic, x.name, x.fields, x.filled_to >= x.fill_to as ready, x.kinds, x.conditions, x.combine
from headwater_internal.field_index x
join headwater_internal.topic t on t.id = x.topic_id
where not x.dropped and t.deleted_at is null;
