-- Log which transactions run, without which a slot cannot let go of the log before them.
select pg_log_standby_snapshot();
