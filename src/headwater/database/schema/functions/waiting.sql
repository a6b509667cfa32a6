-- Waiting: what a process polls for its waiting workers and readers, besides the head of the log.

-- Whether the log has grown beyond `seen_head` (null: it is not known, and everything is returned). If the head is the
-- same, the rest is null: the usual answer costs as much as the head alone. `bounds` are those of all open publishers.
-- `grown`: which of these topics have an event after `seen_stable`, a stable position of the whole log, or do not exist:
-- the others have no event that was not stable then.
create or replace function headwater_internal.growth(
    seen_head bigint, seen_stable bigint, topics text[],
    out head bigint, out epoch integer, out bounds bigint[], out grown text[]
)
language plpgsql
volatile
set enable_seqscan = off
set enable_bitmapscan = off
as $$
begin
    head := coalesce(pg_sequence_last_value('headwater_internal.position'), 0);
    if head = seen_head then
        return;
    end if;
    epoch := headwater.current_epoch();
    -- The locks are read after the sequence, and the events after the locks.
    bounds := array(select p.position_bound from headwater_internal.publisher_lock p order by p.position_bound);
    grown := array(
        select n.name
        from unnest(topics) as n (name)
        left join headwater_internal.topic t on t.name = n.name and t.deleted_at is null
        where
            t.id is null
            or exists (
                select from headwater_internal.event e where e.topic_id = t.id and e.position > seen_stable
            )
    );
end;
$$;

-- The state of these queues and cursors, in one call for all waiters of a process. A waiter looks again if
--   * `state` has changed: the queue was paused, resumed, rewound, altered or bound; a claim or the maintenance moved it
--     past events that it does not select, after which there may be others; if the events in flight are limited, some
--     were claimed or their number has changed; the cursor, or the position of the SQL subscriptions, was moved. Row
--     versions and tokens show that something was changed and changed back;
--   * `due` is true: the queue has an event to hand out again. `due_seconds`: how long until it has the next one.
-- `topics`: where its events come from; null: from any topic. What does not exist is not in the result. Also records that the queues have workers, as a claim does.
create or replace function headwater_internal.states_of_waiters(queues text[], cursors text[])
returns table (kind text, name text, state text, due boolean, due_seconds float8, topics text[])
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
                case when g.max_in_flight is not null or (f.settled and f.events = f.acked_events) then f.token end,
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
                    and r.visible_at > least(coalesce(f.due_after, '-infinity'), looked_at - interval '1 second')
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
        end - looked_at)::float8,
        case g.kind
            when 'bindings' then (
                select case when bool_and(b.topic_id is not null) then array_agg(distinct t.name::text) end
                from headwater_internal.binding b
                left join headwater_internal.topic t on t.id = b.topic_id
                where b.queue_id = g.id
            )
            else (select d.topics from headwater_internal.reading d where d.queue_id = g.id)
        end
    from headwater_internal.queue g
    left join lateral (
        select l.due_after, l.token, l.settled, l.events, l.acked_events
        from headwater_internal.ledger l
        where l.queue_id = g.id and l.token > g.start_token
        order by l.token desc
        limit 1
    ) as f on true
    where g.name = any (queues)
    union all
    select 'cursor', c.name, concat_ws('/', c.xmin, c.position), false, null, null
    from headwater_internal.cursor c
    where c.name = any (cursors);
end;
$$;
