-- Conditions that were set aside, with the groups that wait for them in vain.
select c.expression, c.last_error, array_agg(distinct g.name order by g.name)
from headwater.condition c
join headwater.subscription s on s.condition_id = c.id
join headwater.consumer_group g on g.id = s.group_id
where c.broken_at is not null
group by c.id
order by c.id;
