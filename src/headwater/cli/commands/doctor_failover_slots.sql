-- Slots like those of change capture that standbys do not synchronize, so they are lost after a promotion. Slots read
-- by a walsender belong to subscriptions or other programs. Before Postgres 17 this property does not exist, and no row
-- is returned.
select s.slot_name::text, s.database::text
from pg_replication_slots s
left join pg_stat_activity a on a.pid = s.active_pid
where s.plugin = 'pgoutput'
    and s.database = current_database()
    and not s.temporary
    and a.backend_type is distinct from 'walsender'
    and (to_jsonb(s) ->> 'failover')::boolean = false
order by s.slot_name;
