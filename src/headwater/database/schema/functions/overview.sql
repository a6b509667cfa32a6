-- Overviews for people and tools: single events, what bindings select, leases, the size of the log.

-- The events at these positions, in order, of all topics or of one; none above `up_to`.
create or replace function headwater_internal.events_at(positions bigint[], topics text[] default null, up_to bigint default null)
returns setof headwater.stored_event
language sql
stable
begin atomic
    select
        e.position, t.name, e.partition, e.topic_offset, e.key, e.type, e.routing_key,
        e.headers, e.content_type, e.payload, e.event_id, e.published_at
    from headwater_internal.topic t
    join headwater_internal.event e on e.topic_id = t.id and e.position > t.expired_to
    where
        t.id = any (headwater_internal.topic_ids(events_at.topics))
        and e.position = any (positions)
        and (up_to is null or e.position <= up_to)
    order by e.position;
end;

-- The events that a queue's bindings select after a position, without claiming them: up to `batch_size` positions are
-- examined, up to the stable position of its topics and not above `up_to`. Then one row without an event, whose
-- position is where to continue.
create or replace function headwater_internal.read_bound(
    queue_name text,
    after bigint,
    up_to bigint default null,
    batch_size integer default 1000,
    max_bytes bigint default 16777216
)
returns setof headwater.stored_event
language plpgsql
volatile
as $$
declare
    target constant headwater_internal.queue := headwater_internal.find_bound_queue(queue_name);
    ids constant integer[] := headwater_internal.bound_topics(target.id, after);
    -- A binding to any topic waits for every publisher: a topic may be created at this moment.
    stable_to constant bigint := least(up_to, (headwater_internal.stable_positions(
        null,
        case
            when not exists (select from headwater_internal.binding b where b.queue_id = target.id and b.topic_id is null)
                then ids
        end
    )).stable);
    first_after bigint;
    going_on_at bigint := greatest(after, stable_to);
    bytes bigint := 0;
    one headwater.stored_event;
begin
    select min(f.position) - 1 into first_after
    from unnest(ids) as i (id)
    cross join lateral (
        select e.position
        from headwater_internal.event e
        where e.topic_id = i.id and e.position > after and e.position <= stable_to
        order by e.position
        limit 1
    ) as f;
    if first_after is not null then
        going_on_at := least(stable_to, first_after + batch_size);
        for one in
            select
                e.position, t.name, e.partition, e.topic_offset, e.key, e.type, e.routing_key,
                e.headers, e.content_type, e.payload, e.event_id, e.published_at
            from headwater_internal.bound_events(target.id, ids, first_after + 1, going_on_at) as e
            join headwater_internal.topic t on t.id = e.topic_id and e.position > t.expired_to
            order by e.position
        loop
            return next one;
            bytes := bytes + coalesce(octet_length(one.payload), 0);
            if bytes >= max_bytes then
                going_on_at := one.position;
                exit;
            end if;
        end loop;
    end if;
    -- Checked last, because retention may have run between these statements.
    perform headwater_internal.refuse_expired(ids, after);
    return next (
        going_on_at, null, null, null, null, null, null, null, null, null, null, null
    )::headwater.stored_event;
end;
$$;

-- One row for each queue, of either kind, with its lag. The age is that of the events of its topics, so for a queue
-- that is bound to a part of a topic it is an upper bound.
create or replace view headwater.queue_lag as
select
    o.name,
    o.kind,
    o.state,
    o.paused,
    o.claimed_position as "position",
    o.lag_events,
    o.lag_is_more,
    o.lag_seconds,
    o.processing as leased,
    o.retrying as redeliveries,
    o.dead
from headwater_internal.queue_overviews() as o;

-- The current leases of a queue, and the expired ones whose events were not returned to the queue yet.
create or replace function headwater_internal.leases(queue_name text)
returns table (
    token bigint,
    worker text,
    first_position bigint,
    last_position bigint,
    events bigint,
    expires_at timestamptz
)
language sql
volatile
begin atomic
    select l.token, l.worker, l.lo, l.hi, (l.events - l.acked_events)::bigint, l.expires_at
    from headwater_internal.open_claims(headwater_internal.find_bound_queue(queue_name)) l
    union all
    select r.token, min(r.worker), min(r.position), max(r.position), count(*), max(r.visible_at)
    from headwater_internal.redelivery r
    where r.queue_id = (headwater_internal.find_bound_queue(queue_name)).id and r.token is not null
    group by r.token
    order by 6, 1;
end;

-- The size of the log. The number of events is an estimate from the statistics of Postgres.
create or replace function headwater_internal.log_size(
    out segments bigint, out bytes bigint, out events_estimate bigint, out oldest timestamptz
)
language sql
stable
begin atomic
    select
        (select count(*) from headwater_internal.segment s where s.opened_at is not null),
        coalesce(sum(pg_total_relation_size(c.oid)), 0)::bigint,
        coalesce(sum(greatest(c.reltuples, 0)), 0)::bigint,
        (select min(s.opened_at) from headwater_internal.segment s)
    from pg_catalog.pg_inherits i
    join pg_catalog.pg_class c on c.oid = i.inhrelid
    where i.inhparent = 'headwater_internal.event'::regclass;
end;

-- The contents of a topic, or those up to a position, counted up to 10,000 events.
create or replace function headwater_internal.topic_contents(
    topic text,
    up_to bigint default 281474976710655,
    out events bigint,
    out events_is_more boolean,
    out first_position bigint,
    out last_position bigint
)
language sql
stable
begin atomic
    select least(c.events, 10000), c.events > 10000, f.position, l.position
    from headwater_internal.find_topic(topic_contents.topic) as t
    cross join lateral (
        select count(*) as events
        from (
            select from headwater_internal.event e
            where e.topic_id = t.id and e.position > t.expired_to and e.position <= up_to
            limit 10001
        ) as counted
    ) as c
    left join lateral (
        select e.position
        from headwater_internal.event e
        where e.topic_id = t.id and e.position > t.expired_to and e.position <= up_to
        order by e.position
        limit 1
    ) as f on true
    left join lateral (
        select e.position
        from headwater_internal.event e
        where e.topic_id = t.id and e.position > t.expired_to and e.position <= up_to
        order by e.position desc
        limit 1
    ) as l on true;
end;

-- The number of events after a position, up to another, that a queue's bindings select, counted up to 10,000; with
-- `only_binding`, those that only this binding selects. All of them are between the first and the last position
-- returned; if there are more than are counted, these are the requested bounds.
create or replace function headwater_internal.bound_contents(
    queue_name text,
    after bigint,
    up_to bigint default 281474976710655,
    only_binding integer default null,
    out events bigint,
    out events_is_more boolean,
    out first_position bigint,
    out last_position bigint
)
language sql
stable
begin atomic
    select
        least(c.events, 10000),
        c.events > 10000,
        case when c.events > 10000 then after + 1 else c.first_position end,
        case when c.events > 10000 then least(up_to, headwater.head()) else c.last_position end
    from headwater_internal.find_bound_queue(queue_name) as g
    cross join lateral (select headwater_internal.bound_topics(g.id, after) as ids) as t
    cross join lateral (
        select count(*) as events, min(counted.position) as first_position, max(counted.position) as last_position
        from (
            select e.position
            from headwater_internal.bound_events(g.id, t.ids, after + 1, up_to) as e
            where
                only_binding is null
                or not exists (
                    select
                    from headwater_internal.bound_events_without(
                        g.id, only_binding, array[e.topic_id], e.position, e.position
                    )
                )
            limit 10001
        ) as counted
    ) as c;
end;

-- The remaining work of a queue: unclaimed events, leased events, and events to be retried. The unclaimed ones are
-- counted up to 10,000.
create or replace function headwater_internal.undone_contents(
    queue_name text,
    out events bigint,
    out events_is_more boolean,
    out first_position bigint,
    out last_position bigint
)
language sql
stable
begin atomic
    select sum(p.events)::bigint, bool_or(p.events_is_more), min(p.first_position), max(p.last_position)
    from headwater_internal.find_bound_queue(queue_name) as g
    cross join lateral (
        select n.events, n.events_is_more, n.first_position, n.last_position
        from headwater_internal.bound_contents(queue_name, headwater_internal.claimed_position(g)) as n
        union all
        select count(*), false, min(e.position), max(e.position)
        from headwater_internal.open_claims(g) as l
        cross join lateral headwater_internal.bound_events(
            g.id, headwater_internal.bound_topics(g.id, l.lo - 1), l.lo, l.hi
        ) as e
        where l.acked is null or not e.position <@ l.acked
        union all
        select count(*), false, min(r.position), max(r.position)
        from headwater_internal.redelivery r
        where r.queue_id = g.id
    ) as p;
end;

-- The number of selected dead letters of a queue, and the first and last of their positions.
create or replace function headwater_internal.dead_letter_count(
    queue_name text,
    positions bigint[] default null,
    topic text default null,
    error_like text default null,
    handler text default null,
    subscription_id bigint default null,
    out letters bigint,
    out first_position bigint,
    out last_position bigint
)
language sql
stable
begin atomic
    select count(*), min(d.position), max(d.position)
    from headwater.dead_letters(
        queue_name, dead_letter_count.positions, dead_letter_count.topic, dead_letter_count.error_like, 0, 1000000,
        dead_letter_count.handler, dead_letter_count.subscription_id
    ) as d;
end;

-- Faults that stop publishing or delivery and cannot be seen in the metrics:
--   segment   the table of a segment is missing: events at its positions cannot be published, or are lost
--   register  the recorded stable position is beyond the head: queues would skip the events in between
--   cursor, queue  its position is beyond the head: it gets nothing until the log reaches it
create or replace function headwater_internal.log_faults()
returns table (kind text, name text, "position" bigint, head bigint)
language sql
volatile
security definer
set search_path = pg_catalog, pg_temp
begin atomic
    with log as materialized (select headwater.head() as head)
    select 'segment', 'event_' || lpad((s.lo / headwater_internal.segment_size())::text, 7, '0'), s.lo, l.head
    from headwater_internal.segment s
    cross join log l
    where not exists (
        select
        from pg_catalog.pg_class c
        join pg_catalog.pg_inherits i on i.inhrelid = c.oid and i.inhparent = 'headwater_internal.event'::regclass
        where
            c.relnamespace = 'headwater_internal'::regnamespace
            and c.relname = 'event_' || lpad((s.lo / headwater_internal.segment_size())::text, 7, '0')
    )
    union all
    select 'register', 'stable_register', pg_sequence_last_value('headwater_internal.stable_register'), l.head
    from log l
    where pg_sequence_last_value('headwater_internal.stable_register') > l.head
    union all
    select 'cursor', c.name, c.position, l.head
    from headwater_internal.cursor c
    cross join log l
    where c.position > l.head
    union all
    select 'queue', g.name, f.position, l.head
    from headwater_internal.queue g
    cross join log l
    cross join lateral (
        select
            case g.kind
                when 'bindings' then headwater_internal.claimed_position(g)
                else (select d.position from headwater_internal.reading d where d.queue_id = g.id)
            end as "position"
    ) as f
    where f.position > l.head
    order by 1, 2;
end;
