-- Table events without WAL: what happens to a table is published by a trigger, in the writer's transaction.

-- The trigger. Its arguments: topic, the columns to show (null: all), the columns whose change matters (null: any).
create or replace function headwater.publish_table_change()
returns trigger
language plpgsql
-- Who may write to a watched table may not for that reason publish anything else.
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
        -- An update that changes nothing that is looked at is no event.
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

-- Publish what happens to a table: inserts, updates, deletes and truncates, with images of the row before and after.
-- `columns`: show only these. `when_changed`: an update counts only if one of these changed. The topic is made if it
-- is missing; by default table.<schema>.<table>. Returns its name. Calling it again changes the settings.
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
    operations text;
    key_columns text[];
    unknown text;
begin
    if watched is null then
        raise exception 'there is no such table' using errcode = 'HW002', hint = 'Name it with its schema.';
    end if;
    select n.nspname, c.relname, c.relkind into source
    from pg_class c join pg_namespace n on n.oid = c.relnamespace
    where c.oid = watched;
    if source.relkind not in ('r', 'p') or source.nspname = 'headwater' then
        raise exception '% is not a table that can be watched', watched using errcode = 'HW002';
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
    operations := array_to_string(
        array_remove(array[
            case when inserts then 'insert' end, case when updates then 'update' end, case when deletes then 'delete' end
        ], null),
        ' or '
    );
    if operations = '' and not truncates then
        raise exception 'nothing to watch: inserts, updates, deletes and truncates are all off' using errcode = 'HW002';
    end if;
    destination := coalesce(
        watch_table.topic,
        'table.' || regexp_replace(source.nspname || '.' || source.relname, '[^A-Za-z0-9._-]', '_', 'g')
    );
    perform headwater.create_topic(destination, if_missing => true);
    select array_agg(a.attname::text order by k.place) into key_columns
    from pg_index i
    cross join lateral unnest(i.indkey) with ordinality as k (attnum, place)
    join pg_attribute a on a.attrelid = i.indrelid and a.attnum = k.attnum
    where i.indrelid = watched and i.indisprimary;

    perform headwater.unwatch_table(watched);
    if operations <> '' then
        execute format(
            'create trigger headwater_watch after %s on %s for each row '
            'execute function headwater.publish_table_change(%L, %L, %L, %L)',
            operations, watched, destination, coalesce(columns::text, ''), coalesce(when_changed::text, ''),
            coalesce(key_columns::text, '')
        );
    end if;
    if truncates then
        execute format(
            'create trigger headwater_watch_truncate after truncate on %s for each statement '
            'execute function headwater.publish_table_change(%L, %L, %L, %L)',
            watched, destination, '', '', ''
        );
    end if;
    return destination;
end;
$$;

-- Publish no more of what happens to a table. True if it was watched.
create or replace function headwater.unwatch_table(watched regclass)
returns boolean
language plpgsql
as $$
declare
    was_watched constant boolean := exists (
        select from pg_trigger t where t.tgrelid = watched and t.tgname in ('headwater_watch', 'headwater_watch_truncate')
    );
begin
    if was_watched then
        execute format('drop trigger if exists headwater_watch on %s', watched);
        execute format('drop trigger if exists headwater_watch_truncate on %s', watched);
    end if;
    return was_watched;
end;
$$;
