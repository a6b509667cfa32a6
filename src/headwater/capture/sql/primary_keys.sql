-- The primary keys of published tables. Messages of a table with replica identity FULL do not contain its key.
select
    published.schemaname as schema_name,
    published.tablename as table_name,
    array_agg(attribute.attname::text order by array_position(key.indkey::smallint[], attribute.attnum)) as columns
from pg_publication_tables as published
join pg_namespace as namespace on namespace.nspname = published.schemaname
join pg_class as root on root.relnamespace = namespace.oid and root.relname = published.tablename
join pg_index as key on key.indrelid = root.oid and key.indisprimary
join pg_attribute as attribute on attribute.attrelid = root.oid and attribute.attnum = any (key.indkey::smallint[])
where published.pubname = %(publication)s
group by published.schemaname, published.tablename;
