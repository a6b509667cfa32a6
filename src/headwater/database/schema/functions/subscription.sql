-- SQL subscriptions: the events that a queue's readers receive, matched together for each distinct filter.

-- The payload as JSON; null if it is not JSON, or contains a number that Postgres cannot represent.
create or replace function headwater_internal.as_json(payload bytea, content_type text)
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

-- Params under the id of their queue, as stored in the index on subscriptions.
create or replace function headwater_internal.filter_probe(queue_id integer, params jsonb)
returns jsonb
language plpgsql
immutable
as $$
begin
    return jsonb_build_object(queue_id::text, params);
end;
$$;

-- Events as filters see them.
create or replace function headwater_internal.as_filter_events(stored headwater.stored_event[])
returns headwater.filter_event[]
language plpgsql
stable
as $$
begin
    -- All at once, which nearly always works; otherwise one by one, to find the payloads that are not JSON.
    return array(
        select (
            r.position, r.topic, r.partition, r.key, r.type, r.routing_key, r.headers, r.content_type, r.payload,
            r.event_id, r.published_at,
            case when r.content_type is null or r.content_type = 'application/json' then
                convert_from(r.payload, 'UTF8')::jsonb
            end
        )::headwater.filter_event
        from unnest(stored) as r
    );
exception
    when data_exception or statement_too_complex or program_limit_exceeded then
        return array(
            select (
                r.position, r.topic, r.partition, r.key, r.type, r.routing_key, r.headers, r.content_type, r.payload,
                r.event_id, r.published_at, headwater_internal.as_json(r.payload, r.content_type)
            )::headwater.filter_event
            from unnest(stored) as r
        );
end;
$$;

-- Subscribe a queue to the events that match a filter, and return the subscription. Equal subscriptions of a queue are
-- one; subscribing again keeps it alive, and resumes its filter if that was stopped. A missing queue is created and
-- reads from now on. A new subscription gets the events after `from_position` (null: those that the queue has not
-- read). HW002 if the filter is rejected or the queue has bindings, HW015 if the database has no role for filters.
create or replace function headwater.subscribe(
    queue_name text,
    filter text,
    params jsonb default '{}',
    expires_after interval default null,
    from_position bigint default null,
    topics text[] default null
)
returns headwater_internal.subscription
language plpgsql
as $$
declare
    target headwater_internal.queue;
    filter_hash constant bytea := sha256(convert_to(filter, 'UTF8'));
    used headwater_internal.filter;
    made headwater_internal.subscription;
begin
    if to_regprocedure('headwater_filter.install(text)') is null then
        raise exception 'filters are not available: the role headwater_filter does not exist'
            using errcode = 'HW015', hint = 'Run `headwater doctor`: it prints how to create the role.';
    end if;
    select * into target from headwater_internal.queue g where g.name = queue_name;
    if not found then
        insert into headwater_internal.queue (name, kind, start_position, holds_retention)
        values (queue_name, 'subscriptions', headwater.stable_position(), false)
        on conflict (name) do nothing;
        target := headwater_internal.find_queue(queue_name);
    end if;
    if target.kind <> 'subscriptions' then
        raise exception 'queue "%" has bindings: it cannot have SQL subscriptions', queue_name using errcode = 'HW002';
    end if;
    insert into headwater_internal.reading (queue_id, position, topics)
    values (target.id, target.start_position, subscribe.topics)
    on conflict (queue_id) do nothing;

    select * into used from headwater_internal.filter c where c.hash = filter_hash;
    if not found or to_regproc('headwater_filter.' || quote_ident(used.function_name)) is null then
        begin
            insert into headwater_internal.filter as c (expression, hash, function_name)
            values (filter, filter_hash, headwater_filter.install(filter))
            on conflict (hash) do update set function_name = excluded.function_name
            returning * into used;
        exception
            when syntax_error_or_access_rule_violation or data_exception or feature_not_supported
                or invalid_transaction_state or invalid_cursor_definition or program_limit_exceeded
            then
                raise exception 'the filter is not a boolean expression over e and s: %', sqlerrm
                    using errcode = 'HW002',
                          hint = 'For example: e.topic = ''orders'' and s.params @> jsonb_build_object(''user'', e.data -> ''user'')';
        end;
    end if;
    insert into headwater_internal.subscription as s (queue_id, filter_id, params, params_hash, from_position, expires_after)
    values (
        target.id, used.id, subscribe.params, sha256(convert_to(subscribe.params::text, 'UTF8')),
        coalesce(
            subscribe.from_position,
            (
                select greatest(d.position, d.others_done_to) from headwater_internal.reading d where d.queue_id = target.id
            )
        ),
        subscribe.expires_after
    )
    on conflict (queue_id, filter_id, params_hash) do update
        -- The longest requested lifetime applies.
        set expires_after = case
                when s.expires_after is null or excluded.expires_after is null then null
                else greatest(s.expires_after, excluded.expires_after)
            end,
            last_active_at = clock_timestamp()
    returning * into made;
    update headwater_internal.filter_stop f
    set stopped_at = null
    where f.queue_id = target.id and f.filter_id = used.id and f.stopped_at is not null;
    return made;
end;
$$;

-- Resume the stopped filter of a subscription: its queue goes back to where the filter stopped and catches up for it.
-- Returns false if it was not stopped.
create or replace function headwater.resume_filter(subscription_id bigint)
returns boolean
language plpgsql
as $$
begin
    update headwater_internal.filter_stop f
    set stopped_at = null
    from headwater_internal.subscription s
    where
        s.id = resume_filter.subscription_id and f.queue_id = s.queue_id and f.filter_id = s.filter_id
        and f.stopped_at is not null;
    return found;
end;
$$;

-- Stopped filters: those that took too long for one event, with the last position that each has processed. `expired`:
-- events that the filter has not processed were removed by retention.
create or replace view headwater.stopped_filter as
select
    g.name as queue_name,
    c.expression as filter,
    f.position,
    f.stopped_at,
    f.error,
    exists (
        select from headwater_internal.topic t
        where
            t.deleted_at is null and t.expired_to > f.position and (d.topics is null or t.name = any (d.topics))
    ) as expired,
    (
        select count(*) from headwater_internal.subscription s
        where s.queue_id = f.queue_id and s.filter_id = f.filter_id
    ) as subscriptions
from headwater_internal.filter_stop f
join headwater_internal.queue g on g.id = f.queue_id
join headwater_internal.filter c on c.id = f.filter_id
join headwater_internal.reading d on d.queue_id = f.queue_id
where f.stopped_at is not null;

-- Delete a subscription. Returns true if it existed.
create or replace function headwater.unsubscribe(subscription_id bigint)
returns boolean
language plpgsql
as $$
begin
    delete from headwater_internal.subscription s where s.id = subscription_id;
    return found;
end;
$$;

-- Record that subscriptions are in use, so that they do not expire.
create or replace function headwater.keep_subscriptions(subscription_ids bigint[])
returns void
language sql
begin atomic
    update headwater_internal.subscription s
    set last_active_at = clock_timestamp()
    where s.id = any (subscription_ids) and s.last_active_at < clock_timestamp() - interval '1 second';
end;

-- Delete expired subscriptions, then filters without subscriptions. Returns the number of subscriptions deleted.
create or replace function headwater_internal.expire_subscriptions()
returns integer
language plpgsql
as $$
declare
    expired integer;
    unused headwater_internal.filter;
begin
    delete from headwater_internal.subscription s where s.last_active_at + s.expires_after < clock_timestamp();
    get diagnostics expired = row_count;
    delete from headwater_internal.filter_stop f
    where
        not f.catching_up
        and not exists (
            select from headwater_internal.subscription s where s.queue_id = f.queue_id and s.filter_id = f.filter_id
        );
    for unused in
        delete from headwater_internal.filter c
        where
            c.created_at < clock_timestamp() - interval '1 hour'
            and not exists (select from headwater_internal.subscription s where s.filter_id = c.id)
        returning *
    loop
        perform headwater_filter.uninstall(unused.function_name);
    end loop;
    return expired;
end;
$$;

-- Acquire or extend the right to be the only reader of a queue, for `lease_seconds`; returns the state of the reading.
-- HW014 if the queue has another reader.
create or replace function headwater.hold_reading(queue_name text, reader text, lease_seconds float8)
returns headwater_internal.reading
language plpgsql
as $$
declare
    target constant headwater_internal.queue := headwater_internal.find_queue(queue_name);
    held headwater_internal.reading;
begin
    update headwater_internal.reading d
    set
        reader = hold_reading.reader,
        leased_until = clock_timestamp() + make_interval(secs => lease_seconds),
        leased_at = clock_timestamp()
    where
        d.queue_id = target.id
        and (d.reader is null or d.reader = hold_reading.reader or d.leased_until < clock_timestamp())
    returning * into held;
    if not found then
        select * into held from headwater_internal.reading d where d.queue_id = target.id;
        raise exception 'queue "%" is read by % until %', queue_name, coalesce(held.reader, 'an unnamed reader'), held.leased_until
            using errcode = 'HW014',
                  detail = json_build_object('reader', held.reader, 'leased_until', held.leased_until)::text,
                  hint = 'A queue of SQL subscriptions has one reader at a time: try again later, or peek.';
    end if;
    return held;
end;
$$;

-- Match events against filters of a queue. A filter that fails on an event does not match it, and the error is
-- recorded; the filter and the event are found by bisection.
create or replace function headwater_internal.match_filters(
    target_id integer, function_names text[], filter_ids integer[], events headwater.filter_event[]
)
returns headwater_internal.filter_match[]
language plpgsql
volatile
as $$
declare
    filters constant integer := cardinality(filter_ids);
    middle constant integer := cardinality(events) / 2;
begin
    if filters = 0 or cardinality(events) = 0 then
        return '{}';
    end if;
    return headwater_filter.match(function_names, filter_ids, events, target_id);
exception
    when query_canceled then
        raise;
    when others then
        if filters > 1 then
            return headwater_internal.match_filters(
                target_id, function_names[:filters / 2], filter_ids[:filters / 2], events
            ) || headwater_internal.match_filters(
                target_id, function_names[filters / 2 + 1:], filter_ids[filters / 2 + 1:], events
            );
        elsif middle > 0 then
            return headwater_internal.match_filters(target_id, function_names, filter_ids, events[:middle])
                || headwater_internal.match_filters(target_id, function_names, filter_ids, events[middle + 1:]);
        end if;
        update headwater_internal.filter c
        set
            last_error = left(format('at position %s: %s', (events[1]).position, sqlerrm), 10000),
            last_error_at = clock_timestamp(),
            errors = c.errors + 1
        where c.id = filter_ids[1];
        return '{}';
end;
$$;

-- The filters of a queue's subscriptions: a loose index scan with one probe of the index on queue, filter and params
-- for each. No other index has this order, so the planner has no other choice.
create or replace function headwater_internal.filters_of_queue(target_id integer)
returns integer[]
language plpgsql
stable
set enable_seqscan = off
set enable_bitmapscan = off
set enable_sort = off
as $$
begin
    return array(
        with recursive used (id) as (
            (
                select s.filter_id from headwater_internal.subscription s
                where s.queue_id = target_id
                order by s.queue_id, s.filter_id
                limit 1
            )
            union all
            select n.filter_id
            from used u
            cross join lateral (
                select s.filter_id from headwater_internal.subscription s
                where s.queue_id = target_id and s.filter_id > u.id
                order by s.queue_id, s.filter_id
                limit 1
            ) as n
        )
        select u.id from used u
    );
end;
$$;

-- Match events against all filters of a queue, each within the events that it has not processed yet: a stopped filter
-- up to where it stopped, one that catches up from there on, the others from the position that they had all reached. A
-- peek ignores this state. `one_by_one` evaluates filter by filter; on a timeout it returns null, and the filter that
-- took too long is stopped.
create or replace function headwater_internal.match(
    held headwater_internal.reading, events headwater.filter_event[], peek boolean, one_by_one boolean
)
returns headwater_internal.filter_match[]
language plpgsql
volatile
set enable_seqscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set plan_cache_mode = force_generic_plan
as $$
declare
    one record;
    slowest integer;
    asking integer;
    asked_at timestamptz;
    longest interval := '0';
    matches headwater_internal.filter_match[] := '{}';
begin
    for one in
        select f.ids, f.names, f.events
        from (
            select
                array_agg(c.id order by c.id) as ids,
                array_agg(c.function_name order by c.id) as names,
                case when b.low is null and b.high is null then match.events else array(
                    select e from unnest(match.events) as e
                    where e.position > coalesce(b.low, -1) and e.position <= coalesce(b.high, e.position)
                ) end as events
            from unnest(headwater_internal.filters_of_queue(held.queue_id)) as u (id)
            join headwater_internal.filter c on c.id = u.id
            left join headwater_internal.filter_stop f on f.queue_id = held.queue_id and f.filter_id = c.id
            cross join lateral (
                select
                    case
                        when peek then null
                        when f.filter_id is null then held.others_done_to
                        else nullif(f.done_to, 0)
                    end as low,
                    case
                        when peek and f.stopped_at is not null or not peek and not f.catching_up then f.position
                    end as high
            ) as b
            group by b.low, b.high, case when one_by_one then c.id end
        ) as f
    loop
        asking := one.ids[1];
        asked_at := clock_timestamp();
        matches := matches || headwater_internal.match_filters(held.queue_id, one.names, one.ids, one.events);
        if clock_timestamp() - asked_at > longest then
            longest := clock_timestamp() - asked_at;
            slowest := one.ids[1];
        end if;
    end loop;
    return matches;
exception
    when query_canceled then
        if not one_by_one or not headwater_internal.is_out_of_time() then
            raise;
        end if;
        -- Only if this filter took most of the time.
        if clock_timestamp() - asked_at < longest then
            asking := slowest;
        end if;
        insert into headwater_internal.filter_stop as f (queue_id, filter_id, position, stopped_at, error)
        values (
            held.queue_id, asking, (events[1]).position - 1, clock_timestamp(),
            format('at position %s: timed out', (events[1]).position)
        )
        on conflict (queue_id, filter_id) do update
            set position = excluded.position, stopped_at = excluded.stopped_at, catching_up = false,
                error = excluded.error;
        return null;
end;
$$;

-- Whether a statement has used this share of its statement_timeout. By default: whether it was cancelled by it, and not
-- by a user.
create or replace function headwater_internal.is_out_of_time(share float8 default 0.9)
returns boolean
language sql
volatile
return
    current_setting('statement_timeout')::interval > interval '0'
    and clock_timestamp() - statement_timestamp() >= current_setting('statement_timeout')::interval * share;

-- The ids of all subscriptions that each event matched, in order.
create or replace function headwater_internal.merge_matches(matches headwater_internal.filter_match[])
returns setof headwater_internal.filter_match
language sql
stable
begin atomic
    with single as materialized (
        select m.position, min(m.subscription_ids) as ids, count(*) as parts
        from unnest(matches) as m
        group by m.position
    )
    select s.position, s.ids from single s where s.parts = 1
    union all
    select m.position, array_agg(i.id order by i.id)
    from single s
    join unnest(matches) as m on m.position = s.position
    cross join lateral unnest(m.subscription_ids) as i (id)
    where s.parts > 1
    group by m.position;
end;

-- The position from which a queue continues while resumed filters catch up. When everything read is committed, the
-- queue goes back to the first of them; up to the position it had reached, the other filters match nothing. Returns the
-- current state of the reading; start_at is null while there is nothing to read.
create or replace function headwater_internal.catch_up(
    inout held headwater_internal.reading, inout start_at bigint
)
language plpgsql
as $$
declare
    behind bigint;
begin
    if held.others_done_to is not null and held.position >= held.others_done_to then
        delete from headwater_internal.filter_stop f where f.queue_id = held.queue_id and f.catching_up;
        update headwater_internal.reading d set others_done_to = null where d.queue_id = held.queue_id returning * into held;
    end if;
    if held.others_done_to is null then
        select min(f.position) into behind
        from headwater_internal.filter_stop f
        where f.queue_id = held.queue_id and f.stopped_at is null;
        if behind is null then
            return;
        elsif start_at > held.position and behind < start_at then
            start_at := null;
            return;
        end if;
        update headwater_internal.filter_stop f
        set done_to = f.position, catching_up = f.stopped_at is null
        where f.queue_id = held.queue_id;
        with lost as (
            select max(t.expired_to) as lost_to
            from headwater_internal.topic t
            where t.deleted_at is null and (held.topics is null or t.name = any (held.topics))
        )
        update headwater_internal.filter c
        set
            last_error = format('events after position %s up to %s expired while the filter was stopped',
                f.position, l.lost_to),
            last_error_at = clock_timestamp()
        from headwater_internal.filter_stop f, lost l
        where f.queue_id = held.queue_id and f.catching_up and f.filter_id = c.id and l.lost_to > f.position;
        update headwater_internal.reading d
        set others_done_to = d.position, position = least(behind, d.position)
        where d.queue_id = held.queue_id
        returning * into held;
        start_at := least(behind, start_at);
    elsif
        start_at < held.others_done_to
        and not exists (
            select from headwater_internal.filter_stop f
            where f.queue_id = held.queue_id and (f.catching_up or f.position > greatest(start_at, f.done_to))
        )
    then
        -- The filters that caught up are stopped again or deleted.
        start_at := null;
    end if;
end;
$$;

-- Lease the retries of a queue that are due, for as long as its reader; returns their events.
create or replace function headwater_internal.lease_due_retries(
    held headwater_internal.reading, batch_size integer, lease_seconds float8
)
returns setof headwater.matched_event
language plpgsql
as $$
begin
    return query
    with due as (
        update headwater_internal.subscription_retry r
        set due_at = clock_timestamp() + make_interval(secs => lease_seconds)
        where r.id in (
            select d.id from headwater_internal.subscription_retry d
            where d.queue_id = held.queue_id and d.due_at <= clock_timestamp()
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
    join headwater_internal.event e
        on e.topic_id = any (headwater_internal.topic_ids(held.topics)) and e.position = d.position
    join headwater_internal.topic t on t.id = e.topic_id
    order by e.position;
end;
$$;

-- Read the next events of a queue with the ids of all its subscriptions that each one matches, once each, examining up
-- to `batch_size` events; then one row without an event, whose next_position is where to continue. Reads after `after`
-- (null: after the position of the queue) and moves nothing: commit_reading() does. Events to be retried come first.
-- HW014 if the queue has another reader, unless `peek`; HW021 if `after` belongs to another epoch, HW011 if the queue
-- does not exist. One long function, because a timeout must be caught where the events are read and matched.
create or replace function headwater.read_next(
    queue_name text,
    reader text,
    after bigint default null,
    batch_size integer default 100,
    lease_seconds float8 default 30,
    peek boolean default false,
    epoch integer default null
)
returns setof headwater.matched_event
language plpgsql
volatile
as $$
declare
    target constant headwater_internal.queue := headwater_internal.find_queue(queue_name);
    held headwater_internal.reading;
    stable_to bigint;
    stored headwater.stored_event[];
    events headwater.filter_event[];
    matches headwater_internal.filter_match[];
    start_at bigint;
    going_on_at bigint;
    wanted integer;
    one_by_one boolean;
    caught record;
begin
    if after is not null and (epoch <> headwater.current_epoch() or after > headwater.head()) then
        perform headwater_internal.refuse_other_epoch(epoch, after);
    end if;
    if peek then
        select * into held from headwater_internal.reading d where d.queue_id = target.id;
    else
        held := headwater.hold_reading(queue_name, reader, lease_seconds);
        return query select * from headwater_internal.lease_due_retries(held, batch_size, lease_seconds);
    end if;
    start_at := coalesce(after, held.position);
    if not peek then
        select * into caught from headwater_internal.catch_up(held, start_at);
        held := caught.held;
        start_at := caught.start_at;
        if start_at is null then
            -- Nothing for now: the events read must be committed first, or all of them were processed before.
            return next (
                greatest(coalesce(after, held.position), held.others_done_to),
                null, null, null, null, null, null, null, null, null, null, null, null, null, null, null, null
            )::headwater.matched_event;
            return;
        end if;
    end if;
    stable_to := headwater.stable_position(held.topics);
    one_by_one := coalesce(held.max_events = 0, false);
    wanted := case when held.max_events is null then batch_size else least(batch_size, greatest(held.max_events, 1)) end;
    begin
        select array_agg(r order by r.position) into stored
        from headwater_internal.read_stable(held.topics, start_at, stable_to, wanted, 16777216, stable_to) as r;
        events := case when stored is null then '{}' else headwater_internal.as_filter_events(stored) end;
        matches := '{}';
        if stored is not null then
            matches := headwater_internal.match(
                held, coalesce(headwater_internal.undirected(events), '{}'), peek, one_by_one
            );
        end if;
        if matches is not null and stored is not null then
            -- Events directed at one subscription are delivered once, also while a filter catches up.
            matches := matches || headwater_internal.directed_matches(target, events, held.others_done_to);
            matches := array(select m from headwater_internal.merge_matches(matches) as m);
        end if;
        -- The rest of the time is for the answer. If too little is left, wait for the timeout here, where it is caught:
        -- after this block it would only fail, each time again. It comes once in a statement.
        if not one_by_one and headwater_internal.is_out_of_time(0.75) then
            perform pg_sleep(extract(epoch from current_setting('statement_timeout')::interval));
        end if;
    exception
        when query_canceled then
            if one_by_one or not headwater_internal.is_out_of_time() then
                raise;
            end if;
            matches := null;
    end;
    if matches is null then
        -- Timed out. No event is skipped: the same events are read again in smaller parts.
        update headwater_internal.reading d
        set max_events = case when one_by_one then 1 else coalesce(nullif(cardinality(events), 0), wanted) / 2 end
        where d.queue_id = target.id;
        going_on_at := start_at;
    else
        going_on_at := coalesce((stored[cardinality(stored)]).position, greatest(start_at, stable_to));
        if held.max_events is not null and stored is not null then
            update headwater_internal.reading d
            set max_events = nullif(least(greatest(d.max_events, 1) * 2, batch_size), batch_size)
            where d.queue_id = target.id;
        end if;
        return query
        select
            null::bigint, m.subscription_ids, null::bigint, null::text, 1,
            r.position, r.topic, r.partition, r.topic_offset, r.key, r.type, r.routing_key,
            r.headers, r.content_type, r.payload, r.event_id, r.published_at
        from unnest(stored) as r
        join unnest(matches) as m on m.position = r.position
        order by r.position;
    end if;
    return next (
        going_on_at, null, null, null, null, null, null, null, null, null, null, null, null, null, null, null, null
    )::headwater.matched_event;
end;
$$;

-- Commit the position up to which a queue has been read; `release` lets another reader take over at once. HW014 if the
-- queue has another reader, HW021 if the position was read in another epoch.
create or replace function headwater.commit_reading(
    queue_name text, reader text, to_position bigint, release boolean default false, epoch integer default null
)
returns void
language plpgsql
as $$
declare
    held constant headwater_internal.reading := headwater.hold_reading(queue_name, reader, 30);
begin
    if epoch <> headwater.current_epoch() or to_position > headwater.head() then
        perform headwater_internal.refuse_other_epoch(epoch, to_position);
    end if;
    update headwater_internal.reading d
    set
        position = to_position,
        reader = case when release then null else d.reader end,
        leased_until = case when release then null else d.leased_until end
    where d.queue_id = held.queue_id;
end;
$$;
