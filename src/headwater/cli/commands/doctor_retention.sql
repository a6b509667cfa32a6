-- Consumers that keep events beyond the retention of their topics, oldest first. Archives have a separate check.
select
    h.consumer_kind, h.consumer, h.topic, h.held_after, h.oldest_published_at, h.events, h.events_are_more, h.bytes
from headwater.retention_held() as h
where h.consumer_kind <> 'archive';
