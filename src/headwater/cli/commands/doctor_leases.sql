-- Leases that expired long ago and whose events were not claimed since: the queue has no running worker.
select g.name, sum(o.events), max(clock_timestamp() - o.ended_at)
from headwater_internal.queue g
cross join lateral (
    select l.events - l.acked_events as events, l.expires_at as ended_at
    from headwater_internal.open_claims(g) l
    union all
    select 1, r.visible_at
    from headwater_internal.redelivery r
    where r.queue_id = g.id and r.token is not null
) as o
where g.paused_at is null and o.ended_at < clock_timestamp() - %s::interval
group by g.name
order by g.name;
