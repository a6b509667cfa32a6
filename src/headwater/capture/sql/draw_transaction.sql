-- A transaction of our own: snapshots after it list every older one that has not ended.
select pg_current_xact_id()::text;
