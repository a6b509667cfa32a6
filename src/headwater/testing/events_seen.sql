-- All events after a position that a connection sees, its own uncommitted ones included.
select
    e.position, t.name, e.partition, e.topic_offset, e.key, e.type, e.routing_key, e.headers, e.content_type, e.payload,
    e.event_id, e.published_at
from headwater_internal.event e join headwater_internal.topic t on t.id = e.topic_id
where e.position > %s
order by e.position
