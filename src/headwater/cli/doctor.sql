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
    clock_timestamp() as server_time;
