-- Conditions: SQL expressions of subscribers, checked and run where they can do no harm.
--
-- A condition becomes the body of a SQL function that Postgres can expand into the query that calls it. Only a plain
-- expression without side effects is expanded: a subquery, a sleep, a loop, a write is not, and is refused when it is
-- installed. What is left runs as the role headwater_condition, which owns nothing else and may read nothing else
-- than subscriptions, inside a function that does not let it change its role.

do $do$
declare
    installer constant text := current_user;
begin
    if not exists (select from pg_roles r where r.rolname = 'headwater_condition') then
        begin
            create role headwater_condition nologin;
        exception
            when insufficient_privilege or duplicate_object or unique_violation then null;
        end;
    end if;
    begin
        -- Since Postgres 16 who makes a role is its member, but may not become it.
        if current_setting('server_version_num')::integer >= 160000 then
            if not pg_has_role(installer, 'headwater_condition', 'set') then
                execute format('grant headwater_condition to %I with set true', installer);
            end if;
        elsif not pg_has_role(installer, 'headwater_condition', 'member') then
            execute format('grant headwater_condition to %I', installer);
        end if;
        if not exists (select from pg_namespace n where n.nspname = 'headwater_condition') then
            create schema headwater_condition authorization headwater_condition;
        end if;
        grant usage on schema headwater to headwater_condition;
        grant select on headwater.subscription to headwater_condition;
        set local role headwater_condition;
    exception
        when insufficient_privilege or undefined_object then
            -- Without the role there are no conditions; `headwater doctor` says how to get it.
            return;
    end;

    execute $install$
        -- Check an expression and make it callable; returns the name of its function.
        create or replace function headwater_condition.install(expression text)
        returns text
        language plpgsql
        security definer
        set search_path = pg_catalog, pg_temp
        as $body$
        declare
            name constant text := 'condition_' || left(encode(sha256(convert_to(expression, 'UTF8')), 'hex'), 48);
            probe refcursor;
            plan json;
            refused text;
        begin
            if to_regproc('headwater_condition.' || name) is not null then
                return name;
            end if;
            -- A cursor takes one statement only: nothing can hide behind a semicolon.
            open probe for execute
                'select (' || expression || E'\n) from unnest(array[]::headwater.condition_event[]) as e, '
                'headwater.subscription as s where false';
            close probe;
            execute 'create function headwater_condition.' || name
                || '(e headwater.condition_event, s headwater.subscription) returns boolean language sql stable '
                || 'return (' || expression || E'\n)';
            execute 'explain (verbose, format json) select from unnest(array[]::headwater.condition_event[]) as e, '
                'headwater.subscription as s where headwater_condition.' || name || '(e, s)'
                into plan;
            if strpos(plan::text, name) > 0 then
                raise exception 'a condition is one plain expression over e and s: no subquery, no volatile function'
                    using errcode = 'HW002';
            end if;
            select p.proname into refused
            from pg_proc f
            cross join lateral regexp_matches(f.prosqlbody::text, ':(?:funcid|opfuncid) ([0-9]+)', 'g') as m (ids)
            join pg_proc p on p.oid = m.ids[1]::oid
            where
                f.oid = to_regproc('headwater_condition.' || name)
                and (
                    p.pronamespace <> 'pg_catalog'::regnamespace
                    -- They have no side effects, but look at tables, catalogs or settings.
                    or p.proname ~ '_to_xml|^(pg|has|current|txid|inet|to_reg|(obj|col|shobj)_desc)'
                );
            if refused is not null then
                raise exception 'a condition cannot call %', refused
                    using errcode = 'HW002', hint = 'Only functions of Postgres itself that read nothing.';
            end if;
            if exists (
                select from pg_depend d
                where
                    d.classid = 'pg_proc'::regclass
                    and d.objid = to_regproc('headwater_condition.' || name)
                    and (
                        d.refclassid in ('pg_proc'::regclass, 'pg_operator'::regclass)
                        or d.refclassid = 'pg_class'::regclass and d.refobjid not in (
                            'headwater.subscription'::regclass, (
                                select t.typrelid from pg_type t where t.oid = 'headwater.condition_event'::regtype
                            )
                        )
                    )
            ) then
                raise exception 'a condition can only use e, s and what Postgres itself has' using errcode = 'HW002';
            end if;
            return name;
        end;
        $body$
    $install$;

    execute $match$
        -- The subscriptions of a group with this condition that each event matches.
        create or replace function headwater_condition.match(
            function_name text, events headwater.condition_event[], group_id integer, condition_id integer
        )
        returns setof headwater.condition_match
        language plpgsql
        security definer
        set search_path = pg_catalog, pg_temp
        as $body$
        begin
            return query execute format(
                'select e.position, array_agg(s.id order by s.id) from unnest($1) as e '
                'join headwater.subscription as s on s.group_id = $2 and s.condition_id = $3 '
                'and e.position > s.from_position and headwater_condition.%I(e, s) group by e.position',
                function_name
            ) using events, group_id, condition_id;
        end;
        $body$
    $match$;

    execute $uninstall$
        -- Forget a condition that nobody subscribes to.
        create or replace function headwater_condition.uninstall(function_name text)
        returns void
        language plpgsql
        security definer
        set search_path = pg_catalog, pg_temp
        as $body$
        begin
            execute format('drop function if exists headwater_condition.%I', function_name);
        end;
        $body$
    $uninstall$;

    revoke all on all functions in schema headwater_condition from public;
    execute format('grant usage on schema headwater_condition to %I', installer);
    execute format('grant execute on all functions in schema headwater_condition to %I', installer);
    reset role;
end;
$do$;
