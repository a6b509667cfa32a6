-- What `headwater doctor` asks of a server before it asks the log anything.
select
    current_setting('server_version_num')::integer as server_version,
    current_setting('server_version') as server_version_text,
    pg_is_in_recovery() as in_recovery,
    current_setting('wal_level') as wal_level,
    current_setting('default_transaction_isolation') as isolation,
    array(
        select r.name
        from unnest(array['headwater_publisher', 'headwater_consumer', 'headwater_admin']) as r (name)
        where not exists (select from pg_roles p where p.rolname = r.name)
    ) as missing_roles,
    (
        select count(*) = 2 from pg_roles r
        where r.rolname in ('headwater_condition', 'headwater_condition_owner')
    ) as has_condition_role,
    -- Whose upgrades put conditions in place; a role that is not there yet has no members. Since Postgres 16 a member
    -- may lack the right to act as the role, as the one who made it does.
    (
        select bool_and(pg_has_role(
            n.nspowner, r.oid,
            case when current_setting('server_version_num')::integer >= 160000 then 'set' else 'member' end
        ))
        from pg_namespace n
        cross join pg_roles r
        where n.nspname = 'headwater' and r.rolname in ('headwater_condition', 'headwater_condition_owner')
    ) as owner_may_act,
    (select pg_get_userbyid(n.nspowner) from pg_namespace n where n.nspname = 'headwater') as owner,
    exists (
        select
        from pg_proc p
        join pg_namespace n on n.oid = p.pronamespace
        where n.nspname = 'headwater_condition' and p.proname = 'install'
    ) as takes_conditions,
    clock_timestamp() as server_time;
