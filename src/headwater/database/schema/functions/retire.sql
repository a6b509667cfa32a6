-- Functions of earlier versions: kept for one version, for programs that still run, and then dropped.
--
-- Runs after all files that define functions: a function that was not defined in this transaction belongs to an earlier
-- version. One that got further parameters with defaults is dropped at once: the new function accepts the old calls,
-- and with both of them Postgres could not choose.

do $$
declare
    installing constant text := current_setting('headwater.installing', true);
    past record;
begin
    if installing is null or installing = '' then
        return;
    end if;
    for past in
        select
            p.oid::regprocedure::text as signature,
            r.retired_by,
            exists (
                select from pg_proc n
                where
                    n.pronamespace = p.pronamespace and n.proname = p.proname
                    and age(n.xmin) <= age(pg_current_xact_id()::xid)
                    and n.pronargs > p.pronargs and n.pronargs - n.pronargdefaults <= p.pronargs
                    and (p.pronargs = 0 or n.proargtypes::text like p.proargtypes::text || ' %')
            ) as grown
        from pg_proc p
        left join headwater_internal.retired_function r on r.signature = p.oid::regprocedure::text
        where
            p.pronamespace in ('headwater'::regnamespace, 'headwater_internal'::regnamespace)
            -- Older than this transaction; not `<>`, since the upgrade may be part of a larger transaction.
            and age(p.xmin) > age(pg_current_xact_id()::xid)
    loop
        if past.grown then
            execute format('drop function %s', past.signature);
        elsif past.retired_by is null then
            insert into headwater_internal.retired_function (signature, retired_by) values (past.signature, installing);
        elsif past.retired_by <> installing then
            begin
                execute format('drop function %s', past.signature);
            exception
                when dependent_objects_still_exist then
                    raise notice '% belongs to an earlier version and was not dropped: another object depends on it', past.signature;
            end;
        end if;
    end loop;
    delete from headwater_internal.retired_function r
    where
        to_regprocedure(r.signature) is null
        or exists (
            select from pg_proc p
            where p.oid = to_regprocedure(r.signature) and age(p.xmin) <= age(pg_current_xact_id()::xid)
        );
end;
$$;
