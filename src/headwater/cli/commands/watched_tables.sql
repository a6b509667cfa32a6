-- The watched tables, and the topics to which their changes are published.
select
    format('%I.%I', n.nspname, c.relname) as watched,
    -- The first argument of the trigger.
    min(split_part(encode(t.tgargs, 'escape'), '\000', 1)) as topic,
    bool_or(t.tgtype & 4 > 0) as inserts,
    bool_or(t.tgtype & 16 > 0) as updates,
    bool_or(t.tgtype & 8 > 0) as deletes,
    bool_or(t.tgtype & 32 > 0) as truncates
from pg_trigger t
join pg_class c on c.oid = t.tgrelid
join pg_namespace n on n.oid = c.relnamespace
where t.tgname ~ '^headwater_watch(_insert|_update|_delete|_truncate)?$' and not t.tgisinternal and t.tgparentid = 0
group by n.nspname, c.relname
order by 1;
