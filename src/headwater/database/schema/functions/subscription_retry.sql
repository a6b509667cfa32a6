-- Settling events of SQL subscriptions: retries, dead letters, and keeping subscriptions alive.

-- Settle events for one handler: 'done', 'retry' (after the delay, or the queue's backoff), 'dead', or 'release' (again
-- after the delay, not counted as an attempt). A retry beyond `max_attempts` (null: the queue's setting), or of an event
-- older than the queue's `retry_age_seconds`, becomes a dead letter. The arrays are parallel; `topics` are the topic names of the events. Entries of subscriptions that were
-- deleted meanwhile are ignored. Returns the number of new dead letters. HW011 if the queue does not exist.
create or replace function headwater.settle_matched(
    queue_name text,
    handler text,
    subscription_ids bigint[],
    positions bigint[],
    topics text[],
    attempts integer[],
    verdicts text[],
    errors text[],
    delays float8[],
    max_attempts integer default null,
    worker text default null
)
returns bigint
language plpgsql
as $$
declare
    target constant headwater_internal.queue := headwater_internal.find_queue(queue_name);
    allowed constant integer := coalesce(settle_matched.max_attempts, target.max_attempts);
    died bigint;
begin
    with ended as (
        select
            u.subscription_id, u.position, t.id as topic_id, u.attempt, u.delay,
            left(u.error, 10000) as error,
            case
                when
                    u.verdict = 'retry'
                    and (u.attempt >= allowed or headwater_internal.is_past_retry_age(target, t.id, u.position))
                    then 'dead'
                else u.verdict
            end as outcome
        from unnest(subscription_ids, positions, topics, attempts, verdicts, errors, delays)
            as u (subscription_id, position, topic, attempt, verdict, error, delay)
        join headwater_internal.topic t on t.name = u.topic
        join headwater_internal.subscription s on s.id = u.subscription_id and s.queue_id = target.id
        for key share of s
    ),
    again as (
        insert into headwater_internal.subscription_retry as r
            (queue_id, subscription_id, handler, position, topic_id, attempt, due_at, last_error, history)
        select
            target.id, e.subscription_id, settle_matched.handler, e.position, e.topic_id,
            case e.outcome when 'retry' then e.attempt else e.attempt - 1 end,
            clock_timestamp() + coalesce(
                make_interval(secs => e.delay),
                case e.outcome when 'retry' then headwater_internal.backoff(target, e.attempt) else interval '0' end
            ),
            e.error,
            case e.outcome
                when 'retry' then headwater_internal.with_try('[]', e.attempt, settle_matched.worker, e.error)
                else '[]'
            end
        from ended e
        where e.outcome in ('retry', 'release')
        on conflict on constraint subscription_retry_subscription_id_handler_position_key do update
            set
                attempt = excluded.attempt,
                due_at = excluded.due_at,
                last_error = coalesce(excluded.last_error, r.last_error),
                history = r.history || excluded.history
    ),
    finished as (
        delete from headwater_internal.subscription_retry r
        using ended e
        where
            r.subscription_id = e.subscription_id and r.handler = settle_matched.handler and r.position = e.position
            and e.outcome in ('done', 'dead')
        returning r.subscription_id, r.position, r.history
    ),
    given_up as (
        insert into headwater_internal.dead_letter as d
            (queue_id, position, topic_id, attempts, isolated, last_error, history, subscription_id, handler)
        select
            target.id, e.position, e.topic_id, e.attempt, false, e.error,
            headwater_internal.with_try(coalesce(f.history, '[]'), e.attempt, settle_matched.worker, e.error),
            e.subscription_id, settle_matched.handler
        from ended e
        left join finished f on f.subscription_id = e.subscription_id and f.position = e.position
        where e.outcome = 'dead'
        on conflict on constraint dead_letter_identity do update
            set
                attempts = excluded.attempts,
                last_error = excluded.last_error,
                history = d.history || excluded.history,
                died_at = clock_timestamp()
        returning 1
    )
    select count(*) into died from given_up;
    return died;
end;
$$;

-- Deliver an event again to one handler of one subscription after a delay. Beyond `max_attempts` (null: the queue's
-- setting) it becomes a dead letter. Returns whether there will be another attempt. HW011 if the queue does not exist.
create or replace function headwater.retry_later(
    queue_name text,
    subscription_id bigint,
    handler text,
    event_position bigint,
    attempt integer,
    delay_seconds float8 default null,
    error text default null,
    max_attempts integer default null
)
returns boolean
language plpgsql
as $$
declare
    topic_name text;
begin
    select t.name into topic_name
    from headwater_internal.event e
    join headwater_internal.topic t on t.id = e.topic_id
    where
        e.position = event_position
        and e.topic_id = any (
            headwater_internal.topic_ids(
                (select d.topics from headwater_internal.reading d where d.queue_id = (headwater_internal.find_queue(queue_name)).id)
            )
        );
    return headwater.settle_matched(
        queue_name, retry_later.handler, array[retry_later.subscription_id], array[event_position], array[topic_name],
        array[retry_later.attempt], array['retry'], array[error], array[delay_seconds], retry_later.max_attempts
    ) = 0;
end;
$$;

-- Delete a retry after its handler has succeeded. Returns true if it existed.
create or replace function headwater.finish_retry(retry_id bigint)
returns boolean
language plpgsql
as $$
begin
    delete from headwater_internal.subscription_retry r where r.id = retry_id;
    return found;
end;
$$;

-- Record that subscriptions are in use, so that they do not expire; returns those that exist.
create or replace function headwater_internal.keep_alive(subscription_ids bigint[])
returns setof bigint
language sql
begin atomic
    update headwater_internal.subscription s
    set last_active_at = clock_timestamp()
    where
        s.id = any (subscription_ids)
        and s.last_active_at < clock_timestamp() - case
            when s.expires_after is null then interval '1 minute'
            else least(s.expires_after / 4, interval '10 seconds')
        end;
    select s.id from headwater_internal.subscription s where s.id = any (subscription_ids);
end;

-- The events that are matched by filters: all but those directed at one subscription.
create or replace function headwater_internal.undirected(events headwater.filter_event[])
returns headwater.filter_event[]
language sql
stable
return (
    select array_agg(e order by e.position) from unnest(events) as e
    where e.headers is null or not e.headers ? 'headwater-subscription'
);

-- Events with the header `headwater-subscription` go to the subscription with that id, whatever its filter is, and to
-- no other. If the id is not that of a subscription of the queue, they go to none. Up to `done_to` they were delivered
-- before.
create or replace function headwater_internal.directed_matches(
    target headwater_internal.queue, events headwater.filter_event[], done_to bigint
)
returns headwater_internal.filter_match[]
language sql
stable
return array(
    select (e.position, array[s.id])::headwater_internal.filter_match
    from unnest(events) as e
    join headwater_internal.subscription s
        on s.id = case
            when e.headers ->> 'headwater-subscription' ~ '^[0-9]{1,18}$'
                then (e.headers ->> 'headwater-subscription')::bigint
        end
        and s.queue_id = target.id
    where
        e.headers ? 'headwater-subscription' and e.position > s.from_position and e.position > coalesce(done_to, 0)
);

-- Let another reader take over a queue at once, without moving its position. Returns true if `reader` was the reader.
-- HW011 if the queue does not exist.
create or replace function headwater.release_reading(queue_name text, reader text)
returns boolean
language plpgsql
as $$
begin
    update headwater_internal.reading d
    set reader = null, leased_until = null
    where d.queue_id = (headwater_internal.find_queue(queue_name)).id and d.reader = release_reading.reader;
    return found;
end;
$$;

-- Those of these subscriptions that are stopped because their filter took too long, with the error.
create or replace function headwater_internal.stopped_subscriptions(subscription_ids bigint[])
returns table (subscription_id bigint, error text)
language plpgsql
stable
as $$
begin
    return query
    select s.id, coalesce(f.error, '')
    from headwater_internal.subscription s
    join headwater_internal.filter_stop f on f.queue_id = s.queue_id and f.filter_id = s.filter_id
    where s.id = any (subscription_ids) and f.stopped_at is not null;
end;
$$;
