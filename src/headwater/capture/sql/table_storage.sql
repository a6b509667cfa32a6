-- The physical tables of a table: itself, or the leaves of its partitions, with their sizes in blocks and about in
-- rows.
select
    leaf_namespace.nspname::text as leaf_schema,
    leaf.relname::text as leaf_table,
    pg_relation_size(leaf.oid) / current_setting('block_size')::bigint as blocks,
    greatest(leaf.reltuples, 0)::bigint as about_rows
from pg_class as root
cross join lateral (
    select root.oid as relid where root.relkind = 'r'
    union all
    select tree.relid::oid from pg_partition_tree(root.oid) as tree where root.relkind = 'p' and tree.isleaf
) as storage
join pg_class as leaf on leaf.oid = storage.relid
join pg_namespace as leaf_namespace on leaf_namespace.oid = leaf.relnamespace
where root.oid = %(table)s::regclass and leaf.relkind = 'r'
order by leaf_namespace.nspname, leaf.relname;
