-- A fingerprint of the files and columns of a table: it stays the same as long as rows change only by logged changes.
select md5(concat_ws(
    ' ',
    (
        select string_agg(concat(leaf.oid, ':', pg_relation_filenode(leaf.oid)), ' ' order by leaf.oid)
        from pg_class as root
        cross join lateral (
            select root.oid as relid where root.relkind = 'r'
            union all
            select tree.relid::oid from pg_partition_tree(root.oid) as tree where root.relkind = 'p' and tree.isleaf
        ) as storage
        join pg_class as leaf on leaf.oid = storage.relid
        where root.oid = %(table)s::regclass
    ),
    (
        -- A column that was dropped and added again has another number, and other values without any change.
        select string_agg(concat(attnum, ':', attname, ':', atttypid, ':', atttypmod), ' ' order by attnum)
        from pg_attribute
        where attrelid = %(table)s::regclass and attnum > 0 and not attisdropped
    )
)) as fingerprint;
