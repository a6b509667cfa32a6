-- What subscribers do with the events that they were given: retries, dead letters, and staying alive.

-- Say how events ended for one handler: 'done', 'retry' (after the delay, or the group's backoff), 'dead', or 'release'
-- (again after the delay, not counted as a try). A retry beyond `max_attempts` (null: the group's) is a dead letter.
-- Arrays are parallel; `topics` are the names of the events' topics. What belongs to a subscription that was removed
-- meanwhile is forgotten. Returns how many became dead letters.
create or replace function headwater.settle_matched(
    group_name text,
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
    target constant headwater.consumer_group := headwater.find_group(group_name);
    allowed constant integer := coalesce(settle_matched.max_attempts, target.max_attempts);
    died bigint;
begin
    with ended as (
        select
            u.subscription_id, u.position, t.id as topic_id, u.attempt, u.delay,
            left(u.error, 10000) as error,
            case when u.verdict = 'retry' and u.attempt >= allowed then 'dead' else u.verdict end as outcome
        from unnest(subscription_ids, positions, topics, attempts, verdicts, errors, delays)
            as u (subscription_id, position, topic, attempt, verdict, error, delay)
        join headwater.topic t on t.name = u.topic
        join headwater.subscription s on s.id = u.subscription_id and s.group_id = target.id
        for key share of s
    ),
    again as (
        insert into headwater.subscription_retry as r
            (group_id, subscription_id, handler, position, topic_id, attempt, due_at, last_error, history)
        select
            target.id, e.subscription_id, settle_matched.handler, e.position, e.topic_id,
            case e.outcome when 'retry' then e.attempt else e.attempt - 1 end,
            clock_timestamp() + coalesce(
                make_interval(secs => e.delay),
                case e.outcome when 'retry' then headwater.backoff(target, e.attempt) else interval '0' end
            ),
            e.error,
            case e.outcome
                when 'retry' then headwater.with_try('[]', e.attempt, settle_matched.worker, e.error)
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
        delete from headwater.subscription_retry r
        using ended e
        where
            r.subscription_id = e.subscription_id and r.handler = settle_matched.handler and r.position = e.position
            and e.outcome in ('done', 'dead')
        returning r.subscription_id, r.position, r.history
    ),
    given_up as (
        insert into headwater.dead_letter as d
            (group_id, position, topic_id, attempts, alone, last_error, history, subscription_id, handler)
        select
            target.id, e.position, e.topic_id, e.attempt, false, e.error,
            headwater.with_try(coalesce(f.history, '[]'), e.attempt, settle_matched.worker, e.error),
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

-- Have one handler of one subscription get an event again after a delay. Beyond max_attempts (null: the group's) it is
-- a dead letter. Returns whether there will be another try.
create or replace function headwater.retry_later(
    group_name text,
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
    from headwater.event e
    join headwater.topic t on t.id = e.topic_id
    where
        e.position = event_position
        and e.topic_id = any (
            headwater.topic_ids(
                (select d.topics from headwater.reading d where d.group_id = (headwater.find_group(group_name)).id)
            )
        );
    return headwater.settle_matched(
        group_name, retry_later.handler, array[retry_later.subscription_id], array[event_position], array[topic_name],
        array[retry_later.attempt], array['retry'], array[error], array[delay_seconds], retry_later.max_attempts
    ) = 0;
end;
$$;

-- A handler is done with an event that it asked to have again.
create or replace function headwater.finish_retry(retry_id bigint)
returns boolean
language plpgsql
as $$
begin
    delete from headwater.subscription_retry r where r.id = retry_id;
    return found;
end;
$$;

-- Say that subscriptions are in use, so that they do not expire; returns those that exist.
create or replace function headwater.keep_alive(subscription_ids bigint[])
returns setof bigint
language sql
begin atomic
    update headwater.subscription s
    set last_active_at = clock_timestamp()
    where
        s.id = any (subscription_ids)
        and s.last_active_at < clock_timestamp() - case
            when s.expires_after is null then interval '1 minute'
            else least(s.expires_after / 4, interval '10 seconds')
        end;
    select s.id from headwater.subscription s where s.id = any (subscription_ids);
end;

-- The events that are matched by filters: all but those that name one subscription.
create or replace function headwater.undirected(events headwater.condition_event[])
returns headwater.condition_event[]
language sql
stable
return (
    select array_agg(e order by e.position) from unnest(events) as e
    where e.headers is null or not e.headers ? 'headwater-subscription'
);

-- Events with the header `headwater-subscription` go to the subscription of this id, whatever its filter says, and to
-- no other. One that names no subscription of the group goes to none of them. Up to `done_to` they were given before.
create or replace function headwater.directed_matches(
    target headwater.consumer_group, events headwater.condition_event[], done_to bigint
)
returns headwater.condition_match[]
language sql
stable
return array(
    select (e.position, array[s.id])::headwater.condition_match
    from unnest(events) as e
    join headwater.subscription s
        on s.id = case
            when e.headers ->> 'headwater-subscription' ~ '^[0-9]{1,18}$'
                then (e.headers ->> 'headwater-subscription')::bigint
        end
        and s.group_id = target.id
    where
        e.headers ? 'headwater-subscription' and e.position > s.from_position and e.position > coalesce(done_to, 0)
);

-- Let another reader take over a group at once, without moving its position. True if this was the reader.
create or replace function headwater.release_reading(group_name text, reader text)
returns boolean
language plpgsql
as $$
begin
    update headwater.reading d
    set reader = null, leased_until = null
    where d.group_id = (headwater.find_group(group_name)).id and d.reader = release_reading.reader;
    return found;
end;
$$;

-- Which of these subscriptions stand still because their filter took too long, and what is known of it.
create or replace function headwater.stopped_subscriptions(subscription_ids bigint[])
returns table (subscription_id bigint, error text)
language plpgsql
stable
as $$
begin
    return query
    select s.id, coalesce(f.error, '')
    from headwater.subscription s
    join headwater.filter_stop f on f.group_id = s.group_id and f.condition_id = s.condition_id
    where s.id = any (subscription_ids) and f.stopped_at is not null;
end;
$$;
