-- Leases that ran out long ago, and whose events nobody has taken since: no worker of the group is alive.
select g.name, sum(o.events), max(clock_timestamp() - o.ended_at)
from headwater.consumer_group g
cross join lateral (
    select l.events - l.acked_events as events, l.expires_at as ended_at
    from headwater.open_claims(g) l
    union all
    select 1, r.visible_at
    from headwater.redelivery r
    where r.group_id = g.id and r.token is not null
) as o
where g.paused_at is null and o.ended_at < clock_timestamp() - %s::interval
group by g.name
order by g.name;
