-- Assign a transaction id to this transaction: later snapshots list every older transaction that has not ended.
select pg_current_xact_id()::text;
