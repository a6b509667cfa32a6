-- Tables by their names: their kind, and whether each has a replica identity. For a partitioned table, its leaves
-- count, or its own key while it has none.
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
        from (
            select root.oid as relid where root.relkind <> 'p'
            union all
            select tree.relid::oid from pg_partition_tree(root.oid) as tree where root.relkind = 'p' and tree.isleaf
        ) as storage
        join pg_class as leaf on leaf.oid = storage.relid
    ), exists (
        select from pg_index as key where key.indrelid = root.oid and key.indisprimary
    )) as has_identity
from unnest(%(tables)s::text[]) as wanted (name)
left join pg_class as root on root.oid = to_regclass(wanted.name)
left join pg_namespace as namespace on namespace.oid = root.relnamespace;
