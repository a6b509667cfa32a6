-- Queues and what they are bound to.

-- The queue of that name; HW011 if it does not exist.
create or replace function headwater_internal.find_queue(queue_name text)
returns headwater_internal.queue
language plpgsql
stable
as $$
declare
    found_queue headwater_internal.queue;
begin
    select * into found_queue from headwater_internal.queue g where g.name = queue_name;
    if not found then
        raise exception 'queue "%" does not exist', queue_name
            using errcode = 'HW011',
                  detail = json_build_object('queue', queue_name)::text,
                  hint = 'Create it: headwater queue create, or headwater.create_queue().';
    end if;
    return found_queue;
end;
$$;

-- The queue of that name; HW011 if it does not exist, HW002 if it reads for SQL subscriptions.
create or replace function headwater_internal.find_bound_queue(queue_name text)
returns headwater_internal.queue
language plpgsql
stable
as $$
declare
    found_queue constant headwater_internal.queue := headwater_internal.find_queue(queue_name);
begin
    if found_queue.kind <> 'bindings' then
        raise exception 'queue "%" reads for SQL subscriptions: it has no bindings and no leases', queue_name
            using errcode = 'HW002';
    end if;
    return found_queue;
end;
$$;

-- Lock a queue until the transaction ends. Only the holder may claim for the queue or move its claimed position.
create or replace function headwater_internal.lock_queue(queue_id integer)
returns void
language sql
return pg_advisory_xact_lock((29290::bigint << 48) | queue_id);

-- The same without waiting. Returns false if another transaction holds the lock.
create or replace function headwater_internal.try_lock_queue(queue_id integer)
returns boolean
language sql
return pg_try_advisory_xact_lock((29290::bigint << 48) | queue_id);

-- The claimed position of a queue: the end of its newest claim.
create or replace function headwater_internal.claimed_position(target headwater_internal.queue)
returns bigint
language sql
stable
return coalesce(
    (
        select l.hi
        from headwater_internal.ledger l
        where l.queue_id = target.id and l.token > target.start_token
        order by l.token desc
        limit 1
    ),
    target.start_position
);

-- Create a queue that starts after a position (null: at the beginning of the log), bound to whole topics or to none
-- yet, and return it; null for a setting is its default, 0 for max_in_flight or retry_age_seconds means no limit. HW013
-- if it exists, unless `if_missing` is true: then the existing queue is returned unchanged.
-- HW004 if a topic does not exist.
create or replace function headwater.create_queue(
    queue_name text,
    topics text[] default null,
    start_position bigint default null,
    lease_seconds float8 default null,
    max_attempts integer default null,
    backoff_seconds float8 default null,
    backoff_factor float8 default null,
    backoff_max_seconds float8 default null,
    backoff_jitter float8 default null,
    retry_age_seconds float8 default null,
    ordered_keys boolean default null,
    max_in_flight integer default null,
    holds_retention boolean default null,
    if_missing boolean default false
)
returns headwater_internal.queue
language plpgsql
as $$
declare
    created headwater_internal.queue;
begin
    insert into headwater_internal.queue (
        name, start_position, lease_seconds, max_attempts, backoff_seconds, backoff_factor, backoff_max_seconds,
        backoff_jitter, retry_age_seconds, ordered_keys, max_in_flight, holds_retention
    )
    values (
        queue_name,
        coalesce(create_queue.start_position, 0),
        coalesce(create_queue.lease_seconds, 30),
        coalesce(create_queue.max_attempts, 5),
        coalesce(create_queue.backoff_seconds, 1),
        coalesce(create_queue.backoff_factor, 2),
        coalesce(create_queue.backoff_max_seconds, 3600),
        coalesce(create_queue.backoff_jitter, 0.2),
        nullif(create_queue.retry_age_seconds, 0),
        coalesce(create_queue.ordered_keys, false),
        nullif(create_queue.max_in_flight, 0),
        coalesce(create_queue.holds_retention, true)
    )
    on conflict (name) do nothing
    returning * into created;
    if created.id is null then
        if not if_missing then
            raise exception 'queue "%" already exists', queue_name
                using errcode = 'HW013', detail = json_build_object('queue', queue_name)::text;
        end if;
        return headwater_internal.find_queue(queue_name);
    end if;
    insert into headwater_internal.binding (queue_id, topic_id, from_position)
    -- The start position belongs to the queue, not to its bindings: a rewind may go further back.
    select created.id, t.id, 0
    from unnest(headwater_internal.topic_ids(coalesce(topics, '{}'))) as t (id);
    return created;
end;
$$;

-- Change the settings of a queue and return it; null leaves a setting unchanged, 0 for max_in_flight or
-- retry_age_seconds removes the limit.
-- HW011 if the queue does not exist.
create or replace function headwater.alter_queue(
    queue_name text,
    lease_seconds float8 default null,
    max_attempts integer default null,
    backoff_seconds float8 default null,
    backoff_factor float8 default null,
    backoff_max_seconds float8 default null,
    backoff_jitter float8 default null,
    retry_age_seconds float8 default null,
    max_in_flight integer default null,
    holds_retention boolean default null
)
returns headwater_internal.queue
language plpgsql
as $$
declare
    altered headwater_internal.queue := headwater_internal.find_queue(queue_name);
begin
    update headwater_internal.queue g
    set
        lease_seconds = coalesce(alter_queue.lease_seconds, g.lease_seconds),
        max_attempts = coalesce(alter_queue.max_attempts, g.max_attempts),
        backoff_seconds = coalesce(alter_queue.backoff_seconds, g.backoff_seconds),
        backoff_factor = coalesce(alter_queue.backoff_factor, g.backoff_factor),
        backoff_max_seconds = coalesce(alter_queue.backoff_max_seconds, g.backoff_max_seconds),
        backoff_jitter = coalesce(alter_queue.backoff_jitter, g.backoff_jitter),
        retry_age_seconds = nullif(coalesce(alter_queue.retry_age_seconds, g.retry_age_seconds), 0),
        max_in_flight = nullif(coalesce(alter_queue.max_in_flight, g.max_in_flight), 0),
        holds_retention = coalesce(alter_queue.holds_retention, g.holds_retention)
    where g.id = altered.id
    returning * into altered;
    return altered;
end;
$$;

-- Pause a queue: no more claims until it is resumed. Current leases can still be settled. HW011 if it does not exist.
create or replace function headwater.pause_queue(queue_name text)
returns void
language plpgsql
as $$
declare
    target constant headwater_internal.queue := headwater_internal.find_bound_queue(queue_name);
begin
    update headwater_internal.queue g set paused_at = clock_timestamp() where g.id = target.id and g.paused_at is null;
end;
$$;

-- Resume a paused queue. HW011 if it does not exist.
create or replace function headwater.resume_queue(queue_name text)
returns void
language plpgsql
as $$
declare
    target constant headwater_internal.queue := headwater_internal.find_bound_queue(queue_name);
begin
    update headwater_internal.queue g set paused_at = null where g.id = target.id;
end;
$$;

-- Delete a queue with its bindings, leases, retries and dead letters. Returns true if it existed.
create or replace function headwater.delete_queue(queue_name text)
returns boolean
language plpgsql
as $$
declare
    doomed integer;
begin
    select g.id into doomed from headwater_internal.queue g where g.name = queue_name;
    if not found then
        return false;
    end if;
    perform headwater_internal.lock_queue(doomed);
    delete from headwater_internal.ledger l where l.queue_id = doomed;
    delete from headwater_internal.redelivery r where r.queue_id = doomed;
    delete from headwater_internal.dead_letter d where d.queue_id = doomed;
    delete from headwater_internal.queue g where g.id = doomed;
    return true;
end;
$$;

-- Move a queue to another position, back or forth: it delivers every event after the position that its bindings select,
-- including those already done. A binding created without a from_position goes back with it; one created with a
-- from_position still selects nothing at or below that. All current leases are revoked. Events at or below the position
-- that were leased or wait for a retry are delivered again; dead letters there stay. HW011 if the queue does not exist.
create or replace function headwater.rewind_queue(queue_name text, to_position bigint)
returns void
language plpgsql
as $$
declare
    target constant headwater_internal.queue := headwater_internal.find_bound_queue(queue_name);
begin
    perform headwater_internal.lock_queue(target.id);
    update headwater_internal.queue g
    set start_position = to_position, start_token = headwater_internal.next_token()
    where g.id = target.id;
    update headwater_internal.binding b
    set from_position = rewind_queue.to_position
    where
        b.queue_id = target.id and not b.from_position_given and b.to_position is null
        and b.from_position > rewind_queue.to_position;
    delete from headwater_internal.redelivery r where r.queue_id = target.id and r.position > to_position;
    delete from headwater_internal.dead_letter d where d.queue_id = target.id and d.position > to_position;
    delete from headwater_internal.queue_progress p where p.queue_id = target.id;
    update headwater_internal.redelivery r
    set attempt = r.attempt - 1, token = null, worker = null, visible_at = clock_timestamp(),
        dated_at = clock_timestamp()
    where r.queue_id = target.id and r.token is not null;
    with void as (
        delete from headwater_internal.ledger l where l.queue_id = target.id returning l.*
    )
    insert into headwater_internal.redelivery (queue_id, position, topic_id, attempt, visible_at, key_hash)
    select
        target.id, e.position, e.topic_id, 0,
        case when target.ordered_keys and e.key is not null then 'infinity' else clock_timestamp() end,
        case when target.ordered_keys then headwater_internal.key_order_hash(e.key) end
    from void v
    cross join lateral headwater_internal.bound_events(
        target.id, headwater_internal.bound_topics(target.id, v.lo - 1), v.lo, least(v.hi, to_position)
    ) as e
    where not v.settled and (v.acked is null or not e.position <@ v.acked)
    on conflict (queue_id, position) do nothing;
    if target.ordered_keys then
        perform headwater_internal.free_next_of_keys(target.id, headwater_internal.waiting_keys(target.id));
    end if;
end;
$$;

-- A pattern of words as a regular expression over '.word.word': * is one word, # any number of words. As in AMQP, a
-- word may be empty, and an event without a routing key has no words.
create or replace function headwater_internal.pattern_regex(pattern text)
returns text
language sql
immutable strict
return (
    select '^' || string_agg(
        case w.word
            when '*' then '\.[^.]*'
            when '#' then '(?:\.[^.]*)*'
            else '\.' || regexp_replace(w.word, '([^A-Za-z0-9_-])', '\\\1', 'g')
        end,
        '' order by w.ordinal
    ) || '$'
    from unnest(string_to_array(pattern, '.')) with ordinality as w (word, ordinal)
);

-- Bind a queue to more events, those that match every argument given, and return the binding. It applies to events
-- after from_position (null: to those that the queue has not claimed yet; a rewind then also delivers earlier ones).
-- With a given from_position no rewind goes below it, and a from_position below the claimed position has no effect
-- until the queue is rewound. HW011 if the queue does not exist, HW004 if the topic does not exist, HW002 for an
-- invalid pattern.
create or replace function headwater.bind(
    queue_name text,
    topic text default null,
    pattern text default null,
    headers jsonb default null,
    type text default null,
    from_position bigint default null
)
returns headwater_internal.binding
language plpgsql
as $$
declare
    target headwater_internal.queue := headwater_internal.find_bound_queue(queue_name);
    bound headwater_internal.binding;
    leased int8multirange;
begin
    if '>' = any (string_to_array(bind.pattern, '.')) then
        raise exception 'invalid pattern "%": ">" is not a wildcard', bind.pattern
            using errcode = 'HW002',
                  detail = json_build_object('pattern', bind.pattern)::text,
                  hint = format(
                      'For any number of words use "#": "%s".',
                      array_to_string(array_replace(string_to_array(bind.pattern, '.'), '>', '#'), '.')
                  );
    end if;
    perform headwater_internal.lock_queue(target.id);
    target := headwater_internal.find_bound_queue(queue_name);
    -- Events that open publishers have in flight must be above the claimed position, or the queue would never deliver
    -- them.
    perform headwater_internal.await_stable(topic, headwater_internal.claimed_position(target));
    if bind.from_position < headwater_internal.claimed_position(target) then
        select range_agg(int8range(e.position, e.position, '[]')) into leased
        from headwater_internal.ledger l
        cross join lateral headwater_internal.bound_events(
            target.id, headwater_internal.bound_topics(target.id, l.lo - 1), l.lo, l.hi
        ) as e
        where l.queue_id = target.id and not l.settled;
    end if;
    insert into headwater_internal.binding
        (queue_id, topic_id, type, pattern, pattern_regex, headers, from_position, from_position_given)
    values (
        target.id,
        case when topic is not null then (headwater_internal.find_topic(topic)).id end,
        bind.type,
        bind.pattern,
        headwater_internal.pattern_regex(bind.pattern),
        bind.headers,
        coalesce(
            bind.from_position,
            (select headwater_internal.claimed_position(target) where exists (select from headwater_internal.ledger l where l.queue_id = target.id)),
            0
        ),
        bind.from_position is not null
    )
    returning * into bound;
    if leased is not null then
        -- Current leases do not change: an event that only the new binding selects was never in one.
        update headwater_internal.ledger l
        set acked = coalesce(l.acked, '{}') + n.positions
        from (
            select o.token, range_agg(int8range(e.position, e.position, '[]')) as positions
            from headwater_internal.ledger o
            cross join lateral headwater_internal.bound_events(
                target.id, headwater_internal.bound_topics(target.id, o.lo - 1), o.lo, o.hi
            ) as e
            where o.queue_id = target.id and not o.settled and not e.position <@ leased
            group by o.token
        ) as n
        where l.queue_id = target.id and l.token = n.token;
    end if;
    return bound;
end;
$$;

-- End a binding after a position, but not before the claimed position of the queue. Returns the position at which it
-- ends. HW011 if the queue or the binding does not exist.
create or replace function headwater.unbind(queue_name text, binding_id integer, to_position bigint default null)
returns bigint
language plpgsql
as $$
declare
    target headwater_internal.queue := headwater_internal.find_bound_queue(queue_name);
    ended bigint;
begin
    perform headwater_internal.lock_queue(target.id);
    target := headwater_internal.find_bound_queue(queue_name);
    update headwater_internal.binding b
    set to_position = greatest(unbind.to_position, headwater_internal.claimed_position(target), b.from_position)
    where b.queue_id = target.id and b.id = binding_id and b.to_position is null
    returning b.to_position into ended;
    if ended is null then
        raise exception 'queue "%" has no binding %', queue_name, binding_id using errcode = 'HW011';
    end if;
    return ended;
end;
$$;

-- The topics whose events a queue's bindings may select after a position. Two lists: a join on "this topic or any
-- topic" would compare each binding with each topic.
create or replace function headwater_internal.bound_topics(queue_id integer, after bigint)
returns integer[]
language sql
stable
begin atomic
    select coalesce(array_agg(n.id), '{}')
    from (
        select b.topic_id as id
        from headwater_internal.binding b
        join headwater_internal.topic t on t.id = b.topic_id and t.deleted_at is null
        where
            b.queue_id = bound_topics.queue_id and b.topic_id is not null
            and (b.to_position is null or b.to_position > after)
        union
        select t.id
        from headwater_internal.topic t
        where
            t.deleted_at is null
            and exists (
                select from headwater_internal.binding b
                where
                    b.queue_id = bound_topics.queue_id and b.topic_id is null
                    and (b.to_position is null or b.to_position > after)
            )
    ) as n;
end;

-- Whether a binding selects an event with these fields. The only definition of what a binding means. (A plain
-- expression, so that Postgres inlines it; the fields one by one, because a whole-row argument would include the
-- payload.)
create or replace function headwater_internal.binding_selects(
    b headwater_internal.binding, topic_id integer, "position" bigint, type text, routing_key text, headers jsonb
)
returns boolean
language sql
immutable
return
    (b.topic_id is null or b.topic_id = binding_selects.topic_id)
    and binding_selects.position > b.from_position
    and (b.to_position is null or binding_selects.position <= b.to_position)
    and (b.type is null or b.type = binding_selects.type)
    and (b.pattern_regex is null or coalesce('.' || binding_selects.routing_key, '') ~ b.pattern_regex)
    and (b.headers is null or binding_selects.headers @> b.headers);

-- The events of some topics between two positions that the bindings of a queue select. `without`: as if that binding
-- did not exist.
create or replace function headwater_internal.bound_events_without(
    queue_id integer, without integer, topic_ids integer[], low bigint, high bigint
)
returns setof headwater_internal.event
language sql
stable
begin atomic
    select e.*
    from headwater_internal.event e
    where
        e.topic_id = any (bound_events_without.topic_ids)
        and e.position >= low
        and e.position <= high
        -- Expired events may still wait to be deleted. (A scalar subquery, because a join might read all topics.)
        and not coalesce((select t.expired_to >= e.position from headwater_internal.topic t where t.id = e.topic_id), false)
        and exists (
            select
            -- The bindings of this topic and those of any topic: two index lookups, however many bindings exist.
            from (
                select o.* from headwater_internal.binding o
                where o.queue_id = bound_events_without.queue_id and o.topic_id = e.topic_id
                union all
                select o.* from headwater_internal.binding o
                where o.queue_id = bound_events_without.queue_id and o.topic_id is null
            ) as b
            where
                b.id is distinct from without
                and headwater_internal.binding_selects(b, e.topic_id, e.position, e.type, e.routing_key, e.headers)
        );
end;

-- The events of some topics between two positions that the bindings of a queue select.
create or replace function headwater_internal.bound_events(queue_id integer, topic_ids integer[], low bigint, high bigint)
returns setof headwater_internal.event
language sql
stable
begin atomic
    select e.*
    from headwater_internal.bound_events_without(bound_events.queue_id, null, bound_events.topic_ids, low, high) as e;
end;
