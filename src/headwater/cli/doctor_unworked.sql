-- For each queue that must not lose: how old the first event is that it still needs.
select g.name, max(clock_timestamp() - e.published_at)
from headwater.consumer_group g
cross join lateral (select headwater.group_low_water(g) as position) as done
cross join lateral unnest(headwater.bound_topics(g.id, done.position)) as t (id)
cross join lateral (
    select o.published_at from headwater.event o
    where o.topic_id = t.id and o.position > done.position
    order by o.position
    limit 1
) as e
where g.must_not_lose and g.kind = 'queue'
group by g.name
order by g.name;
