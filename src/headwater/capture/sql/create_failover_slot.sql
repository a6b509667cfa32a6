-- As create_slot, for Postgres 17 and later: standbys that synchronize slots keep a copy for use after a promotion.
select (created.lsn - '0/0'::pg_lsn)::bigint
from pg_create_logical_replication_slot(%(slot)s, 'pgoutput', failover => true) as created;
