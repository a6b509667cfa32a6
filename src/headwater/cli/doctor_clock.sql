-- Steps back of the database clock that upkeep saw lately, the newest first.
select c.seen_at, c.seconds, c.position
from headwater.clock_step c
where c.seen_at > clock_timestamp() - %s::interval
order by c.id desc
limit 10;
