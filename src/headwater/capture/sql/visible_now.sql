-- Which transactions can be seen now.
select pg_current_snapshot()::text;
