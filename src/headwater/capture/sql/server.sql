-- Whether this server and this role can capture changes at all.
select
    current_setting('wal_level') as wal_level,
    current_setting('server_version_num')::integer as server_version,
    pg_is_in_recovery() as in_recovery,
    role.rolname as role_name,
    role.rolsuper or role.rolreplication as may_replicate
from pg_roles as role
where role.rolname = current_user;
