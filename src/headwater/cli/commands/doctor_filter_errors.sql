-- Filters that raised an error on an event within the last day; such an event does not match.
select c.expression, c.last_error, c.errors
from headwater_internal.filter c
where
    c.last_error_at > clock_timestamp() - interval '1 day'
    and exists (select from headwater_internal.subscription s where s.filter_id = c.id)
order by c.last_error_at desc
limit 20;
