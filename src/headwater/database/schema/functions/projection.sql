-- Projections: tables maintained by pipelines. Each batch and its record are written in one transaction.

-- The name of an auxiliary table of a table: its staging table, or the one that a rebuild fills.
create or replace function headwater_internal.beside(name text, purpose text)
returns text
language sql
immutable
return case
    when octet_length(name) + 2 + octet_length(purpose) <= 63 then name || '__' || purpose
    else 'projection_' || md5(name) || '__' || purpose
end;

-- The table of that name; null if it does not exist.
create or replace function headwater_internal.table_named(schema_name text, table_name text)
returns regclass
language sql
stable
return to_regclass(format('%I.%I', schema_name, table_name));

-- Raise HW020: the table belongs to another checkpoint epoch now.
create or replace function headwater_internal.refuse_rebuilt(pipeline text, schema_name text, table_name text)
returns void
language plpgsql
as $$
begin
    raise exception 'table %.% was rebuilt meanwhile, or its rebuild was abandoned', schema_name, table_name
        using errcode = 'HW020',
              detail = json_build_object('pipeline', pipeline, 'table', schema_name || '.' || table_name)::text,
              hint = 'Start the pipeline again: it continues from the current checkpoint.';
end;
$$;

-- Create the table of a projection.
create or replace function headwater_internal.create_projection_table(
    schema_name text, table_name text, columns text[], types text[], key_columns text[]
)
returns void
language plpgsql
as $$
begin
    execute format(
        'create table %I.%I (%s%s)',
        schema_name,
        table_name,
        (select string_agg(format('%I %s', u.c, u.t), ', ' order by u.n)
         from unnest(columns, types) with ordinality as u (c, t, n)),
        (select format(', primary key (%s)', string_agg(format('%I', u.c), ', ' order by u.n))
         from unnest(key_columns) with ordinality as u (c, n)
         having count(*) > 0)
    );
end;
$$;

-- Write rows into a table by `mode`: 'upsert' (insert or update by key), 'append' (insert; rows whose key exists are
-- skipped) or 'replace' (the table is made equal to the rows). `source` is a query with the columns and a boolean
-- headwater_gone, with each key once unless the mode is append. Rows that would not change are not written.
create or replace function headwater_internal.write_projection_rows(
    target regclass,
    source text,
    columns text[],
    key_columns text[],
    mode text,
    out written bigint,
    out removed bigint
)
language plpgsql
as $$
declare
    names text;
    casts text;
    same_key text;
    unchanged text;
    conflict text := '';
    removal text := 'select where false';
begin
    select
        string_agg(format('%I', u.c), ', ' order by u.n),
        string_agg(format('s.%I::%s as %I', u.c, format_type(a.atttypid, a.atttypmod), u.c), ', ' order by u.n),
        string_agg(format('t.%I = r.%I', u.c, u.c), ' and ' order by u.n) filter (where u.c = any (key_columns)),
        format(
            'row(%s) is not distinct from row(%s)',
            string_agg(format('t.%I', u.c), ', ' order by u.n),
            string_agg(format('r.%I', u.c), ', ' order by u.n)
        )
    into names, casts, same_key, unchanged
    from unnest(columns) with ordinality as u (c, n)
    join pg_attribute a on a.attrelid = target and a.attname = u.c and a.attnum > 0 and not a.attisdropped;

    if mode = 'append' then
        unchanged := 'false';
        if same_key is not null then
            conflict := format(
                'on conflict (%s) do nothing', (select string_agg(format('%I', k), ', ') from unnest(key_columns) as k)
            );
        end if;
    elsif same_key is null then
        -- Without a key, rows cannot be compared.
        unchanged := 'false';
        removal := format('delete from %s as t returning 1', target);
    else
        unchanged := format('exists (select from %s as t where %s and %s)', target, same_key, unchanged);
        conflict := format(
            'on conflict (%s) do %s',
            (select string_agg(format('%I', k), ', ') from unnest(key_columns) as k),
            coalesce(
                (select 'update set ' || string_agg(format('%I = excluded.%I', c, c), ', ')
                 from unnest(columns) as c where c <> all (key_columns)),
                'nothing'
            )
        );
        removal := case mode
            when 'replace' then
                format('delete from %s as t where not exists (select from r where %s and not r.headwater_gone) returning 1', target, same_key)
            else
                format('delete from %s as t using r where %s and r.headwater_gone returning 1', target, same_key)
        end;
    end if;
    -- One statement, one snapshot: the keys removed and the keys written are disjoint.
    execute format(
        'with r as (select %s, s.headwater_gone from (%s) as s), '
        'removed as (%s), '
        'written as (insert into %s (%s) select %s from r where not r.headwater_gone and not %s %s returning 1) '
        'select (select count(*) from written), (select count(*) from removed)',
        casts, source, removal, target, names, names, unchanged, conflict
    ) into written, removed;
end;
$$;

-- Prepare a table for rows of this shape: create it, or check that the existing one fits; create its staging table.
-- With `rebuild` it is the table that the current rebuild fills. Returns the state of the projection. HW002 if the
-- table does not fit, HW015 if permissions are missing.
create or replace function headwater_internal.prepare_projection(
    pipeline text,
    schema_name text,
    table_name text,
    checkpoint_epoch bigint,
    rebuild boolean,
    columns text[],
    types text[],
    staged_columns text[],
    staged_types text[],
    key_columns text[]
)
returns headwater_internal.projection
language plpgsql
set lock_timeout = '5s'
as $$
declare
    target_name constant text := case when rebuild then headwater_internal.beside(table_name, 'rebuild') else table_name end;
    staging_name constant text := headwater_internal.beside(target_name, 'staged');
    shown constant text := format('%I.%I', schema_name, target_name);
    rebuild_hint constant text := format('Rebuild it: headwater pipeline rebuild %s', pipeline);
    target regclass;
    kept headwater_internal.projection;
begin
    if to_regnamespace(quote_ident(schema_name)) is null then
        raise exception 'schema "%" does not exist', schema_name
            using errcode = 'HW002', hint = format('Create it: create schema %I', schema_name);
    end if;
    if not rebuild then
        insert into headwater_internal.projection (schema_name, table_name, pipeline)
        values (prepare_projection.schema_name, target_name, prepare_projection.pipeline)
        on conflict on constraint projection_pkey do nothing;
    end if;
    select p.* into kept
    from headwater_internal.projection p
    where p.schema_name = prepare_projection.schema_name and p.table_name = target_name
    for update;
    if not found then
        perform headwater_internal.refuse_rebuilt(pipeline, schema_name, table_name);
    elsif kept.pipeline <> prepare_projection.pipeline then
        raise exception 'table % belongs to the pipeline "%"', shown, kept.pipeline
            using errcode = 'HW002', hint = 'Use another table: a table can belong to only one pipeline.';
    elsif kept.checkpoint_epoch <> prepare_projection.checkpoint_epoch then
        perform headwater_internal.refuse_rebuilt(pipeline, schema_name, table_name);
    end if;

    target := headwater_internal.table_named(schema_name, target_name);
    if kept.columns = '{}' then
        if target is null then
            perform headwater_internal.create_projection_table(schema_name, target_name, columns, types, key_columns);
            target := headwater_internal.table_named(schema_name, target_name);
        elsif rebuild then
            raise exception 'table % exists, but no pipeline created it', shown
                using errcode = 'HW002', hint = 'Rename it: a rebuild needs that name temporarily.';
        else
            perform headwater_internal.refuse_foreign_table(target, columns, key_columns);
        end if;
    else
        if target is null then
            raise exception 'table % of this pipeline does not exist any more', shown
                using errcode = 'HW002', hint = rebuild_hint;
        end if;
        perform headwater_internal.refuse_changed_shape(kept, target, columns, types, key_columns, rebuild_hint);
    end if;

    if headwater_internal.table_named(schema_name, staging_name) is not null then
        if not kept.has_staging then
            raise exception 'table %.% exists, but no pipeline created it', schema_name, staging_name
                using errcode = 'HW002', hint = 'Rename it: the pipeline needs that name for its staging table.';
        end if;
        execute format('drop table %I.%I', schema_name, staging_name);
    end if;
    -- Unlogged: a crash of the server empties it; the merge then counts too few rows, and the batch is run again.
    execute format(
        'create unlogged table %I.%I (headwater_attempt text, headwater_part integer, headwater_row_number bigint%s)',
        schema_name,
        staging_name,
        (select string_agg(format(', %I %s', u.c, u.t), '' order by u.n)
         from unnest(staged_columns, staged_types) with ordinality as u (c, t, n))
    );
    -- A dry run without rows, to check that such rows can be written.
    begin
        perform headwater_internal.write_projection_rows(
            target,
            format('select s.*, false as headwater_gone from %I.%I as s limit 0', schema_name, staging_name),
            columns,
            key_columns,
            case when key_columns = '{}' then 'append' else 'upsert' end
        );
    exception
        when cannot_coerce or undefined_function or datatype_mismatch or invalid_column_reference then
            raise exception 'the rows cannot be written to %: %', shown, sqlerrm
                using errcode = 'HW002', hint = 'Change the table, or cast the columns in the transform.';
    end;

    update headwater_internal.projection p
    set columns = prepare_projection.columns,
        column_types = types,
        key_columns = prepare_projection.key_columns,
        has_staging = true
    where p.schema_name = prepare_projection.schema_name and p.table_name = target_name
    returning p.* into kept;
    return kept;
exception
    when insufficient_privilege then
        raise exception 'role % lacks permissions on the table %: %', current_user, shown, sqlerrm
            using errcode = 'HW015',
                  hint = format(
                      'The role must own the table and be allowed to create tables in its schema: '
                      'grant usage, create on schema %I to %I', schema_name, current_user
                  );
end;
$$;

-- HW002 if the rows of a projection no longer have the columns and the key of its table.
create or replace function headwater_internal.refuse_changed_shape(
    kept headwater_internal.projection, target regclass, columns text[], types text[], key_columns text[], hint text
)
returns void
language plpgsql
as $$
declare
    shown constant text := format('%I.%I', kept.schema_name, kept.table_name);
    missing text;
begin
    if (kept.columns, kept.column_types, kept.key_columns) is distinct from (columns, types, key_columns) then
        raise exception 'table % has the columns (%) and the key (%), but the rows have the columns (%) and the key (%)', shown,
            (select string_agg(c || ' ' || t, ', ') from unnest(kept.columns, kept.column_types) as u (c, t)),
            array_to_string(kept.key_columns, ', '),
            (select string_agg(c || ' ' || t, ', ') from unnest(columns, types) as u (c, t)),
            array_to_string(key_columns, ', ')
            using errcode = 'HW002', hint = refuse_changed_shape.hint;
    end if;
    select string_agg(c, ', ') into missing
    from unnest(columns) as c
    where not exists (
        select from pg_attribute a where a.attrelid = target and a.attname = c and not a.attisdropped
    );
    if missing is not null then
        raise exception 'table % does not have the columns % any more', shown, missing
            using errcode = 'HW002', hint = refuse_changed_shape.hint;
    end if;
end;
$$;

-- HW002 unless a table that no pipeline created has exactly these columns and the key.
create or replace function headwater_internal.refuse_foreign_table(target regclass, columns text[], key_columns text[])
returns void
language plpgsql
as $$
declare
    there constant text[] := array(
        select a.attname::text from pg_attribute a
        where a.attrelid = target and a.attnum > 0 and not a.attisdropped
        order by a.attnum
    );
begin
    if (select c.relkind not in ('r', 'p') from pg_class c where c.oid = target) then
        raise exception '% is not a table', target
            using errcode = 'HW002', hint = 'Name a table, or a name that does not exist yet.';
    end if;
    if not (there <@ columns and columns <@ there) then
        raise exception 'table % has the columns (%), but the rows have (%)',
            target, array_to_string(there, ', '), array_to_string(columns, ', ')
            using errcode = 'HW002', hint = 'Name another table, or one that does not exist yet: it will be created.';
    end if;
    if key_columns <> '{}' and not exists (
        select from pg_index i
        where
            i.indrelid = target and i.indisunique and i.indpred is null and i.indexprs is null
            and array(
                select a.attname::text
                from unnest(i.indkey[0 : i.indnkeyatts - 1]) as k (attnum)
                join pg_attribute a on a.attrelid = target and a.attnum = k.attnum
                order by 1
            ) = array(select k from unnest(key_columns) as k order by 1)
    ) then
        raise exception 'table % has no primary key or unique index on (%)', target, array_to_string(key_columns, ', ')
            using errcode = 'HW002', hint = 'Add one, or use another key.';
    end if;
end;
$$;

-- Merge the staged rows of these attempts into the table and record the batch, atomically. `written` is null if the
-- table already has that batch. `gone` names a boolean column that means "delete this key". `offset_column` holds the
-- offset of each row in the source; rows that the table already has are skipped (`offset_inclusive`: rows at `done_to`
-- itself are still new, as with LSNs). With the epoch in which the batch was read, HW021 if the log has lost events of
-- it. HW016 if staged rows are missing, HW020 if the table was rebuilt.
create or replace function headwater_internal.merge_projection(
    pipeline text,
    schema_name text,
    table_name text,
    checkpoint_epoch bigint,
    rebuild boolean,
    attempts text[],
    expected_rows bigint,
    batch_end bigint,
    batch_number bigint,
    mode text,
    gone text,
    offset_column text,
    offset_inclusive boolean,
    stateful boolean,
    epoch integer default null,
    out written bigint,
    out removed bigint
)
language plpgsql
as $$
declare
    target_name constant text := case when rebuild then headwater_internal.beside(table_name, 'rebuild') else table_name end;
    staging constant regclass := headwater_internal.table_named(schema_name, headwater_internal.beside(target_name, 'staged'));
    kept headwater_internal.projection;
    mine text;
    key_list text;
    offset_order text := '';
    going constant text := case when gone is null then 'false' else format('coalesce(s.%I, false)', gone) end;
    found_rows bigint;
    lacks_key boolean;
begin
    perform headwater_internal.refuse_lost_position(merge_projection.epoch, batch_end);
    select p.* into kept
    from headwater_internal.projection p
    where
        p.schema_name = merge_projection.schema_name
        and p.table_name = target_name
        and p.pipeline = merge_projection.pipeline
        and p.checkpoint_epoch = merge_projection.checkpoint_epoch
    for update;
    if not found or staging is null then
        perform headwater_internal.refuse_rebuilt(pipeline, schema_name, table_name);
    end if;
    if kept.done_to >= batch_end then
        perform headwater_internal.empty_staging(staging, attempts);
        return;
    end if;
    -- Batch numbers restart only with a new checkpoint epoch.
    if kept.done_batch >= batch_number then
        perform headwater_internal.refuse_new_checkpoint(kept, stateful, mode = 'append' and offset_column is null);
    end if;

    mine := format('s.headwater_attempt = any (%L::text[])', attempts);
    execute format('select count(*) from %s as s where %s', staging, mine) into found_rows;
    if found_rows <> expected_rows then
        raise exception '% rows were staged, but only % are left', expected_rows, found_rows
            using errcode = 'HW016',
                  detail = json_build_object('expected', expected_rows, 'found', found_rows)::text,
                  hint = 'Postgres has restarted since, or another runner has written a batch. Run the batch again.';
    end if;
    if offset_column is not null then
        offset_order := format('s.%I desc, ', offset_column);
        if kept.done_to is not null and not stateful then
            mine := format(
                '%s and s.%I %s %s', mine, offset_column, case when offset_inclusive then '>=' else '>' end, kept.done_to
            );
        end if;
    end if;
    if kept.key_columns <> '{}' then
        select string_agg(format('s.%I', k), ', ') into key_list from unnest(kept.key_columns) as k;
        execute format('select exists (select from %s as s where %s and num_nulls(%s) > 0)', staging, mine, key_list)
        into lacks_key;
        if lacks_key then
            raise exception 'a row for %.% has a null in the key (%)', schema_name, table_name, array_to_string(kept.key_columns, ', ')
                using errcode = 'HW002', hint = 'The columns of the key must not be null: exclude such rows with `where`.';
        end if;
    end if;
    select w.written, w.removed into written, removed
    from headwater_internal.write_projection_rows(
        headwater_internal.table_named(schema_name, target_name),
        case
            -- Of several rows of a key, the last one in the source is used.
            when key_list is not null and mode <> 'append' then format(
                'select distinct on (%s) s.*, %s as headwater_gone from %s as s where %s '
                'order by %s, %ss.headwater_part desc, s.headwater_row_number desc',
                key_list, going, staging, mine, key_list, offset_order
            )
            else format(
                'select s.*, false as headwater_gone from %s as s where %s order by s.headwater_part, s.headwater_row_number',
                staging, mine
            )
        end,
        kept.columns, kept.key_columns, mode
    ) as w;
    update headwater_internal.projection p
    set done_to = batch_end, done_batch = batch_number, done_at = clock_timestamp()
    where p.schema_name = merge_projection.schema_name and p.table_name = target_name;
    perform headwater_internal.empty_staging(staging, attempts);
end;
$$;

-- HW002 if a projection cannot continue from a new checkpoint: its state was in the old one, or it cannot tell which
-- rows the table already has.
create or replace function headwater_internal.refuse_new_checkpoint(
    kept headwater_internal.projection, stateful boolean, only_appends boolean
)
returns void
language plpgsql
as $$
declare
    rebuild_hint constant text := format('Rebuild the table: headwater pipeline rebuild %s', kept.pipeline);
begin
    if stateful then
        raise exception 'the state of pipeline "%" was lost with its checkpoint and cannot be restored from the rest of the log', kept.pipeline
            using errcode = 'HW002', hint = rebuild_hint;
    elsif only_appends and kept.key_columns = '{}' then
        raise exception 'with a new checkpoint, pipeline "%" cannot detect which rows the table already has', kept.pipeline
            using errcode = 'HW002',
                  hint = rebuild_hint || '. To avoid this, also select the position, or give the table a key.';
    end if;
end;
$$;

-- Delete staged rows that are no longer needed.
create or replace function headwater_internal.empty_staging(staging regclass, attempts text[])
returns void
language plpgsql
as $$
begin
    execute format('lock table %s in access exclusive mode nowait', staging);
    -- This also removes what crashed tasks have staged. A running task of another runner detects it by the row count.
    execute format('truncate %s', staging);
exception
    when lock_not_available then
        execute format('delete from %s as s where s.headwater_attempt = any ($1)', staging) using attempts;
end;
$$;
