-- The tables of a publication, and whether each has a replica identity. For a partitioned table, its leaves count.
select
    published.schemaname as schema_name,
    published.tablename as table_name,
    bool_and(
        leaf.relreplident = 'f'
        or (leaf.relreplident = 'i' and exists (
            select from pg_index as key where key.indrelid = leaf.oid and key.indisreplident
        ))
        or (leaf.relreplident = 'd' and exists (
            select from pg_index as key where key.indrelid = leaf.oid and key.indisprimary
        ))
    ) as has_identity
from pg_publication_tables as published
join pg_namespace as namespace on namespace.nspname = published.schemaname
join pg_class as root on root.relnamespace = namespace.oid and root.relname = published.tablename
cross join lateral (
    select root.oid as relid where root.relkind <> 'p'
    union all
    select tree.relid::oid from pg_partition_tree(root.oid) as tree where root.relkind = 'p' and tree.isleaf
) as storage
join pg_class as leaf on leaf.oid = storage.relid
where published.pubname = %(publication)s
group by published.schemaname, published.tablename
order by published.schemaname, published.tablename;
