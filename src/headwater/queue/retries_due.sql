-- When the retries of these queues are due, in seconds from now: the first and the last one.
select
    extract(epoch from min(r.due) - clock_timestamp())::float8,
    extract(epoch from max(r.due) - clock_timestamp())::float8
from (
    select r.queue_id, r.visible_at
    from headwater_internal.redelivery r
    where r.visible_at < 'infinity' and r.token is null
    union all
    select r.queue_id, r.due_at from headwater_internal.subscription_retry r
) as r (queue_id, due)
join headwater_internal.queue q on q.id = r.queue_id
where q.name = any(%s)
