-- Replication slots that nobody reads from now: how much WAL each keeps on disk, and whether some that it needs is gone.
select
    s.slot_name::text,
    coalesce(pg_wal_lsn_diff(pg_current_wal_lsn(), s.restart_lsn), 0)::bigint,
    coalesce(s.wal_status = 'lost', false)
from pg_replication_slots s
where not s.active
order by s.slot_name;
