-- The segments that are ready for the log to grow into, and since when the open one is written to.
select
    count(*) filter (where s.lo > headwater.head()) as ahead,
    max(clock_timestamp() - s.opened_at) filter (where s.closed_at is null and s.opened_at is not null) as open_age
from headwater.segment s;
