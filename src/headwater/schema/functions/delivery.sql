-- The state of every event for every group, as views.

-- The last position that a group has no more use for.
create or replace function headwater.group_low_water(target headwater.consumer_group)
returns bigint
language sql
stable
return least(
    case target.kind
        when 'queue' then headwater.frontier(target)
        else (select d.position from headwater.reading d where d.group_id = target.id)
    end,
    (
        select min(l.lo) - 1 from headwater.ledger l
        where l.group_id = target.id and not l.settled and l.token > target.start_token
    ),
    (select min(r.position) - 1 from headwater.redelivery r where r.group_id = target.id)
);

-- Every event of every group with its state, as if there were a row for each.
create or replace view headwater.delivery as
select
    g.name as group_name,
    e.position,
    t.name as topic,
    case
        when d.position is not null then 'dead'
        when r.position is not null then
            case when r.token is not null and r.visible_at > clock_timestamp() then 'processing' else 'ready' end
        when e.position > f.frontier then 'ready'
        when l.token is not null and l.expires_at > clock_timestamp() then 'processing'
        when l.token is not null then 'ready'
        else 'done'
    end as status,
    coalesce(d.attempts, r.attempt, case when e.position > f.frontier then 0 else 1 end) as attempts,
    case when r.token is null then nullif(r.visible_at, 'infinity') end as run_at,
    coalesce(l.expires_at, case when r.token is not null then r.visible_at end) as leased_until,
    coalesce(r.worker, l.worker) as worker,
    coalesce(d.last_error, r.last_error) as last_error
from headwater.consumer_group g
cross join lateral (select headwater.frontier(g) as frontier) as f
cross join lateral (
    select b.position, b.topic_id
    from headwater.bound_events(
        g.id, headwater.bound_topics(g.id, 0), g.start_position + 1, 281474976710655
    ) as b
    union all
    -- Left over from before a rewind.
    select o.position, o.topic_id from headwater.redelivery o
    where o.group_id = g.id and o.position <= g.start_position
    union all
    select o.position, o.topic_id from headwater.dead_letter o
    where o.group_id = g.id and o.position <= g.start_position
) as e
join headwater.topic t on t.id = e.topic_id
left join headwater.redelivery r on r.group_id = g.id and r.position = e.position
left join headwater.dead_letter d on d.group_id = g.id and d.position = e.position
left join lateral (
    select o.token, o.expires_at, o.worker
    from headwater.ledger o
    where
        o.group_id = g.id and o.token > g.start_token and not o.settled
        and e.position between o.lo and o.hi
        and (o.acked is null or not e.position <@ o.acked)
    order by o.token desc
    limit 1
) as l on true;

-- One line a group. Everything but `ready` is arithmetic on a few small tables; `ready` is counted up to 10,000.
create or replace view headwater.group_overview as
select
    g.name,
    g.paused_at is not null as paused,
    f.frontier,
    least(c.new_events, 10000) + c.lapsed + c.due_again as ready,
    c.new_events > 10000 as ready_is_more,
    headwater.positions_between(f.frontier, headwater.head()) as positions_behind,
    headwater.in_flight(g) as processing,
    c.waiting_again as retrying,
    c.dead,
    greatest(c.claimed - c.not_done, 0) as done,
    g.ordered_keys,
    g.max_attempts,
    g.lease_seconds,
    g.max_in_flight,
    g.must_not_lose,
    g.created_at
from headwater.consumer_group g
cross join lateral (select headwater.frontier(g) as frontier) as f
cross join lateral (
    select
        (
            select count(*) from (
                select from headwater.bound_events(
                    g.id, headwater.bound_topics(g.id, f.frontier), f.frontier + 1, 281474976710655
                )
                limit 10001
            ) as counted
        ) as new_events,
        (
            select coalesce(sum(l.events - l.acked_events), 0)
            from headwater.open_claims(g) l
            where l.expires_at <= clock_timestamp()
        ) as lapsed,
        (
            select count(*) from headwater.redelivery r
            where r.group_id = g.id and r.visible_at <= clock_timestamp()
        ) as due_again,
        (
            select count(*) from headwater.redelivery r
            where r.group_id = g.id and r.visible_at > clock_timestamp() and r.token is null
        ) as waiting_again,
        (select count(*) from headwater.dead_letter d where d.group_id = g.id) as dead,
        coalesce((select p.past_events from headwater.group_progress p where p.group_id = g.id), 0)
            + coalesce((select sum(l.events) from headwater.ledger l where l.group_id = g.id), 0) as claimed,
        (select coalesce(sum(l.events - l.acked_events), 0) from headwater.open_claims(g) l)
            + (select count(*) from headwater.redelivery r where r.group_id = g.id and r.position > g.start_position)
            + (select count(*) from headwater.dead_letter d where d.group_id = g.id and d.position > g.start_position)
            as not_done
) as c;
