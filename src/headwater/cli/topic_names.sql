-- The topics.
select t.name from headwater_internal.topic t where t.deleted_at is null order by t.name limit 10000;
