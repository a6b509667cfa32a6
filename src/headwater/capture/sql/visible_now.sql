-- The transactions that are visible now.
select pg_current_snapshot()::text;
