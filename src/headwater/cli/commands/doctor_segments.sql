-- The number of segments ready ahead of the head, and the age of the open one.
select
    count(*) filter (where s.lo > headwater.head()) as ahead,
    max(clock_timestamp() - s.opened_at) filter (where s.closed_at is null and s.opened_at is not null) as open_age
from headwater_internal.segment s;
