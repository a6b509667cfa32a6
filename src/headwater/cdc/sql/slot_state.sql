-- A slot, and how far the server's log is ahead of it. No row if there is no such slot.
select
    slot.plugin,
    slot.database,
    slot.active,
    coalesce(slot.wal_status, '') as wal_status,
    coalesce(slot.confirmed_flush_lsn - '0/0'::pg_lsn, 0)::bigint as confirmed_lsn,
    coalesce(slot.restart_lsn - '0/0'::pg_lsn, 0)::bigint as restart_lsn,
    (pg_current_wal_flush_lsn() - '0/0'::pg_lsn)::bigint as flushed_lsn,
    current_database() as this_database
from pg_replication_slots as slot
where slot.slot_name = %(slot)s;
