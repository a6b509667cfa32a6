-- Properties of the server that `headwater doctor` checks before it reads the log.
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
        where r.rolname in ('headwater_filter', 'headwater_filter_owner')
    ) as has_filter_role,
    -- Whether the owner, whose upgrades install filters, may act as the filter roles; null if they do not exist. Since
    -- Postgres 16 a member may lack the SET option, as the creator of a role does.
    (
        select bool_and(pg_has_role(
            n.nspowner, r.oid,
            case when current_setting('server_version_num')::integer >= 160000 then 'set' else 'member' end
        ))
        from pg_namespace n
        cross join pg_roles r
        where n.nspname = 'headwater_internal' and r.rolname in ('headwater_filter', 'headwater_filter_owner')
    ) as owner_may_act,
    (select pg_get_userbyid(n.nspowner) from pg_namespace n where n.nspname = 'headwater') as owner,
    exists (
        select
        from pg_proc p
        join pg_namespace n on n.oid = p.pronamespace
        where n.nspname = 'headwater_filter' and p.proname = 'install'
    ) as takes_filters,
    clock_timestamp() as server_time;
