-- A table by its name.
select root.oid::bigint, namespace.nspname::text, root.relname::text, root.relreplident::text, root.relkind in ('r', 'p')
from pg_class as root
join pg_namespace as namespace on namespace.oid = root.relnamespace
where root.oid = to_regclass(%(table)s);
