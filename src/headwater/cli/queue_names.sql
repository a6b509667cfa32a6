-- The queues.
select q.name from headwater_internal.queue q order by q.name limit 10000;
