-- The right to be the only one that takes a snapshot of a table for others, until this connection ends.
select pg_try_advisory_lock((29299::bigint << 48) | %(oid)s::bigint);
