-- Create a slot that decodes changes with pgoutput from now on.
select (created.lsn - '0/0'::pg_lsn)::bigint from pg_create_logical_replication_slot(%(slot)s, 'pgoutput') as created;
