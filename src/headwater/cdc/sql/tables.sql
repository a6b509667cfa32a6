-- Tables by their names: what they are, and what identifies their rows. Of a partitioned table, its leaves count.
select
    wanted.name as given_name,
    namespace.nspname as schema_name,
    root.relname as table_name,
    root.relkind in ('r', 'p') as is_table,
    root.relpersistence = 'p' as is_permanent,
    coalesce((
        select bool_and(
            leaf.relreplident = 'f'
            or (leaf.relreplident = 'i' and exists (
                select from pg_index as key where key.indrelid = leaf.oid and key.indisreplident
            ))
            or (leaf.relreplident = 'd' and exists (
                select from pg_index as key where key.indrelid = leaf.oid and key.indisprimary
            ))
        )
        from pg_partition_tree(root.oid) as tree
        join pg_class as leaf on leaf.oid = tree.relid
        where tree.isleaf
    ), exists (
        select from pg_index as key where key.indrelid = root.oid and key.indisprimary
    )) as has_identity
from unnest(%(tables)s::text[]) as wanted (name)
left join pg_class as root on root.oid = to_regclass(wanted.name)
left join pg_namespace as namespace on namespace.oid = root.relnamespace;
