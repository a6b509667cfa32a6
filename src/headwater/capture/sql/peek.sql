-- The pgoutput messages up to an LSN, without advancing the slot.
select changes.data
from pg_logical_slot_peek_binary_changes(
    {slot}, '0/0'::pg_lsn + {end}::numeric, null, 'proto_version', '1', 'publication_names', {publication}
) as changes
