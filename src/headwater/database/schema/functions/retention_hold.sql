-- Retention holds: which consumer still needs which events. Retention removes no event of a topic above its lowest
-- hold.
--
-- A consumer with holds_retention holds the topics that it reads, and no others: a cursor its topics, a queue those of
-- its bindings, an event that waits for a retry its own, a queue of SQL subscriptions and an archive theirs. A consumer
-- without a list of topics (a binding to any topic, a cursor over the whole log) holds all of them. A queue without
-- bindings, or without holds_retention, holds nothing. Dead letters hold nothing.

-- Every hold: its consumer no longer needs the events at or below `held_after`. A hold without a topic applies to all
-- topics. `of_topic`: only the holds on this topic.
create or replace function headwater_internal.retention_holds(of_topic integer default null)
returns table (consumer_kind text, consumer text, topic_id integer, held_after bigint)
language sql
stable
begin atomic
    with
    queue as materialized (
        select g.id, g.name, g.start_token, headwater_internal.claimed_position(g) as claimed_position
        from headwater_internal.queue g
        where
            g.kind = 'bindings' and g.holds_retention
            and exists (
                select from headwater_internal.binding b
                where b.queue_id = g.id and (of_topic is null or b.topic_id is null or b.topic_id = of_topic)
            )
    ),
    -- Leased events are needed from the first open claim on.
    claimed as (
        select
            q.id, q.name,
            least(
                q.claimed_position,
                (
                    select min(l.lo) - 1
                    from headwater_internal.ledger l
                    where
                        l.queue_id = q.id and not l.settled
                        and l.token > greatest(
                            q.start_token,
                            (select p.settled_token from headwater_internal.queue_progress p where p.queue_id = q.id)
                        )
                )
            ) as position
        from queue q
    )
    select 'cursor', c.name, t.id, c.position
    from headwater_internal.cursor c
    left join lateral unnest(c.topics) as n (name) on true
    left join headwater_internal.topic t on t.name = n.name and t.deleted_at is null
    where
        c.holds_retention and (c.topics is null or t.id is not null)
        and (of_topic is null or t.id is null or t.id = of_topic)
    union all
    select 'queue', q.name, b.topic_id, min(greatest(q.position, b.from_position))
    from claimed q
    join headwater_internal.binding b on b.queue_id = q.id
    where
        (b.to_position is null or b.to_position > q.position)
        and (of_topic is null or b.topic_id is null or b.topic_id = of_topic)
    group by q.name, b.topic_id
    union all
    select 'queue', g.name, r.topic_id, min(r.position) - 1
    from headwater_internal.redelivery r
    join headwater_internal.queue g on g.id = r.queue_id
    where g.holds_retention and (of_topic is null or r.topic_id = of_topic)
    group by g.name, r.topic_id
    union all
    select 'subscription queue', s.name, t.id, s.position
    from (
        select
            g.name, d.topics,
            least(
                d.position,
                (
                    select min(r.position) - 1 from headwater_internal.subscription_retry r
                    where r.queue_id = g.id and r.due_at is not null
                ),
                -- A stopped filter has processed nothing after its position.
                (select min(f.position) from headwater_internal.filter_stop f where f.queue_id = g.id)
            ) as position
        from headwater_internal.queue g
        join headwater_internal.reading d on d.queue_id = g.id
        where g.kind <> 'bindings' and g.holds_retention
    ) as s
    left join lateral unnest(s.topics) as n (name) on true
    left join headwater_internal.topic t on t.name = n.name and t.deleted_at is null
    where
        (s.topics is null or t.id is not null)
        and (of_topic is null or t.id is null or t.id = of_topic)
    union all
    select 'archive', a.name, t.id, a.archived_to
    from headwater_internal.archive a
    left join lateral unnest(a.topics) as n (name) on true
    left join headwater_internal.topic t on t.name = n.name and t.deleted_at is null
    where
        (a.topics is null or t.id is not null)
        and (of_topic is null or t.id is null or t.id = of_topic);
end;

-- The last position up to which retention may remove events of a topic.
create or replace function headwater_internal.releasable_of(topic_id integer)
returns bigint
language sql
volatile
return least(
    headwater.stable_position(),
    (select min(h.held_after) from headwater_internal.retention_holds(releasable_of.topic_id) as h)
);

-- The last position that no consumer needs any more, for all topics.
create or replace function headwater_internal.releasable()
returns bigint
language sql
volatile
return least(headwater.stable_position(), (select min(h.held_after) from headwater_internal.retention_holds() as h));

-- The consumers that keep events beyond the retention of their topic: a row for each consumer and topic, up to `most`.
-- Of the consumers that hold all topics, only the one furthest behind is included. `events` are those that it still
-- needs, counted up to 10,000; `bytes` is the size of their payloads and keys.
create or replace function headwater.retention_held(most integer default 100)
returns table (
    consumer_kind text,
    consumer text,
    topic text,
    held_after bigint,
    oldest_published_at timestamptz,
    events bigint,
    events_are_more boolean,
    bytes bigint
)
language sql
volatile
begin atomic
    with
    holds as materialized (select h.* from headwater_internal.retention_holds() as h),
    of_topics as (
        select h.consumer_kind, h.consumer, h.topic_id, min(h.held_after) as held_after
        from holds h
        where h.topic_id is not null
        group by h.consumer_kind, h.consumer, h.topic_id
        union all
        select o.consumer_kind, o.consumer, t.id, o.held_after
        from (select h.* from holds h where h.topic_id is null order by h.held_after limit 1) as o
        cross join headwater_internal.topic t
        where t.deleted_at is null and t.retention is not null
    ),
    waiting as (
        select h.consumer_kind, h.consumer, t.id, t.name, t.retention, t.expired_to, h.held_after, f.published_at
        from of_topics h
        join headwater_internal.topic t on t.id = h.topic_id and t.retention is not null
        cross join lateral (
            select e.published_at
            from headwater_internal.event e
            where e.topic_id = t.id and e.position > greatest(h.held_after, t.expired_to)
            order by e.position
            limit 1
        ) as f
        where
            t.deleted_at is null and f.published_at < clock_timestamp() - t.retention
            and not exists (select from headwater_internal.kafka_topic k where k.topic_id = t.id and not k.deletes)
        order by f.published_at
        limit most
    )
    select
        w.consumer_kind, w.consumer, w.name, w.held_after, w.published_at,
        least(c.counted, 10000), c.counted > 10000, c.bytes
    from waiting w
    cross join lateral (
        select
            count(*) as counted,
            coalesce(sum(coalesce(octet_length(f.payload), 0) + coalesce(octet_length(f.key), 0)), 0)::bigint as bytes
        from (
            select e.published_at, e.payload, e.key
            from headwater_internal.event e
            where e.topic_id = w.id and e.position > greatest(w.held_after, w.expired_to)
            order by e.position
            limit 10001
        ) as f
        where f.published_at < clock_timestamp() - w.retention
    ) as c
    order by w.published_at;
end;
