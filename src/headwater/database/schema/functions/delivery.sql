-- The state of every event for every queue, as views.

-- The position up to which a queue needs no events any more.
create or replace function headwater_internal.queue_low_water(target headwater_internal.queue)
returns bigint
language sql
stable
return least(
    case target.kind
        when 'bindings' then headwater_internal.claimed_position(target)
        else (select d.position from headwater_internal.reading d where d.queue_id = target.id)
    end,
    (
        select min(l.lo) - 1 from headwater_internal.ledger l
        where l.queue_id = target.id and not l.settled and l.token > target.start_token
    ),
    (select min(r.position) - 1 from headwater_internal.redelivery r where r.queue_id = target.id),
    (select min(f.position) from headwater_internal.filter_stop f where f.queue_id = target.id),
    (select min(r.position) - 1 from headwater_internal.subscription_retry r where r.queue_id = target.id)
);

-- Every event of every queue with its state, as if each had a row.
create or replace view headwater.delivery as
select
    g.name as queue_name,
    e.position,
    t.name as topic,
    case
        when d.position is not null then 'dead'
        when r.position is not null then
            case when r.token is not null and r.visible_at > clock_timestamp() then 'processing' else 'ready' end
        when e.position > f.claimed_position then 'ready'
        when l.token is not null and l.expires_at > clock_timestamp() then 'processing'
        when l.token is not null then 'ready'
        else 'done'
    end as status,
    coalesce(d.attempts, r.attempt, case when e.position > f.claimed_position then 0 else 1 end) as attempts,
    case when r.token is null then nullif(r.visible_at, 'infinity') end as run_at,
    coalesce(l.expires_at, case when r.token is not null then r.visible_at end) as leased_until,
    coalesce(r.worker, l.worker) as worker,
    coalesce(d.last_error, r.last_error) as last_error
from headwater_internal.queue g
cross join lateral (select headwater_internal.claimed_position(g) as claimed_position) as f
cross join lateral (
    select b.position, b.topic_id
    from headwater_internal.bound_events(
        g.id, headwater_internal.bound_topics(g.id, 0), g.start_position + 1, 281474976710655
    ) as b
    union all
    -- Left over from before a rewind.
    select o.position, o.topic_id from headwater_internal.redelivery o
    where o.queue_id = g.id and o.position <= g.start_position
    union all
    select o.position, o.topic_id from headwater_internal.dead_letter o
    where o.queue_id = g.id and o.position <= g.start_position
) as e
join headwater_internal.topic t on t.id = e.topic_id
left join headwater_internal.redelivery r on r.queue_id = g.id and r.position = e.position
left join headwater_internal.dead_letter d on d.queue_id = g.id and d.position = e.position
left join lateral (
    select o.token, o.expires_at, o.worker
    from headwater_internal.ledger o
    where
        o.queue_id = g.id and o.token > g.start_token and not o.settled
        and e.position between o.lo and o.hi
        and (o.acked is null or not e.position <@ o.acked)
    order by o.token desc
    limit 1
) as l on true;

-- One row for each queue, of all or of those named, ordered by name: its progress, its remaining work, and whether it
-- has workers.
--
-- New events are counted up to `most`; of bindings that select by more than the topic, as many events are examined.
-- Beyond that, `ready_is_more` and `lag_is_more` are true. Everything else is exact.
--
-- The state of a queue:
--   paused      it hands out nothing until it is resumed
--   no_workers  no worker has claimed in the last minute, and there is no lease
--   stalled     workers claim and events wait for more than a minute, but none is handed out: there has been no lease
--               for the duration of a lease
--   running     anything else
-- A queue of SQL subscriptions is running while a reader holds it, and no_reader otherwise. One long function: it
-- computes the topic ends once for all queues.
create or replace function headwater_internal.queue_overviews(
    names text[] default null,
    most integer default 1000,
    max_queues integer default null
)
returns table (
    name               text,
    kind               text,
    state              text,
    paused             boolean,
    claimed_position           bigint,
    ready              bigint,
    ready_is_more      boolean,
    lag_events         bigint,
    lag_is_more        boolean,
    lag_seconds        float8,
    unfinished_seconds float8,
    processing         bigint,
    open_leases        bigint,
    retrying           bigint,
    redeliveries       bigint,
    dead               bigint,
    done               bigint,
    claimed            bigint,
    last_claimed_at    timestamptz,
    last_worker        text
)
language plpgsql
stable
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
    head constant bigint := coalesce(pg_sequence_last_value('headwater_internal.position'), 0);
    asked_at constant timestamptz := clock_timestamp();
    minute constant interval := interval '1 minute';
    consumers headwater_internal.queue[];
    reached bigint[];
    low_waters bigint[];
    target headwater_internal.queue;
    reader headwater_internal.reading;
    low_water bigint;
    known record;
    counts record;
    any_topic boolean;
    whole_topics boolean;
    waiting integer[];
begin
    select array_agg(g order by g.name), array_agg(f.reached order by g.name), array_agg(f.low_water order by g.name)
    into consumers, reached, low_waters
    from (
        select o.* from headwater_internal.queue o
        where queue_overviews.names is null or o.name = any (queue_overviews.names)
        order by o.name
        limit max_queues
    ) as g
    cross join lateral (
        select
            case g.kind
                when 'bindings' then headwater_internal.claimed_position(g)
                else (select d.position from headwater_internal.reading d where d.queue_id = g.id)
            end as reached,
            headwater_internal.queue_low_water(g) as low_water
    ) as f;
    select e.* into known
    from (select min(l.position) as lowest from unnest(low_waters) as l (position) where l.position < head) as l
    cross join lateral headwater_internal.topic_ends(
        coalesce(l.lowest, head),
        -- A single queue of named topics does not need the other topics.
        case
            when cardinality(consumers) = 1 and consumers[1].kind = 'bindings'
                then headwater_internal.bound_topics(consumers[1].id, low_waters[1])
        end
    ) as e;

    for number in 1 .. coalesce(cardinality(consumers), 0) loop
        target := consumers[number];
        low_water := coalesce(low_waters[number], target.start_position);
        name := target.name;
        kind := target.kind;
        paused := target.paused_at is not null;
        claimed_position := coalesce(reached[number], target.start_position);
        lag_is_more := false;
        lag_seconds := null;
        unfinished_seconds := null;

        select
            c.processing, c.lapsed, c.open_leases, c.not_settled, c.newest_end,
            r.leased, r.due, r.waiting, r.of_pass, r.all_of_them,
            (select count(*) from headwater_internal.dead_letter d where d.queue_id = target.id) as dead,
            (
                select count(*) from headwater_internal.dead_letter d
                where d.queue_id = target.id and d.position > target.start_position
            ) as dead_of_pass,
            coalesce((select p.past_events from headwater_internal.queue_progress p where p.queue_id = target.id), 0)
                + coalesce((select sum(l.events) from headwater_internal.ledger l where l.queue_id = target.id), 0) as claimed,
            a.claimed_at,
            a.worker
        into counts
        from (
            select
                coalesce(sum(l.events - l.acked_events) filter (where l.expires_at > asked_at), 0) as processing,
                coalesce(sum(l.events - l.acked_events) filter (where l.expires_at <= asked_at), 0) as lapsed,
                count(*) as open_leases,
                coalesce(sum(l.events - l.acked_events), 0) as not_settled,
                (
                    select n.expires_at from headwater_internal.ledger n
                    where n.queue_id = target.id and n.events > 0
                    order by n.token desc
                    limit 1
                ) as newest_end
            from headwater_internal.open_claims(target) l
        ) as c
        cross join (
            select
                count(*) filter (where r.token is not null and r.visible_at > asked_at) as leased,
                count(*) filter (where r.visible_at <= asked_at) as due,
                count(*) filter (where r.token is null and r.visible_at > asked_at) as waiting,
                count(*) filter (where r.position > target.start_position) as of_pass,
                count(*) as all_of_them
            from headwater_internal.redelivery r
            where r.queue_id = target.id
        ) as r
        left join headwater_internal.queue_activity a on a.queue_id = target.id;
        processing := counts.processing + counts.leased;
        open_leases := counts.open_leases;
        retrying := counts.waiting;
        redeliveries := counts.all_of_them;
        dead := counts.dead;
        claimed := counts.claimed;
        done := greatest(counts.claimed - counts.not_settled - counts.of_pass - counts.dead_of_pass, 0);
        last_claimed_at := counts.claimed_at;
        last_worker := counts.worker;

        reader := null;
        if target.kind = 'subscriptions' then
            select * into reader from headwater_internal.reading d where d.queue_id = target.id;
        end if;
        ready := 0;
        waiting := '{}';
        if low_water < head and known.ends[cardinality(known.ends)] > low_water then
            -- Those of its topics with events after the low water mark, which is at or below the claimed position.
            waiting := known.ids[width_bucket(low_water, known.ends) + 1:];
            if target.kind = 'bindings' then
                select
                    bool_or(b.topic_id is null and (b.to_position is null or b.to_position > low_water)),
                    bool_and(
                        b.topic_id is not null and b.type is null and b.pattern is null and b.headers is null
                        and greatest(b.from_position, b.to_position) <= claimed_position
                    )
                into any_topic, whole_topics
                from headwater_internal.binding b
                where b.queue_id = target.id;
                if any_topic is not true then
                    waiting := array(
                        select i.id from unnest(headwater_internal.bound_topics(target.id, low_water)) as i (id)
                        where known.end_by_id[i.id] > low_water
                    );
                end if;
            elsif reader.topics is not null then
                waiting := array(
                    select t.id from headwater_internal.topic t
                    where t.name = any (reader.topics) and t.deleted_at is null and known.end_by_id[t.id] > low_water
                );
            end if;
            if low_water < claimed_position then
                unfinished_seconds := headwater_internal.seconds_behind(waiting[:most], low_water);
                waiting := array(select i.id from unnest(waiting) as i (id) where known.end_by_id[i.id] > claimed_position);
                if target.kind = 'bindings' and any_topic is not true then
                    -- A binding that ended at the claimed position selects nothing after it.
                    waiting := array(
                        select unnest(waiting) intersect select unnest(headwater_internal.bound_topics(target.id, claimed_position))
                    );
                end if;
            end if;
        end if;
        if cardinality(waiting) > 0 then
            -- Each of them has at least one event: as many topics as events are counted are enough.
            waiting := waiting[:most + 1];
            select l.events, l.is_more, l.seconds into ready, lag_is_more, lag_seconds
            from headwater_internal.lag_of(waiting, claimed_position, most, known.expired_to) as l;
            if target.kind = 'bindings' and not whole_topics then
                -- Of that many events of its topics, those that its bindings select. The age is that of the topics'
                -- events.
                select count(*) into ready
                from (
                    select o.topic_id, o.position, o.type, o.routing_key, o.headers
                    from headwater_internal.event o
                    where o.topic_id = any (waiting) and o.position > claimed_position
                    limit most
                ) as e
                where
                    (
                        known.expired_to <= claimed_position
                        or not coalesce(
                            (select t.expired_to >= e.position from headwater_internal.topic t where t.id = e.topic_id), false
                        )
                    )
                    and exists (
                        select from headwater_internal.binding b
                        where
                            b.queue_id = target.id
                            and headwater_internal.binding_selects(b, e.topic_id, e.position, e.type, e.routing_key, e.headers)
                    );
                if ready = 0 and not lag_is_more then
                    lag_seconds := null;
                end if;
            end if;
            unfinished_seconds := greatest(unfinished_seconds, lag_seconds);
        end if;
        ready_is_more := lag_is_more;
        if target.kind = 'bindings' then
            ready := ready + counts.lapsed + counts.due;
            lag_events := ready + processing + retrying;
        else
            lag_events := ready;
        end if;
        state := case
            when target.kind = 'subscriptions' then
                case when reader.leased_until > asked_at then 'running' else 'no_reader' end
            when paused then 'paused'
            when processing = 0 and coalesce(counts.claimed_at < asked_at - minute, true) then 'no_workers'
            when
                processing = 0 and ready > 0 and lag_seconds > 60
                and coalesce(counts.newest_end < asked_at, true)
                then 'stalled'
            else 'running'
        end;
        return next;
    end loop;
end;
$$;

-- One row for each queue: its settings, state, progress and lag. New events are counted up to a limit (`ready_is_more`,
-- `lag_is_more`).
create or replace view headwater.queue_overview as
select
    o.name,
    o.state,
    o.paused,
    o.claimed_position,
    o.ready,
    o.ready_is_more,
    o.lag_events,
    o.lag_is_more,
    o.lag_seconds,
    o.processing,
    o.retrying,
    o.dead,
    o.done,
    o.last_claimed_at,
    o.last_worker,
    g.ordered_keys,
    g.max_attempts,
    g.lease_seconds,
    g.max_in_flight,
    g.holds_retention,
    g.created_at
from headwater_internal.queue_overviews() as o
join headwater_internal.queue g on g.name = o.name;
