-- Waiting: what a process polls for its waiting workers and readers, besides the head of the log.

-- The state of these queues and cursors, in one call for all waiters of a process. A waiter looks again if
--   * `state` has changed: the queue was paused, resumed, rewound, altered or bound, or, if the events in flight are
--     limited, their number has changed; the cursor, or the position of the SQL subscriptions, was moved;
--   * `due` is true: the queue has an event to hand out again. `due_seconds`: how long until it has the next one.
-- What does not exist is not in the result. Also records that the queues have workers, as a claim does.
create or replace function headwater_internal.states_of_waiters(queues text[], cursors text[])
returns table (kind text, name text, state text, due boolean, due_seconds float8)
language plpgsql
volatile
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
    looked_at constant timestamptz := clock_timestamp();
begin
    if cardinality(queues) > 0 then
        update headwater_internal.queue_activity a
        set claimed_at = looked_at
        where a.queue_id = any (array(
            select b.queue_id
            from headwater_internal.queue g
            join headwater_internal.queue_activity b on b.queue_id = g.id
            where
                g.name = any (queues) and g.paused_at is null
                and b.claimed_at not between looked_at - interval '10 seconds' and looked_at
            for update of b skip locked
        ));
    end if;
    return query
    select
        'queue',
        g.name,
        case g.kind
            when 'bindings' then concat_ws(
                '/',
                g.xmin,
                (
                    select string_agg(b.xmin::text, ',' order by b.id)
                    from headwater_internal.binding b
                    where b.queue_id = g.id
                ),
                case when g.max_in_flight is not null then headwater_internal.in_flight(g) end
            )
            else concat_ws(
                '/',
                g.xmin,
                (select max(s.id) from headwater_internal.subscription s where s.queue_id = g.id),
                (
                    select concat_ws('/', d.position, d.others_done_to)
                    from headwater_internal.reading d
                    where d.queue_id = g.id
                )
            )
        end,
        g.paused_at is null and case g.kind
            when 'bindings' then exists (
                select
                from headwater_internal.redelivery r
                where
                    r.queue_id = g.id
                    -- As in settle_and_claim(): earlier ones are only index entries of deleted rows.
                    and r.visible_at > coalesce(least(f.due_after, looked_at - interval '1 second'), '-infinity')
                    and r.visible_at <= looked_at and r.visible_at < 'infinity' and r.token is null
            )
            else exists (
                select
                from headwater_internal.subscription_retry d
                where d.queue_id = g.id and d.due_at <= looked_at
            )
        end,
        extract(epoch from case g.kind
            when 'bindings' then (
                select r.visible_at
                from headwater_internal.redelivery r
                where
                    r.queue_id = g.id and r.visible_at > looked_at and r.visible_at < 'infinity' and r.token is null
                order by r.visible_at
                limit 1
            )
            else (
                select d.due_at
                from headwater_internal.subscription_retry d
                where d.queue_id = g.id and d.due_at > looked_at
                order by d.due_at
                limit 1
            )
        end - looked_at)::float8
    from headwater_internal.queue g
    left join lateral (
        select l.due_after
        from headwater_internal.ledger l
        where l.queue_id = g.id and l.token > g.start_token
        order by l.token desc
        limit 1
    ) as f on true
    where g.name = any (queues)
    union all
    select 'cursor', c.name, c.position::text, false, null
    from headwater_internal.cursor c
    where c.name = any (cursors);
end;
$$;
