-- Acquire, until this connection ends, the right to be the only process that takes a snapshot of a table. Lock tag: see
-- database/schema/functions/locks.sql.
select pg_try_advisory_lock((29299::bigint << 48) | %(oid)s::bigint);
