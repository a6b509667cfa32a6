-- Rebuilding projections: a second table is filled beside the first, which is then made equal to it at once.

-- Which generation of its tables a pipeline is to write. Each has a checkpoint of its own.
create or replace function headwater.projection_generation(pipeline text)
returns bigint
language sql
stable
begin atomic
    select coalesce(max(p.generation), 0)
    from headwater.projection p
    where p.pipeline = projection_generation.pipeline and p.rebuild_of is null;
end;

-- Begin to build all tables of a pipeline anew, beside the ones that are there. Returns the generation that the rebuild
-- writes. An earlier one that did not end is given up; with `resume` it is gone on with, if there is one.
create or replace function headwater.begin_rebuild(pipeline text, resume boolean default false)
returns bigint
language plpgsql
as $$
declare
    next_generation bigint;
begin
    perform from headwater.projection p
    where p.pipeline = begin_rebuild.pipeline order by p.schema_name, p.table_name for update;
    if not found then
        raise exception 'pipeline "%" keeps no table yet', pipeline
            using errcode = 'HW002', hint = format('Run it first: headwater pipeline run %s', pipeline);
    end if;
    if resume then
        select max(p.generation) into next_generation
        from headwater.projection p
        where p.pipeline = begin_rebuild.pipeline and p.rebuild_of is not null;
        if next_generation is not null then
            return next_generation;
        end if;
    end if;
    perform headwater.abandon_rebuild(pipeline);
    -- Of the same sequence as the generations of checkpoints: it is the number of the rebuild's own.
    next_generation := nextval('headwater.pipeline_generation');
    insert into headwater.projection (schema_name, table_name, pipeline, rebuild_of, generation)
    select p.schema_name, headwater.beside(p.table_name, 'rebuild'), p.pipeline, p.table_name, next_generation
    from headwater.projection p
    where p.pipeline = begin_rebuild.pipeline;
    return next_generation;
end;
$$;

-- Give a rebuild up: its tables go, the others stay as they are. True if there was one.
create or replace function headwater.abandon_rebuild(pipeline text)
returns boolean
language plpgsql
set lock_timeout = '5s'
as $$
declare
    shadow headwater.projection;
    any_there boolean := false;
begin
    for shadow in
        delete from headwater.projection p
        where p.pipeline = abandon_rebuild.pipeline and p.rebuild_of is not null
        returning p.*
    loop
        perform headwater.drop_projection_tables(shadow);
        any_there := true;
    end loop;
    return any_there;
end;
$$;

-- Drop the table of a rebuild, and its staging table, as far as they were made.
create or replace function headwater.drop_projection_tables(shadow headwater.projection)
returns void
language plpgsql
as $$
begin
    if shadow.has_staging then
        execute format(
            'drop table if exists %I.%I', shadow.schema_name, headwater.beside(shadow.table_name, 'staged')
        );
    end if;
    if shadow.columns <> '{}' then
        execute format('drop table if exists %I.%I', shadow.schema_name, shadow.table_name);
    end if;
end;
$$;

-- End a rebuild whose last batch ends at `caught_up_to`, and that found nothing more up to `read_to`: make every table of the pipeline equal to the one that was built,
-- in this one transaction. HW021 in another epoch than the one in which the rebuild began: what it wrote may be lost. Only rows that differ are written, so that readers, grants, indexes and views stay as they
-- are. The pipeline goes on with the rebuild's checkpoint, from where that is; whoever runs it has to claim it anew.
-- Returns how many rows were written and removed.
create or replace function headwater.switch_rebuilt(
    pipeline text,
    generation bigint,
    caught_up_to bigint,
    read_to bigint default null,
    epoch integer default null,
    out written bigint,
    out removed bigint
)
language plpgsql
-- Adding and dropping columns keeps readers out. Rather than have them queue behind us, the caller tries again.
set lock_timeout = '2s'
as $$
declare
    shadow headwater.projection;
    live headwater.projection;
    counted record;
begin
    written := 0;
    removed := 0;
    if switch_rebuilt.epoch <> headwater.current_epoch() then
        perform headwater.refuse_other_epoch(switch_rebuilt.epoch, caught_up_to);
    end if;
    perform from headwater.projection p
    where p.pipeline = switch_rebuilt.pipeline order by p.schema_name, p.table_name for update;
    if headwater.projection_generation(pipeline) = generation then
        -- Done before, and whoever asked did not hear of it.
        return;
    end if;
    if not exists (
        select from headwater.projection p
        where p.pipeline = switch_rebuilt.pipeline and p.rebuild_of is not null and p.generation = switch_rebuilt.generation
    ) then
        raise exception 'pipeline "%" has no rebuild number %', pipeline, generation
            using errcode = 'HW020',
                  detail = json_build_object('pipeline', pipeline)::text,
                  hint = format('Begin again: headwater pipeline rebuild %s', pipeline);
    end if;
    for shadow in
        select p.* from headwater.projection p
        where p.pipeline = switch_rebuilt.pipeline and p.rebuild_of is not null
        order by p.schema_name, p.table_name
    loop
        select p.* into live from headwater.projection p
        where p.schema_name = shadow.schema_name and p.table_name = shadow.rebuild_of;
        if shadow.columns = '{}' then
            raise exception 'the rebuild of %.% came to no batch', live.schema_name, live.table_name
                using errcode = 'HW002', hint = 'There is nothing to build it from. The table is left as it is.';
        elsif live.done_to > greatest(caught_up_to, read_to, shadow.done_to) then
            raise exception 'the rebuild is at %, the table %.% at %',
                greatest(caught_up_to, read_to, shadow.done_to), live.schema_name, live.table_name, live.done_to
                using errcode = 'HW002', hint = 'Let it catch up, then switch.';
        end if;
        perform headwater.reshape_projection(live, shadow);
        select w.written, w.removed into counted
        from headwater.write_projection_rows(
            headwater.table_named(live.schema_name, live.table_name),
            format('select s.*, false as headwater_gone from %I.%I as s', shadow.schema_name, shadow.table_name),
            shadow.columns,
            -- Rows of another key have nothing to be compared by.
            case when live.key_columns = shadow.key_columns then shadow.key_columns else '{}' end,
            'replace'
        ) as w;
        written := written + counted.written;
        removed := removed + counted.removed;
        if live.key_columns <> shadow.key_columns and shadow.key_columns <> '{}' and not exists (
            select from pg_constraint c
            where c.conrelid = headwater.table_named(live.schema_name, live.table_name) and c.contype = 'p'
        ) then
            execute format(
                'alter table %I.%I add primary key (%s)', live.schema_name, live.table_name,
                (select string_agg(format('%I', k), ', ') from unnest(shadow.key_columns) as k)
            );
        end if;
        delete from headwater.projection p
        where p.schema_name = shadow.schema_name and p.table_name = shadow.table_name;
        perform headwater.drop_projection_tables(shadow);
        update headwater.projection p
        set generation = shadow.generation,
            columns = shadow.columns,
            column_types = shadow.column_types,
            key_columns = shadow.key_columns,
            done_to = greatest(caught_up_to, shadow.done_to),
            done_batch = shadow.done_batch,
            done_at = clock_timestamp()
        where p.schema_name = live.schema_name and p.table_name = live.table_name;
    end loop;
    update headwater.pipeline p
    set generation = switch_rebuilt.generation,
        place = caught_up_to,
        token = p.token + 1,
        runner = null,
        leased_until = null
    where p.name = switch_rebuilt.pipeline;
end;
$$;

-- Give a table the columns of what was built for it; those that somebody added stay.
create or replace function headwater.reshape_projection(live headwater.projection, shadow headwater.projection)
returns void
language plpgsql
as $$
declare
    target constant regclass := headwater.table_named(live.schema_name, live.table_name);
    primary_key name;
    changes text;
begin
    if target is null then
        perform headwater.create_projection_table(
            live.schema_name, live.table_name, shadow.columns, shadow.column_types, shadow.key_columns
        );
        return;
    end if;
    if live.key_columns <> shadow.key_columns then
        select c.conname into primary_key from pg_constraint c where c.conrelid = target and c.contype = 'p';
        if primary_key is not null then
            execute format('alter table %s drop constraint %I', target, primary_key);
        end if;
        -- What was the key before may be null now.
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
        raise exception 'the table %.% cannot get its new columns: %', live.schema_name, live.table_name, sqlerrm
            using errcode = 'HW002',
                  hint = 'Drop the views that use the old ones, switch, and make them again; the rebuild is kept.';
end;
$$;

-- Forget the tables of a pipeline that is no more. They stay, with their rows, and are nobody's.
create or replace function headwater.forget_projections(pipeline text)
returns void
language plpgsql
as $$
declare
    forgotten headwater.projection;
begin
    perform headwater.abandon_rebuild(pipeline);
    for forgotten in
        delete from headwater.projection p where p.pipeline = forget_projections.pipeline returning p.*
    loop
        -- Of these only the staging table is ours.
        forgotten.columns := '{}';
        perform headwater.drop_projection_tables(forgotten);
    end loop;
end;
$$;
