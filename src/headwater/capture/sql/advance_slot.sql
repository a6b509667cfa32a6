-- Give up what the slot keeps below this place in the server's log.
select (advanced.end_lsn - '0/0'::pg_lsn)::bigint
from pg_replication_slot_advance(%(slot)s, '0/0'::pg_lsn + %(lsn)s::numeric) as advanced;
