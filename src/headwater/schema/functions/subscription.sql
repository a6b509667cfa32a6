-- Subscriptions by SQL condition: what a group's readers get, matched together for each distinct condition.

-- The payload as JSON; null where it is none, or has a number that Postgres cannot hold.
create or replace function headwater.as_json(payload bytea, content_type text)
returns jsonb
language plpgsql
immutable
as $$
begin
    if payload is null or content_type is not null and content_type <> 'application/json' then
        return null;
    end if;
    return convert_from(payload, 'UTF8')::jsonb;
exception
    when invalid_text_representation or character_not_in_repertoire or untranslatable_character
        or statement_too_complex or program_limit_exceeded or numeric_value_out_of_range
    then
        return null;
end;
$$;

-- Subscribe a group to events that fulfil a condition. Equal subscriptions of a group are one; subscribing again
-- keeps it alive. The group is made if it is missing, and reads from now on; a new subscription gets the events
-- after `from_position`, null: those that the group has not read.
create or replace function headwater.subscribe(
    group_name text,
    condition text,
    params jsonb default '{}',
    expires_after interval default null,
    from_position bigint default null,
    topics text[] default null
)
returns headwater.subscription
language plpgsql
as $$
declare
    target headwater.consumer_group;
    condition_hash constant bytea := sha256(convert_to(condition, 'UTF8'));
    used headwater.condition;
    made headwater.subscription;
begin
    if to_regprocedure('headwater_condition.install(text)') is null then
        raise exception 'this database has no role headwater_condition, so it takes no conditions'
            using errcode = 'HW015', hint = 'Run `headwater doctor`: it says how to make it.';
    end if;
    select * into target from headwater.consumer_group g where g.name = group_name;
    if not found then
        insert into headwater.consumer_group (name, kind, start_position, must_not_lose)
        values (group_name, 'cursor', headwater.settled(), false)
        on conflict (name) do nothing;
        target := headwater.find_group(group_name);
    end if;
    if target.kind <> 'cursor' then
        raise exception 'group "%" is a queue: it has bindings, not subscriptions', group_name using errcode = 'HW002';
    end if;
    insert into headwater.reading (group_id, position, topics)
    values (target.id, target.start_position, subscribe.topics)
    on conflict (group_id) do nothing;

    select * into used from headwater.condition c where c.hash = condition_hash;
    if not found or used.broken_at is not null then
        begin
            insert into headwater.condition as c (expression, hash, function_name)
            values (condition, condition_hash, headwater_condition.install(condition))
            on conflict (hash) do update set broken_at = null, last_error = null
            returning * into used;
        exception
            when syntax_error_or_access_rule_violation or data_exception or feature_not_supported
                or invalid_transaction_state or invalid_cursor_definition or program_limit_exceeded
            then
                raise exception 'the condition is not a boolean expression over e and s: %', sqlerrm
                    using errcode = 'HW002',
                          hint = 'For example: e.topic = ''orders'' and s.params @> jsonb_build_object(''user'', e.data -> ''user'')';
        end;
    end if;
    insert into headwater.subscription as s (group_id, condition_id, params, params_hash, from_position, expires_after)
    values (
        target.id, used.id, subscribe.params, sha256(convert_to(subscribe.params::text, 'UTF8')),
        coalesce(
            subscribe.from_position, (select d.position from headwater.reading d where d.group_id = target.id)
        ),
        subscribe.expires_after
    )
    on conflict (group_id, condition_id, params_hash) do update
        -- The longest life that anybody asked for.
        set expires_after = case
                when s.expires_after is null or excluded.expires_after is null then null
                else greatest(s.expires_after, excluded.expires_after)
            end,
            last_active_at = clock_timestamp()
    returning * into made;
    return made;
end;
$$;

-- End a subscription. True if it was there.
create or replace function headwater.unsubscribe(subscription_id bigint)
returns boolean
language plpgsql
as $$
begin
    delete from headwater.subscription s where s.id = subscription_id;
    return found;
end;
$$;

-- Say that subscriptions are in use, so that they do not expire.
create or replace function headwater.keep_subscriptions(subscription_ids bigint[])
returns void
language sql
begin atomic
    update headwater.subscription s
    set last_active_at = clock_timestamp()
    where s.id = any (subscription_ids) and s.last_active_at < clock_timestamp() - interval '1 second';
end;

-- Drop what nobody uses any more: subscriptions that expired, then conditions without subscriptions.
create or replace function headwater.expire_subscriptions()
returns integer
language plpgsql
as $$
declare
    expired integer;
    unused headwater.condition;
begin
    delete from headwater.subscription s where s.last_active_at + s.expires_after < clock_timestamp();
    get diagnostics expired = row_count;
    for unused in
        delete from headwater.condition c
        where
            c.created_at < clock_timestamp() - interval '1 hour'
            and not exists (select from headwater.subscription s where s.condition_id = c.id)
        returning *
    loop
        perform headwater_condition.uninstall(unused.function_name);
    end loop;
    return expired;
end;
$$;

-- Become, or stay, the one reader of a group; HW014 if another is.
create or replace function headwater.hold_reading(group_name text, reader text, lease_seconds float8)
returns headwater.reading
language plpgsql
as $$
declare
    target constant headwater.consumer_group := headwater.find_group(group_name);
    held headwater.reading;
begin
    update headwater.reading d
    set
        reader = hold_reading.reader,
        leased_until = clock_timestamp() + make_interval(secs => lease_seconds)
    where
        d.group_id = target.id
        and (d.reader is null or d.reader = hold_reading.reader or d.leased_until < clock_timestamp())
    returning * into held;
    if not found then
        select * into held from headwater.reading d where d.group_id = target.id;
        raise exception 'group "%" is read by % until %', group_name, coalesce(held.reader, 'nobody'), held.leased_until
            using errcode = 'HW014',
                  detail = json_build_object('reader', held.reader, 'leased_until', held.leased_until)::text,
                  hint = 'One reader at a time: try again later, or peek.';
    end if;
    return held;
end;
$$;

-- Match events against all subscriptions of a group: one query for each distinct condition. A condition that fails on
-- an event does not match it. One that runs out of time (statement_timeout) is set aside, and the answer is null:
-- the clock has run out for this call too, and it must be made again.
create or replace function headwater.match(target headwater.consumer_group, events headwater.condition_event[])
returns headwater.condition_match[]
language plpgsql
volatile
as $$
declare
    used headwater.condition;
    one headwater.condition_event;
    matches headwater.condition_match[] := '{}';
begin
    for used in
        select c.* from headwater.condition c
        where
            c.broken_at is null
            and exists (select from headwater.subscription s where s.group_id = target.id and s.condition_id = c.id)
        order by c.id
    loop
        begin
            matches := matches || array(
                select m from headwater_condition.match(used.function_name, events, target.id, used.id) as m
            );
        exception
            when query_canceled then
                if sqlerrm not like '%statement timeout%' then
                    raise;
                end if;
                update headwater.condition c
                set broken_at = clock_timestamp(), last_error = 'ran out of time'
                where c.id = used.id;
                return null;
            when others then
                foreach one in array events loop
                    begin
                        matches := matches || array(
                            select m
                            from headwater_condition.match(used.function_name, array[one], target.id, used.id) as m
                        );
                    exception
                        when others then
                            update headwater.condition c
                            set last_error = left(format('at position %s: %s', one.position, sqlerrm), 10000)
                            where c.id = used.id;
                    end;
                end loop;
        end;
    end loop;
    return matches;
end;
$$;

-- The next events of a group with the ids of all its subscriptions that each one matches, once each, up to
-- `batch_size` events looked at; then one row without an event, whose next_position is where to go on. Reads after
-- `after` (null: where the group stands), and moves nothing: set_reading does. One reader at a time; `peek` reads
-- without being it. Events that a handler asked to have again come first.
create or replace function headwater.read_next(
    group_name text,
    reader text,
    after bigint default null,
    batch_size integer default 100,
    lease_seconds float8 default 30,
    peek boolean default false
)
returns setof headwater.matched_event
language plpgsql
volatile
as $$
declare
    target constant headwater.consumer_group := headwater.find_group(group_name);
    held headwater.reading;
    settled_to bigint;
    stored headwater.stored_event[];
    events headwater.condition_event[];
    matches headwater.condition_match[];
    going_on_at bigint;
begin
    if peek then
        select * into held from headwater.reading d where d.group_id = target.id;
    else
        held := headwater.hold_reading(group_name, reader, lease_seconds);
        return query
        with due as (
            update headwater.subscription_retry r
            set due_at = clock_timestamp() + make_interval(secs => lease_seconds)
            where r.id in (
                select d.id from headwater.subscription_retry d
                where d.group_id = target.id and d.due_at <= clock_timestamp()
                order by d.due_at
                limit batch_size
                for update skip locked
            )
            returning r.*
        )
        select
            null::bigint, array[d.subscription_id], d.id, d.handler, d.attempt + 1,
            e.position, t.name, e.partition, e.topic_offset, e.key, e.type, e.routing_key,
            e.headers, e.content_type, e.payload, e.event_id, e.published_at
        from due d
        join headwater.event e
            on e.topic_id = any (headwater.topic_ids(held.topics)) and e.position = d.position
        join headwater.topic t on t.id = e.topic_id
        order by e.position;
    end if;
    settled_to := headwater.settled();
    select array_agg(r order by r.position) into stored
    from headwater.read_settled(
        held.topics, coalesce(after, held.position), settled_to, batch_size, 16777216, settled_to
    ) as r;
    going_on_at := coalesce(
        (stored[cardinality(stored)]).position, greatest(coalesce(after, held.position), settled_to)
    );
    select array_agg(
        (
            r.position, r.topic, r.partition, r.key, r.type, r.routing_key, r.headers, r.content_type, r.payload,
            r.event_id, r.published_at, headwater.as_json(r.payload, r.content_type)
        )::headwater.condition_event
    )
    into events
    from unnest(stored) as r;
    if events is not null then
        matches := headwater.match(target, events);
        if matches is null then
            going_on_at := coalesce(after, held.position);
        end if;
        return query
        select
            null::bigint, m.ids, null::bigint, null::text, 1,
            r.position, r.topic, r.partition, r.topic_offset, r.key, r.type, r.routing_key,
            r.headers, r.content_type, r.payload, r.event_id, r.published_at
        from (
            select f.position, array_agg(i.id order by i.id) as ids
            from unnest(matches) as f
            cross join lateral unnest(f.subscription_ids) as i (id)
            group by f.position
        ) as m
        join unnest(stored) as r on r.position = m.position
        order by r.position;
    end if;
    return next (
        going_on_at, null, null, null, null, null, null, null, null, null, null, null, null, null, null, null, null
    )::headwater.matched_event;
end;
$$;

-- Note how far a group has read; `release` lets another reader take over at once. HW014 if another is the reader.
create or replace function headwater.set_reading(
    group_name text, reader text, to_position bigint, release boolean default false
)
returns void
language plpgsql
as $$
declare
    held constant headwater.reading := headwater.hold_reading(group_name, reader, 30);
begin
    update headwater.reading d
    set
        position = to_position,
        reader = case when release then null else d.reader end,
        leased_until = case when release then null else d.leased_until end
    where d.group_id = held.group_id;
end;
$$;

-- Have one handler of one subscription get an event again after a delay. Beyond the group's max_attempts it is given
-- up: the row stays for people to see. Returns whether there will be another try.
create or replace function headwater.retry_later(
    group_name text,
    subscription_id bigint,
    handler text,
    event_position bigint,
    attempt integer,
    delay_seconds float8 default null,
    error text default null
)
returns boolean
language plpgsql
as $$
declare
    target constant headwater.consumer_group := headwater.find_group(group_name);
    again constant boolean := attempt < target.max_attempts;
begin
    insert into headwater.subscription_retry as r
        (group_id, subscription_id, handler, position, attempt, due_at, last_error)
    values (
        target.id, retry_later.subscription_id, retry_later.handler, event_position, retry_later.attempt,
        case when again then
            clock_timestamp() + coalesce(make_interval(secs => delay_seconds), headwater.backoff(target, attempt))
        end,
        left(error, 10000)
    )
    on conflict on constraint subscription_retry_subscription_id_handler_position_key do update
        set attempt = excluded.attempt, due_at = excluded.due_at, last_error = excluded.last_error;
    return again;
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
