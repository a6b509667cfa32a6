-- Log the running transactions; without such a record a slot cannot release the WAL before them.
select pg_log_standby_snapshot();
