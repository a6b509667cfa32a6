-- Filters that were stopped, with the group that waits for each; then those that failed on events lately.
select s.group_name, s.filter, s.position, s.stopped_at, s.error, s.expired, s.subscriptions
from headwater.stopped_filter s
where s.subscriptions > 0
order by s.stopped_at;
