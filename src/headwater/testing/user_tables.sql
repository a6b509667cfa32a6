-- The tables of the application, each with the columns that are stored, and those whose values do not depend on sequences,
-- times and chance: without a default that is computed for each row, and without references to such a column.
with stored as (
    select
        c.oid as relation,
        n.nspname,
        c.relname,
        a.attname,
        a.attnum,
        a.attidentity <> '' or exists (
            select from pg_attrdef d
            where
                d.adrelid = c.oid
                and d.adnum = a.attnum
                and pg_get_expr(d.adbin, d.adrelid) ~* ('\m(nextval|now|clock_timestamp|statement_timestamp|'
                    || 'transaction_timestamp|current_[a-z]+|local[a-z]+|gen_random_uuid|uuidv[47]|random)\M')
        ) as computed
    from pg_class c
    join pg_namespace n on n.oid = c.relnamespace
    join pg_attribute a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped and a.attgenerated = ''
    where
        c.relkind in ('r', 'p')
        and not c.relispartition
        and n.nspname not in ('pg_catalog', 'information_schema')
        and n.nspname !~ '^(headwater|pg_temp|pg_toast)'
)
select
    format('%I.%I', s.nspname, s.relname),
    array_agg(quote_ident(s.attname) order by s.attnum),
    coalesce(
        array_agg(quote_ident(s.attname) order by s.attnum) filter (
            where
                not s.computed
                and not exists (
                    select from pg_constraint k
                    join stored r on r.relation = k.confrelid and r.attnum = any(k.confkey) and r.computed
                    where k.contype = 'f' and k.conrelid = s.relation and s.attnum = any(k.conkey)
                )
        ),
        '{}'
    )
from stored s
group by s.relation, s.nspname, s.relname
order by 1
