-- This transaction's snapshot: a name for others to use it, and which transactions it has seen.
select pg_export_snapshot() as name, pg_current_snapshot()::text as visible;
