-- Recent steps back of the database clock that maintenance detected, newest first.
select c.seen_at, c.seconds, c.position
from headwater_internal.clock_step c
where c.seen_at > clock_timestamp() - %s::interval
order by c.id desc
limit 10;
