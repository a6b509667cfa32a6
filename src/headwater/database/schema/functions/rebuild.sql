-- Rebuilding projections: a second table is filled next to the first, which is then made equal to it in one
-- transaction.

-- The checkpoint epoch of its tables that a pipeline must write. Each has a checkpoint of its own.
create or replace function headwater_internal.projection_epoch(pipeline text)
returns bigint
language sql
stable
begin atomic
    select coalesce(max(p.checkpoint_epoch), 0)
    from headwater_internal.projection p
    where p.pipeline = projection_epoch.pipeline and p.rebuild_of is null;
end;

-- Begin to rebuild all tables of a pipeline, next to the existing ones. Returns the checkpoint epoch of the rebuild. An
-- unfinished rebuild is abandoned; with `resume` it is continued, if there is one. HW002 if the pipeline has no table.
create or replace function headwater_internal.begin_rebuild(pipeline text, resume boolean default false)
returns bigint
language plpgsql
as $$
declare
    next_epoch bigint;
begin
    perform from headwater_internal.projection p
    where p.pipeline = begin_rebuild.pipeline order by p.schema_name, p.table_name for update;
    if not found then
        raise exception 'pipeline "%" has no table yet', pipeline
            using errcode = 'HW002', hint = format('Run it first: headwater pipeline run %s', pipeline);
    end if;
    if resume then
        select max(p.checkpoint_epoch) into next_epoch
        from headwater_internal.projection p
        where p.pipeline = begin_rebuild.pipeline and p.rebuild_of is not null;
        if next_epoch is not null then
            return next_epoch;
        end if;
    end if;
    perform headwater_internal.abandon_rebuild(pipeline);
    -- From the sequence of checkpoint epochs: it is the number of the rebuild's own checkpoint.
    next_epoch := nextval('headwater_internal.checkpoint_epoch');
    insert into headwater_internal.projection (schema_name, table_name, pipeline, rebuild_of, checkpoint_epoch)
    select p.schema_name, headwater_internal.beside(p.table_name, 'rebuild'), p.pipeline, p.table_name, next_epoch
    from headwater_internal.projection p
    where p.pipeline = begin_rebuild.pipeline;
    return next_epoch;
end;
$$;

-- Abandon a rebuild: its tables are dropped, the live ones are not changed. Returns true if there was one.
create or replace function headwater_internal.abandon_rebuild(pipeline text)
returns boolean
language plpgsql
set lock_timeout = '5s'
as $$
declare
    shadow headwater_internal.projection;
    any_there boolean := false;
begin
    for shadow in
        delete from headwater_internal.projection p
        where p.pipeline = abandon_rebuild.pipeline and p.rebuild_of is not null
        returning p.*
    loop
        perform headwater_internal.drop_projection_tables(shadow);
        any_there := true;
    end loop;
    return any_there;
end;
$$;

-- Drop the table of a rebuild and its staging table, if they exist.
create or replace function headwater_internal.drop_projection_tables(shadow headwater_internal.projection)
returns void
language plpgsql
as $$
begin
    if shadow.has_staging then
        execute format(
            'drop table if exists %I.%I', shadow.schema_name, headwater_internal.beside(shadow.table_name, 'staged')
        );
    end if;
    if shadow.columns <> '{}' then
        execute format('drop table if exists %I.%I', shadow.schema_name, shadow.table_name);
    end if;
end;
$$;

-- Finish a rebuild whose last batch ends at `caught_up_to` and that found nothing more up to `read_to`: make every
-- table of the pipeline equal to the rebuilt one, in one transaction. Only rows that differ are written, so readers,
-- grants, indexes and views are not affected. The pipeline continues from the rebuild's checkpoint; a current runner
-- must claim the pipeline again. Returns the number of rows written and removed. HW020 if there is no such rebuild,
-- HW002 if it has not caught up, HW021 if the epoch has changed since the rebuild began: events that it wrote may be
-- lost.
create or replace function headwater_internal.switch_rebuilt(
    pipeline text,
    checkpoint_epoch bigint,
    caught_up_to bigint,
    read_to bigint default null,
    epoch integer default null,
    out written bigint,
    out removed bigint
)
language plpgsql
-- Adding and dropping columns blocks readers. Rather than let them queue up, give up early; the caller retries.
set lock_timeout = '2s'
as $$
declare
    shadow headwater_internal.projection;
    live headwater_internal.projection;
    counted record;
begin
    written := 0;
    removed := 0;
    if switch_rebuilt.epoch <> headwater.current_epoch() then
        perform headwater_internal.refuse_other_epoch(switch_rebuilt.epoch, caught_up_to);
    end if;
    perform from headwater_internal.projection p
    where p.pipeline = switch_rebuilt.pipeline order by p.schema_name, p.table_name for update;
    if headwater_internal.projection_epoch(pipeline) = checkpoint_epoch then
        -- Already done: the caller did not receive the result.
        return;
    end if;
    if not exists (
        select from headwater_internal.projection p
        where p.pipeline = switch_rebuilt.pipeline and p.rebuild_of is not null and p.checkpoint_epoch = switch_rebuilt.checkpoint_epoch
    ) then
        raise exception 'pipeline "%" has no rebuild with checkpoint epoch %', pipeline, checkpoint_epoch
            using errcode = 'HW020',
                  detail = json_build_object('pipeline', pipeline)::text,
                  hint = format('Start again: headwater pipeline rebuild %s', pipeline);
    end if;
    for shadow in
        select p.* from headwater_internal.projection p
        where p.pipeline = switch_rebuilt.pipeline and p.rebuild_of is not null
        order by p.schema_name, p.table_name
    loop
        select p.* into live from headwater_internal.projection p
        where p.schema_name = shadow.schema_name and p.table_name = shadow.rebuild_of;
        if shadow.columns = '{}' then
            raise exception 'the rebuild of %.% has written no batch', live.schema_name, live.table_name
                using errcode = 'HW002', hint = 'There are no events to rebuild it from. The table was not changed.';
        elsif live.done_to > greatest(caught_up_to, read_to, shadow.done_to) then
            raise exception 'the rebuild is at %, but the table %.% is at %',
                greatest(caught_up_to, read_to, shadow.done_to), live.schema_name, live.table_name, live.done_to
                using errcode = 'HW002', hint = 'Wait until the rebuild has caught up, then switch.';
        end if;
        perform headwater_internal.reshape_projection(live, shadow);
        select w.written, w.removed into counted
        from headwater_internal.write_projection_rows(
            headwater_internal.table_named(live.schema_name, live.table_name),
            format('select s.*, false as headwater_gone from %I.%I as s', shadow.schema_name, shadow.table_name),
            shadow.columns,
            -- Rows with another key cannot be compared.
            case when live.key_columns = shadow.key_columns then shadow.key_columns else '{}' end,
            'replace'
        ) as w;
        written := written + counted.written;
        removed := removed + counted.removed;
        if live.key_columns <> shadow.key_columns and shadow.key_columns <> '{}' and not exists (
            select from pg_constraint c
            where c.conrelid = headwater_internal.table_named(live.schema_name, live.table_name) and c.contype = 'p'
        ) then
            execute format(
                'alter table %I.%I add primary key (%s)', live.schema_name, live.table_name,
                (select string_agg(format('%I', k), ', ') from unnest(shadow.key_columns) as k)
            );
        end if;
        delete from headwater_internal.projection p
        where p.schema_name = shadow.schema_name and p.table_name = shadow.table_name;
        perform headwater_internal.drop_projection_tables(shadow);
        update headwater_internal.projection p
        set checkpoint_epoch = shadow.checkpoint_epoch,
            columns = shadow.columns,
            column_types = shadow.column_types,
            key_columns = shadow.key_columns,
            done_to = greatest(caught_up_to, shadow.done_to),
            done_batch = shadow.done_batch,
            done_at = clock_timestamp()
        where p.schema_name = live.schema_name and p.table_name = live.table_name;
    end loop;
    update headwater_internal.pipeline p
    set checkpoint_epoch = switch_rebuilt.checkpoint_epoch,
        checkpoint = caught_up_to,
        token = p.token + 1,
        runner = null,
        leased_until = null
    where p.name = switch_rebuilt.pipeline;
end;
$$;

-- Give a table the columns of the rebuilt one; columns that a user added stay.
create or replace function headwater_internal.reshape_projection(live headwater_internal.projection, shadow headwater_internal.projection)
returns void
language plpgsql
as $$
declare
    target constant regclass := headwater_internal.table_named(live.schema_name, live.table_name);
    primary_key name;
    changes text;
begin
    if target is null then
        perform headwater_internal.create_projection_table(
            live.schema_name, live.table_name, shadow.columns, shadow.column_types, shadow.key_columns
        );
        return;
    end if;
    if live.key_columns <> shadow.key_columns then
        select c.conname into primary_key from pg_constraint c where c.conrelid = target and c.contype = 'p';
        if primary_key is not null then
            execute format('alter table %s drop constraint %I', target, primary_key);
        end if;
        -- The columns of the previous key may be null now.
        select string_agg(format('alter column %I drop not null', k), ', ') into changes
        from unnest(live.key_columns) as k where k = any (shadow.columns);
        if changes is not null then
            execute format('alter table %s %s', target, changes);
        end if;
    end if;
    with before as (
        select u.c, u.t
        from unnest(live.columns, live.column_types) as u (c, t)
        join pg_attribute a on a.attrelid = target and a.attname = u.c and not a.attisdropped
    ),
    after as (select * from unnest(shadow.columns, shadow.column_types) with ordinality as u (c, t, n))
    select string_agg(x.change, ', ' order by x.n) into changes
    from (
        select 0 as n, format('drop column %I', b.c) as change
        from before b where not exists (select from after a where a.c = b.c and a.t = b.t)
        union all
        select a.n, format('add column %I %s', a.c, a.t)
        from after a where not exists (select from before b where a.c = b.c and a.t = b.t)
    ) as x;
    if changes is not null then
        execute format('alter table %s %s', target, changes);
    end if;
exception
    when dependent_objects_still_exist then
        raise exception 'the columns of table %.% cannot be changed: %', live.schema_name, live.table_name, sqlerrm
            using errcode = 'HW002',
                  hint = 'Drop the views that use the old columns, switch again, then recreate the views. The rebuild is kept.';
end;
$$;

-- Forget the tables of a deleted pipeline. The tables stay, with their rows, and belong to no pipeline.
create or replace function headwater_internal.forget_projections(pipeline text)
returns void
language plpgsql
as $$
declare
    forgotten headwater_internal.projection;
begin
    perform headwater_internal.abandon_rebuild(pipeline);
    for forgotten in
        delete from headwater_internal.projection p where p.pipeline = forget_projections.pipeline returning p.*
    loop
        -- The table existed before the pipeline: drop only the staging table.
        forgotten.columns := '{}';
        perform headwater_internal.drop_projection_tables(forgotten);
    end loop;
end;
$$;
