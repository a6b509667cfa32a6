-- Advance the slot, so that it releases the WAL below this LSN.
select (advanced.end_lsn - '0/0'::pg_lsn)::bigint
from pg_replication_slot_advance(%(slot)s, '0/0'::pg_lsn + %(lsn)s::numeric) as advanced;
