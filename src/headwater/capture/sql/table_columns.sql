-- The columns of a table as pgoutput describes them, and whether their text output equals what it sends.
with recursive base (type_oid, name_oid) as (
    select attribute.atttypid, attribute.atttypid
    from pg_attribute as attribute
    where attribute.attrelid = %(table)s::regclass and attribute.attnum > 0 and not attribute.attisdropped
    union
    select base.type_oid, type.typbasetype
    from base
    join pg_type as type on type.oid = base.name_oid
    where type.typtype = 'd'
)
select
    attribute.attname::text as name,
    attribute.atttypid::bigint as type_oid,
    type.typname::text as type_name,
    attribute.atttypmod as type_modifier,
    coalesce(attribute.attnum = any (key.indkey::smallint[]), false) as is_key,
    -- A cast function may return another text than the output function of the type: for bool, char(n), inet, ...
    exists (
        select from pg_cast as conversion
        where conversion.castsource = type.oid and conversion.casttarget = 'text'::regtype
            and conversion.castmethod = 'f'
    ) as has_other_text
from pg_attribute as attribute
join pg_class as root on root.oid = attribute.attrelid
join base on base.type_oid = attribute.atttypid
join pg_type as type on type.oid = base.name_oid and type.typtype <> 'd'
left join pg_index as key on key.indrelid = root.oid and (
    (root.relreplident in ('d', 'f') and key.indisprimary) or (root.relreplident = 'i' and key.indisreplident)
)
where attribute.attrelid = %(table)s::regclass
    and attribute.attnum > 0
    and not attribute.attisdropped
    and attribute.attgenerated = ''
order by attribute.attnum;
