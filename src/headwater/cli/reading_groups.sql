-- The groups that read for subscriptions, and how far they are. They keep a position, not a life for each event.
select
    g.name,
    d.position,
    d.topics,
    case when d.leased_until > clock_timestamp() then d.reader end as reader,
    (select count(*) from headwater.subscription s where s.group_id = g.id) as subscriptions,
    (
        select count(*) from headwater.subscription_retry r where r.group_id = g.id
    ) as retrying,
    (select count(*) from headwater.dead_letter d where d.group_id = g.id) as given_up
from headwater.consumer_group g
join headwater.reading d on d.group_id = g.id
where g.kind = 'cursor' and g.name = any (%s::text[])
order by g.name;
