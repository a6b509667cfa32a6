-- A slot, and how far the server's log is ahead of it. No row if there is no such slot.
select
    slot.plugin,
    slot.database,
    slot.active,
    coalesce(slot.wal_status, '') as wal_status,
    slot.confirmed_flush_lsn - '0/0'::pg_lsn as confirmed_lsn,
    slot.restart_lsn - '0/0'::pg_lsn as restart_lsn,
    pg_current_wal_flush_lsn() - '0/0'::pg_lsn as flushed_lsn,
    current_database() as this_database
from pg_replication_slots as slot
where slot.slot_name = %(slot)s;
