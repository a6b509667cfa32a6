-- Export this transaction's snapshot: its name for other sessions, and the transactions that it has seen.
select pg_export_snapshot() as name, pg_current_snapshot()::text as visible;
