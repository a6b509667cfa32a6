-- Dead letters: list them, redrive them, or discard them.

-- List the dead letters of a queue, oldest first: all of them, or those at these positions, of a topic, whose error
-- matches a LIKE pattern, or of one handler or subscription (for a queue of SQL subscriptions). There, several handlers
-- may have given up on one event, and a page is never cut between them, so it may exceed batch_size. HW011 if the queue
-- does not exist.
create or replace function headwater.dead_letters(
    queue_name text,
    positions bigint[] default null,
    topic text default null,
    error_like text default null,
    after bigint default 0,
    batch_size integer default 1000,
    handler text default null,
    subscription_id bigint default null
)
returns table (
    "position" bigint,
    topic_name text,
    key bytea,
    type text,
    attempts integer,
    last_error text,
    history jsonb,
    died_at timestamptz,
    subscription bigint,
    handler_name text
)
language sql
stable
begin atomic
    select
        d.position, t.name, e.key, e.type, d.attempts, d.last_error, d.history, d.died_at,
        d.subscription_id, d.handler
    from headwater_internal.dead_letter d
    left join headwater_internal.topic t on t.id = d.topic_id
    left join headwater_internal.event e on e.topic_id = d.topic_id and e.position = d.position
    where
        d.queue_id = (headwater_internal.find_queue(queue_name)).id
        and (positions is null or d.position = any (positions))
        and (dead_letters.topic is null or t.name = dead_letters.topic)
        and (error_like is null or d.last_error like error_like)
        and (dead_letters.handler is null or d.handler = dead_letters.handler)
        and (dead_letters.subscription_id is null or d.subscription_id = dead_letters.subscription_id)
        and d.position > after
    order by d.position
    fetch first (batch_size) rows with ties;
end;

-- Return dead letters to the queue with a fresh set of attempts, if their events still exist. Those of a subscription
-- go only to the handler that gave up. Returns their number. HW011 if the queue does not exist.
create or replace function headwater.redrive(
    queue_name text,
    positions bigint[] default null,
    topic text default null,
    error_like text default null,
    batch_size integer default 1000000,
    handler text default null,
    subscription_id bigint default null
)
returns bigint
language plpgsql
as $$
declare
    target constant headwater_internal.queue := headwater_internal.find_queue(queue_name);
    redriven bigint;
begin
    perform headwater_internal.lock_queue(target.id);
    with chosen as (
        delete from headwater_internal.dead_letter d
        using
            headwater.dead_letters(
                queue_name, redrive.positions, redrive.topic, redrive.error_like, 0, batch_size, redrive.handler,
                redrive.subscription_id
            ) as c,
            headwater_internal.event e
        where
            d.queue_id = target.id and d.position = c.position
            and d.subscription_id is not distinct from c.subscription and d.handler is not distinct from c.handler_name
            and e.topic_id = d.topic_id and e.position = d.position
            and not exists (select from headwater_internal.topic t where t.id = d.topic_id and t.expired_to >= d.position)
        returning d.*, e.key
    ),
    kept as (
        insert into headwater_internal.redelivery
            (queue_id, position, topic_id, attempt, visible_at, isolated, key_hash, last_error, history)
        select
            c.queue_id, c.position, c.topic_id, 0,
            case when target.ordered_keys and c.key is not null then 'infinity' else clock_timestamp() end,
            c.isolated,
            case when target.ordered_keys then headwater_internal.key_order_hash(c.key) end,
            c.last_error, c.history
        from chosen c
        where c.subscription_id is null
        on conflict (queue_id, position) do nothing
        returning key_hash
    ),
    retried as (
        insert into headwater_internal.subscription_retry as r
            (queue_id, subscription_id, handler, position, topic_id, attempt, due_at, last_error, history)
        select
            c.queue_id, c.subscription_id, c.handler, c.position, c.topic_id, 0, clock_timestamp(), c.last_error, c.history
        from chosen c
        where c.subscription_id is not null
        on conflict on constraint subscription_retry_subscription_id_handler_position_key do update
            set attempt = 0, due_at = excluded.due_at, history = excluded.history || r.history
        returning 1
    )
    select (select count(*) from kept) + (select count(*) from retried) into redriven;
    if target.ordered_keys then
        perform headwater_internal.free_next_of_keys(target.id, headwater_internal.waiting_keys(target.id));
    end if;
    return redriven;
end;
$$;

-- Delete dead letters: the queue counts them as done. Returns their number. HW011 if the queue does not exist.
create or replace function headwater.discard(
    queue_name text,
    positions bigint[] default null,
    topic text default null,
    error_like text default null,
    batch_size integer default 1000000,
    handler text default null,
    subscription_id bigint default null
)
returns bigint
language sql
begin atomic
    with gone as (
        delete from headwater_internal.dead_letter d
        using
            headwater.dead_letters(
                queue_name, discard.positions, discard.topic, discard.error_like, 0, batch_size, discard.handler,
                discard.subscription_id
            ) as c
        where
            d.queue_id = (headwater_internal.find_queue(queue_name)).id and d.position = c.position
            and d.subscription_id is not distinct from c.subscription and d.handler is not distinct from c.handler_name
        returning 1
    )
    select count(*) from gone;
end;
