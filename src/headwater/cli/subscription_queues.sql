-- The queues of SQL subscriptions and their progress. They have a position instead of a state for each event.
select
    g.name,
    d.position,
    d.topics,
    case when d.leased_until > clock_timestamp() then d.reader end as reader,
    (select count(*) from headwater_internal.subscription s where s.queue_id = g.id) as subscriptions,
    (
        select count(*) from headwater_internal.subscription_retry r where r.queue_id = g.id
    ) as retrying,
    (select count(*) from headwater_internal.dead_letter d where d.queue_id = g.id) as given_up
from headwater_internal.queue g
join headwater_internal.reading d on d.queue_id = g.id
where g.kind = 'subscriptions' and g.name = any (%s::text[])
order by g.name;
