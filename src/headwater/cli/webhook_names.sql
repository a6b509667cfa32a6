-- The webhooks.
select w.name from headwater_internal.webhook w order by w.name limit 10000;
