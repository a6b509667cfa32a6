-- Stopped filters, each with the queue that waits for it.
select s.queue_name, s.filter, s.position, s.stopped_at, s.error, s.expired, s.subscriptions
from headwater.stopped_filter s
where s.subscriptions > 0
order by s.stopped_at;
