-- Inactive replication slots: how much WAL each retains, and whether WAL that it needs is lost.
select
    s.slot_name::text,
    coalesce(pg_wal_lsn_diff(pg_current_wal_lsn(), s.restart_lsn), 0)::bigint,
    coalesce(s.wal_status = 'lost', false)
from pg_replication_slots s
where not s.active
order by s.slot_name;
