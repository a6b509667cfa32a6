-- The current LSN of the server.
select (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint;
