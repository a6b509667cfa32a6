-- The columns of the tables of a publication, for users and for schema documents.
select
    published.schemaname::text as schema_name,
    published.tablename::text as table_name,
    published.rowfilter is null as has_all_rows,
    attribute.attname = any (published.attnames) as is_published,
    attribute.attname::text as column_name,
    format_type(base.type_oid, null) as data_type,
    not attribute.attnotnull as is_nullable,
    pg_get_expr(fallback.adbin, fallback.adrelid) as column_default,
    coalesce(attribute.attnum = any (key.indkey::smallint[]), false) as is_key
from pg_publication_tables as published
join pg_namespace as namespace on namespace.nspname = published.schemaname
join pg_class as root on root.relnamespace = namespace.oid and root.relname = published.tablename
join pg_attribute as attribute on attribute.attrelid = root.oid
    and attribute.attnum > 0 and not attribute.attisdropped and attribute.attgenerated = ''
cross join lateral (
    with recursive layer (type_oid) as (
        select attribute.atttypid
        union all
        select type.typbasetype
        from layer
        join pg_type as type on type.oid = layer.type_oid
        where type.typtype = 'd'
    )
    select layer.type_oid
    from layer
    join pg_type as type on type.oid = layer.type_oid and type.typtype <> 'd'
) as base
left join pg_attrdef as fallback on fallback.adrelid = root.oid and fallback.adnum = attribute.attnum
left join pg_index as key on key.indrelid = root.oid and (
    (root.relreplident in ('d', 'f') and key.indisprimary) or (root.relreplident = 'i' and key.indisreplident)
)
where published.pubname = %(publication)s
order by published.schemaname, published.tablename, attribute.attnum;
