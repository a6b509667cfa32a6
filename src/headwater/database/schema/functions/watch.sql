-- Table events without WAL: a trigger publishes the changes of a table in the transaction that makes them.

-- A trigger for each kind of statement reads all rows of the statement from its transition tables and publishes them in
-- batches. A row trigger is used where that would change what is published, or its order:
--   * partitioned tables and partitions: a statement trigger does not fire for rows written through the other table;
--   * tables with inheritance: the transition tables also hold the rows of children;
--   * tables with other AFTER ROW triggers: what those write to the same table would be published before the statement
--     that caused it.
-- The arguments of both: topic, the columns to include (empty: all), the columns whose change matters (empty: any), the
-- columns of the primary key.

-- The event of one row as JSON, and its key: the primary key as text; for several columns, a JSON array.
create or replace function headwater_internal.table_event(
    op text, table_schema text, table_name text, before jsonb, after jsonb, changed text[], shown text[]
)
returns jsonb
language sql
immutable
return jsonb_build_object(
    'op', op, 'schema', table_schema, 'table', table_name,
    'before', case
        when shown is null then before
        when before is not null then (select jsonb_object_agg(c, before -> c) from unnest(shown) as c)
    end,
    'after', case
        when shown is null then after
        when after is not null then (select jsonb_object_agg(c, after -> c) from unnest(shown) as c)
    end
) || case
    when changed is null then '{}'
    when shown is null then jsonb_build_object('changed', to_jsonb(changed))
    else jsonb_build_object('changed', to_jsonb(array(select c from unnest(changed) as c where c = any (shown))))
end;

-- The key of the event of one row: the primary key as text; for several columns, a JSON array.
create or replace function headwater_internal.table_event_key(image jsonb, key_columns text[])
returns text
language sql
immutable
return case
    when cardinality(key_columns) = 1 then image ->> key_columns[1]
    else (
        select jsonb_agg(image -> k.name order by k.ordinal)::text
        from unnest(key_columns) with ordinality as k (name, ordinal)
    )
end;

-- The payload; HW003 if it exceeds the limit of the topic.
create or replace function headwater_internal.fitting_payload(payload bytea, destination headwater_internal.topic)
returns bytea
language plpgsql
immutable
as $$
begin
    perform headwater_internal.refuse_too_large(destination, octet_length(payload), null);
    return payload;
end;
$$;

-- Publish the changes of one statement, in the order of its rows. The rows of the two transition tables of an update
-- belong together by their order: Postgres appends to both at once. An insert and a delete have one table, of the same
-- name, so that one query serves both. The rows go from there to the log without being collected. One long function,
-- because transition tables are visible only in the trigger function itself.
create or replace function headwater_internal.publish_table_changes()
returns trigger
language plpgsql
-- So that writing to a watched table does not require, or grant, the permission to publish.
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    destination constant headwater_internal.topic := headwater_internal.topic_to_publish(tg_argv[0]);
    topic_id constant integer := destination.id;
    partitions constant integer := destination.partitions;
    keyless constant integer := floor(random() * destination.partitions);
    most_bytes constant integer := destination.max_payload_bytes;
    shown constant text[] := nullif(tg_argv[1], '')::text[];
    watched constant text[] := nullif(tg_argv[2], '')::text[];
    key_columns constant text[] := nullif(tg_argv[3], '')::text[];
    key_size constant integer := coalesce(cardinality(key_columns), 0);
    op constant text := lower(tg_op);
    routing_key constant text := left(tg_table_schema || '.' || tg_table_name || '.' || op, 255);
    -- The beginning of every payload.
    opening constant text := format(
        '{"op": %s, "schema": %s, "table": %s, ',
        to_jsonb(op), to_jsonb(tg_table_schema::text), to_jsonb(tg_table_name::text)
    );
    -- The payload of an insert or a delete around the image of its row.
    before_image constant text :=
        opening || case op when 'insert' then '"before": null, "after": ' else '"before": ' end;
    after_image constant text := case op when 'insert' then '}' else ', "after": null}' end;
    batch record;
    nothing bigint[];
begin
    if destination.kind <> 'open' then
        -- publish_batch() assigns the offsets: up to 1000 rows and about 4 MB at a time.
        for batch in execute
            'select array_agg(p.payload order by p.ordinal) as payloads, array_agg(p.key order by p.ordinal) as keys
            from (
                select
                    e.ordinal, e.payload, e.key,
                    (row_number() over (order by e.ordinal) - 1) / 1000
                        + sum(octet_length(e.payload)) over (order by e.ordinal) / 4000000 as part
                from (
                    select
                        c.ordinal,
                        convert_to(
                            headwater_internal.table_event($1, $2, $3, c.before, c.after, c.changed, $4)::text, ''UTF8''
                        ) as payload,
                        convert_to(headwater_internal.table_event_key(coalesce(c.after, c.before), $6), ''UTF8'') as key
                    from (
                        select
                            r.*,
                            case when r.before is not null and r.after is not null then array(
                                select f.key from jsonb_each(r.after) as f
                                where f.value is distinct from r.before -> f.key
                                order by f.key
                            ) end as changed
                        from (' || case tg_op
                            when 'INSERT' then
                                'select row_number() over () as ordinal, null::jsonb as before, to_jsonb(r) as after
                                from changed_rows r'
                            when 'DELETE' then
                                'select row_number() over () as ordinal, to_jsonb(r) as before, null::jsonb as after
                                from changed_rows r'
                            else
                                'select o.ordinal, o.image as before, n.image as after
                                from (select row_number() over () as ordinal, to_jsonb(r) as image from old_rows r) as o
                                join (select row_number() over () as ordinal, to_jsonb(r) as image from new_rows r) as n
                                    on n.ordinal = o.ordinal'
                        end || ') as r
                    ) as c
                    where c.changed is null or c.changed <> ''{}'' and ($5 is null or c.changed && $5)
                ) as e
            ) as p
            group by p.part
            order by p.part'
            using op, tg_table_schema::text, tg_table_name::text, shown, watched, key_columns
        loop
            nothing := headwater.publish_batch(
                tg_argv[0], batch.payloads, batch.keys,
                array_fill(op, array[cardinality(batch.payloads)]),
                array_fill(routing_key, array[cardinality(batch.payloads)]),
                content_types => array_fill('application/json'::text, array[cardinality(batch.payloads)])
            );
        end loop;
    elsif tg_op <> 'UPDATE' then
        if not exists (select from changed_rows) then
            return null;
        end if;
        perform headwater_internal.advertise_publisher(destination.name);
        insert into headwater_internal.event (position, topic_id, partition, key, type, routing_key, content_type, payload)
        select
            nextval('headwater_internal.position'), topic_id,
            case when partitions = 1 then 0 else headwater_internal.partition_of(e.key, partitions, keyless) end,
            e.key, op, routing_key, 'application/json',
            case
                when octet_length(e.payload) <= most_bytes then e.payload
                else headwater_internal.fitting_payload(e.payload, destination)
            end
        from (
            select
                convert_to(
                    case
                        when key_size = 1 then r.image ->> key_columns[1]
                        when key_size > 1 then headwater_internal.table_event_key(r.image, key_columns)
                    end,
                    'UTF8'
                ) as key,
                convert_to(
                    before_image || case
                        when shown is null then r.image
                        else (select jsonb_object_agg(c, r.image -> c) from unnest(shown) as c)
                    end::text || after_image,
                    'UTF8'
                ) as payload
            from (select to_jsonb(c) as image from changed_rows c offset 0) as r
            offset 0
        ) as e;
    else
        if not exists (select from new_rows) then
            return null;
        end if;
        perform headwater_internal.advertise_publisher(destination.name);
        insert into headwater_internal.event (position, topic_id, partition, key, type, routing_key, content_type, payload)
        select
            nextval('headwater_internal.position'), topic_id,
            case when partitions = 1 then 0 else headwater_internal.partition_of(e.key, partitions, keyless) end,
            e.key, op, routing_key, 'application/json',
            case
                when octet_length(e.payload) <= most_bytes then e.payload
                else headwater_internal.fitting_payload(e.payload, destination)
            end
        from (
            select
                convert_to(
                    case
                        when key_size = 1 then r.after ->> key_columns[1]
                        when key_size > 1 then headwater_internal.table_event_key(r.after, key_columns)
                    end,
                    'UTF8'
                ) as key,
                convert_to(
                    opening || '"before": ' || case
                        when shown is null then r.before
                        else (select jsonb_object_agg(c, r.before -> c) from unnest(shown) as c)
                    end::text || ', "after": ' || case
                        when shown is null then r.after
                        else (select jsonb_object_agg(c, r.after -> c) from unnest(shown) as c)
                    end::text || ', "changed": ' || to_jsonb(case
                        when shown is null then r.changed
                        else array(select c from unnest(r.changed) as c where c = any (shown))
                    end)::text || '}',
                    'UTF8'
                ) as payload
            from (
                select
                    o.ordinal, o.image as before, n.image as after,
                    array(
                        select f.key from jsonb_each(n.image) as f
                        where f.value is distinct from o.image -> f.key
                        order by f.key
                    ) as changed
                from (select row_number() over () as ordinal, to_jsonb(r) as image from old_rows r) as o
                join (select row_number() over () as ordinal, to_jsonb(r) as image from new_rows r) as n
                    on n.ordinal = o.ordinal
                where o.image <> n.image
                order by o.ordinal
                offset 0
            ) as r
            -- An update that changes none of the watched columns is not published.
            where r.changed <> '{}' and (watched is null or r.changed && watched)
            offset 0
        ) as e;
    end if;
    return null;
end;
$$;

-- The same for one row, and for TRUNCATE.
create or replace function headwater_internal.publish_table_change()
returns trigger
language plpgsql
-- So that writing to a watched table does not require, or grant, the permission to publish.
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    topic constant text := tg_argv[0];
    shown constant text[] := nullif(tg_argv[1], '')::text[];
    watched constant text[] := nullif(tg_argv[2], '')::text[];
    key_columns constant text[] := nullif(tg_argv[3], '')::text[];
    before jsonb;
    after jsonb;
    changed text[];
    key jsonb;
begin
    if tg_op = 'TRUNCATE' then
        perform headwater.publish(
            topic,
            jsonb_build_object('op', 'truncate', 'schema', tg_table_schema, 'table', tg_table_name),
            type => 'truncate',
            routing_key => left(tg_table_schema || '.' || tg_table_name || '.truncate', 255)
        );
        return null;
    end if;
    if tg_op <> 'INSERT' then
        before := to_jsonb(old);
    end if;
    if tg_op <> 'DELETE' then
        after := to_jsonb(new);
    end if;
    if tg_op = 'UPDATE' then
        select array_agg(n.key order by n.key) into changed
        from jsonb_each(after) as n
        where n.value is distinct from before -> n.key;
        -- An update that changes none of the watched columns is not published.
        if changed is null or watched is not null and not changed && watched then
            return null;
        end if;
    end if;
    select jsonb_agg(coalesce(after, before) -> c order by p) into key
    from unnest(key_columns) with ordinality as k (c, p);
    if shown is not null then
        select jsonb_object_agg(c, before -> c) filter (where before is not null),
            jsonb_object_agg(c, after -> c) filter (where after is not null)
        into before, after
        from unnest(shown) as c;
        if changed is not null then
            changed := array(select c from unnest(changed) as c where c = any (shown));
        end if;
    end if;
    perform headwater.publish(
        topic,
        jsonb_strip_nulls(jsonb_build_object(
            'op', lower(tg_op), 'schema', tg_table_schema, 'table', tg_table_name
        )) || jsonb_build_object('before', before, 'after', after)
            || case when changed is null then '{}' else jsonb_build_object('changed', to_jsonb(changed)) end,
        key => case jsonb_array_length(key) when 1 then key ->> 0 else key::text end,
        type => lower(tg_op),
        routing_key => left(tg_table_schema || '.' || tg_table_name || '.' || lower(tg_op), 255)
    );
    return null;
end;
$$;

-- Publish the changes of a table: inserts, updates, deletes and truncates, with the row before and after. `columns`:
-- include only these. `when_changed`: publish an update only if one of these changed. The topic, by default
-- `table.<schema>.<table>`, is created if it is missing; its name is returned. Calling it again changes the settings.
-- HW002 if the table cannot be watched, a column does not exist, or nothing is to be watched.
create or replace function headwater.watch_table(
    watched regclass,
    topic text default null,
    inserts boolean default true,
    updates boolean default true,
    deletes boolean default true,
    truncates boolean default true,
    columns text[] default null,
    when_changed text[] default null
)
returns text
language plpgsql
as $$
declare
    source record;
    destination text;
    operations text[];
    operation text;
    by_row boolean;
    key_columns text[];
    unknown text;
begin
    if watched is null then
        raise exception 'table does not exist' using errcode = 'HW002', hint = 'Qualify its name with its schema.';
    end if;
    select n.nspname, c.relname, c.relkind, c.relispartition, c.relhassubclass into source
    from pg_class c join pg_namespace n on n.oid = c.relnamespace
    where c.oid = watched;
    if source.relkind not in ('r', 'p') or source.nspname in ('headwater', 'headwater_internal') then
        raise exception '% cannot be watched: expected an ordinary or partitioned table that is not one of Headwater''s own', watched using errcode = 'HW002';
    end if;
    select c into unknown
    from unnest(columns || when_changed) as c
    where not exists (
        select from pg_attribute a
        where a.attrelid = watched and a.attname = c and a.attnum > 0 and not a.attisdropped
    )
    limit 1;
    if unknown is not null then
        raise exception 'table % has no column "%"', watched, unknown using errcode = 'HW002';
    end if;
    operations := array_remove(array[
        case when inserts then 'insert' end, case when updates then 'update' end, case when deletes then 'delete' end
    ], null);
    if operations = '{}' and not truncates then
        raise exception 'nothing to watch: inserts, updates, deletes and truncates are all off' using errcode = 'HW002';
    end if;
    destination := coalesce(
        watch_table.topic,
        'table.' || regexp_replace(source.nspname || '.' || source.relname, '[^A-Za-z0-9._-]', '_', 'g')
    );
    perform headwater.create_topic(destination, if_missing => true);
    select array_agg(a.attname::text order by k.ordinal) into key_columns
    from pg_index i
    cross join lateral unnest(i.indkey) with ordinality as k (attnum, ordinal)
    join pg_attribute a on a.attrelid = i.indrelid and a.attnum = k.attnum
    where i.indrelid = watched and i.indisprimary;

    perform headwater.unwatch_table(watched);
    by_row := source.relkind = 'p' or source.relispartition or source.relhassubclass
        or exists (select from pg_inherits i where i.inhrelid = watched)
        or exists (
            -- In tgtype, 1 means row trigger, 2 before, 64 instead of.
            select from pg_trigger t
            where t.tgrelid = watched and not t.tgisinternal and t.tgtype & 1 = 1 and t.tgtype & (2 | 64) = 0
        );
    if by_row and operations <> '{}' then
        execute format(
            'create trigger headwater_watch after %s on %s for each row '
            'execute function headwater_internal.publish_table_change(%L, %L, %L, %L)',
            array_to_string(operations, ' or '), watched, destination, coalesce(columns::text, ''),
            coalesce(when_changed::text, ''), coalesce(key_columns::text, '')
        );
    elsif not by_row then
        foreach operation in array operations loop
            execute format(
                'create trigger %I after %s on %s referencing %s for each statement '
                'execute function headwater_internal.publish_table_changes(%L, %L, %L, %L)',
                'headwater_watch_' || operation, operation, watched,
                case operation
                    when 'insert' then 'new table as changed_rows'
                    when 'update' then 'old table as old_rows new table as new_rows'
                    else 'old table as changed_rows'
                end,
                destination, coalesce(columns::text, ''), coalesce(when_changed::text, ''),
                coalesce(key_columns::text, '')
            );
        end loop;
    end if;
    if truncates then
        execute format(
            'create trigger headwater_watch_truncate after truncate on %s for each statement '
            'execute function headwater_internal.publish_table_change(%L, %L, %L, %L)',
            watched, destination, '', '', ''
        );
    end if;
    return destination;
end;
$$;

-- Stop publishing the changes of a table. Returns true if it was watched.
create or replace function headwater.unwatch_table(watched regclass)
returns boolean
language plpgsql
as $$
declare
    was_watched boolean := false;
    watching name;
begin
    for watching in
        select t.tgname from pg_trigger t
        where
            t.tgrelid = watched and not t.tgisinternal
            and t.tgname in (
                'headwater_watch', 'headwater_watch_insert', 'headwater_watch_update', 'headwater_watch_delete',
                'headwater_watch_truncate'
            )
    loop
        execute format('drop trigger %I on %s', watching, watched);
        was_watched := true;
    end loop;
    return was_watched;
end;
$$;
