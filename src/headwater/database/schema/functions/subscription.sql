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

-- Params under the id of their group, as the index on subscriptions has them.
create or replace function headwater.filter_probe(group_id integer, params jsonb)
returns jsonb
language plpgsql
immutable
as $$
begin
    return jsonb_build_object(group_id::text, params);
end;
$$;

-- Events as filters see them.
create or replace function headwater.as_condition_events(stored headwater.stored_event[])
returns headwater.condition_event[]
language plpgsql
stable
as $$
begin
    -- All at once, which nearly always works; a payload that is no JSON is found out one by one.
    return array(
        select (
            r.position, r.topic, r.partition, r.key, r.type, r.routing_key, r.headers, r.content_type, r.payload,
            r.event_id, r.published_at,
            case when r.content_type is null or r.content_type = 'application/json' then
                convert_from(r.payload, 'UTF8')::jsonb
            end
        )::headwater.condition_event
        from unnest(stored) as r
    );
exception
    when data_exception or statement_too_complex or program_limit_exceeded then
        return array(
            select (
                r.position, r.topic, r.partition, r.key, r.type, r.routing_key, r.headers, r.content_type, r.payload,
                r.event_id, r.published_at, headwater.as_json(r.payload, r.content_type)
            )::headwater.condition_event
            from unnest(stored) as r
        );
end;
$$;

-- Subscribe a group to events that fulfil a condition. Equal subscriptions of a group are one; subscribing again
-- keeps it alive, and resumes the filter if it was stopped. The group is made if it is missing, and reads from now on; a new subscription gets the events
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
    if not found or to_regproc('headwater_condition.' || quote_ident(used.function_name)) is null then
        begin
            insert into headwater.condition as c (expression, hash, function_name)
            values (condition, condition_hash, headwater_condition.install(condition))
            on conflict (hash) do update set function_name = excluded.function_name
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
            subscribe.from_position,
            (
                select greatest(d.position, d.others_done_to) from headwater.reading d where d.group_id = target.id
            )
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
    update headwater.filter_stop f
    set stopped_at = null
    where f.group_id = target.id and f.condition_id = used.id and f.stopped_at is not null;
    return made;
end;
$$;

-- Try the filter of a subscription again, after it was stopped: its group goes back to where it stopped and catches up
-- for it. False if it was not stopped.
create or replace function headwater.resume_filter(subscription_id bigint)
returns boolean
language plpgsql
as $$
begin
    update headwater.filter_stop f
    set stopped_at = null
    from headwater.subscription s
    where
        s.id = resume_filter.subscription_id and f.group_id = s.group_id and f.condition_id = s.condition_id
        and f.stopped_at is not null;
    return found;
end;
$$;

-- Filters that one event took too long, with the last position that they have had. `expired`: retention took events
-- that they have not had.
create or replace view headwater.stopped_filter as
select
    g.name as group_name,
    c.expression as filter,
    f.position,
    f.stopped_at,
    f.error,
    exists (
        select from headwater.topic t
        where
            t.deleted_at is null and t.expired_to > f.position and (d.topics is null or t.name = any (d.topics))
    ) as expired,
    (
        select count(*) from headwater.subscription s
        where s.group_id = f.group_id and s.condition_id = f.condition_id
    ) as subscriptions
from headwater.filter_stop f
join headwater.consumer_group g on g.id = f.group_id
join headwater.condition c on c.id = f.condition_id
join headwater.reading d on d.group_id = f.group_id
where f.stopped_at is not null;

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
    delete from headwater.filter_stop f
    where
        not f.catching_up
        and not exists (
            select from headwater.subscription s where s.group_id = f.group_id and s.condition_id = f.condition_id
        );
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
        leased_until = clock_timestamp() + make_interval(secs => lease_seconds),
        leased_at = clock_timestamp()
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

-- Match events against filters of a group. A filter that fails on an event does not match it, and the error is noted:
-- which filter and which event is found by halving.
create or replace function headwater.match_filters(
    target_id integer, function_names text[], condition_ids integer[], events headwater.condition_event[]
)
returns headwater.condition_match[]
language plpgsql
volatile
as $$
declare
    filters constant integer := cardinality(condition_ids);
    middle constant integer := cardinality(events) / 2;
begin
    if filters = 0 or cardinality(events) = 0 then
        return '{}';
    end if;
    return headwater_condition.match(function_names, condition_ids, events, target_id);
exception
    when query_canceled then
        raise;
    when others then
        if filters > 1 then
            return headwater.match_filters(
                target_id, function_names[:filters / 2], condition_ids[:filters / 2], events
            ) || headwater.match_filters(
                target_id, function_names[filters / 2 + 1:], condition_ids[filters / 2 + 1:], events
            );
        elsif middle > 0 then
            return headwater.match_filters(target_id, function_names, condition_ids, events[:middle])
                || headwater.match_filters(target_id, function_names, condition_ids, events[middle + 1:]);
        end if;
        update headwater.condition c
        set
            last_error = left(format('at position %s: %s', (events[1]).position, sqlerrm), 10000),
            last_error_at = clock_timestamp(),
            errors = c.errors + 1
        where c.id = condition_ids[1];
        return '{}';
end;
$$;

-- The filters (conditions) that a group has subscriptions of: a loose index scan, one probe of the index on group, filter
-- and params for each. It is the only index with this order, and nothing else is left to the planner.
create or replace function headwater.filters_of_group(target_id integer)
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
                select s.condition_id from headwater.subscription s
                where s.group_id = target_id
                order by s.group_id, s.condition_id
                limit 1
            )
            union all
            select n.condition_id
            from used u
            cross join lateral (
                select s.condition_id from headwater.subscription s
                where s.group_id = target_id and s.condition_id > u.id
                order by s.group_id, s.condition_id
                limit 1
            ) as n
        )
        select u.id from used u
    );
end;
$$;

-- Match events against all filters of a group, each within the events that it has yet to have: a stopped filter up to
-- where it stopped, one that catches up from there on, the others from where they all were before. A peek has no past.
-- `one_by_one` asks filter by filter; on a timeout it returns null, and the filter that took too long is stopped.
create or replace function headwater.match(
    held headwater.reading, events headwater.condition_event[], peek boolean, one_by_one boolean
)
returns headwater.condition_match[]
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
    matches headwater.condition_match[] := '{}';
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
            from unnest(headwater.filters_of_group(held.group_id)) as u (id)
            join headwater.condition c on c.id = u.id
            left join headwater.filter_stop f on f.group_id = held.group_id and f.condition_id = c.id
            cross join lateral (
                select
                    case
                        when peek then null
                        when f.condition_id is null then held.others_done_to
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
        matches := matches || headwater.match_filters(held.group_id, one.names, one.ids, one.events);
        if clock_timestamp() - asked_at > longest then
            longest := clock_timestamp() - asked_at;
            slowest := one.ids[1];
        end if;
    end loop;
    return matches;
exception
    when query_canceled then
        if not one_by_one or not headwater.is_out_of_time() then
            raise;
        end if;
        -- Only the one that took most of the time alone.
        if clock_timestamp() - asked_at < longest then
            asking := slowest;
        end if;
        insert into headwater.filter_stop as f (group_id, condition_id, position, stopped_at, error)
        values (
            held.group_id, asking, (events[1]).position - 1, clock_timestamp(),
            format('at position %s: ran out of time', (events[1]).position)
        )
        on conflict (group_id, condition_id) do update
            set position = excluded.position, stopped_at = excluded.stopped_at, catching_up = false,
                error = excluded.error;
        return null;
end;
$$;

-- Whether a statement was cancelled since its statement_timeout is over, and not by a person.
create or replace function headwater.is_out_of_time()
returns boolean
language sql
volatile
return
    current_setting('statement_timeout')::interval > interval '0'
    and clock_timestamp() - statement_timestamp() >= current_setting('statement_timeout')::interval * 0.9;

-- The ids of all subscriptions that each event matched, in order.
create or replace function headwater.merge_matches(matches headwater.condition_match[])
returns setof headwater.condition_match
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

-- Where a group goes on while filters that were resumed catch up. When all that was read is noted as done, the group
-- goes back to the first of them; up to where it was, the other filters match nothing. Returns the reading as it is
-- now; start_at is null while there is nothing to read.
create or replace function headwater.catch_up(
    inout held headwater.reading, inout start_at bigint
)
language plpgsql
as $$
declare
    behind bigint;
begin
    if held.others_done_to is not null and held.position >= held.others_done_to then
        delete from headwater.filter_stop f where f.group_id = held.group_id and f.catching_up;
        update headwater.reading d set others_done_to = null where d.group_id = held.group_id returning * into held;
    end if;
    if held.others_done_to is null then
        select min(f.position) into behind
        from headwater.filter_stop f
        where f.group_id = held.group_id and f.stopped_at is null;
        if behind is null then
            return;
        elsif start_at > held.position and behind < start_at then
            start_at := null;
            return;
        end if;
        update headwater.filter_stop f
        set done_to = f.position, catching_up = f.stopped_at is null
        where f.group_id = held.group_id;
        with lost as (
            select max(t.expired_to) as lost_to
            from headwater.topic t
            where t.deleted_at is null and (held.topics is null or t.name = any (held.topics))
        )
        update headwater.condition c
        set
            last_error = format('events after position %s up to %s expired while the filter was stopped',
                f.position, l.lost_to),
            last_error_at = clock_timestamp()
        from headwater.filter_stop f, lost l
        where f.group_id = held.group_id and f.catching_up and f.condition_id = c.id and l.lost_to > f.position;
        update headwater.reading d
        set others_done_to = d.position, position = least(behind, d.position)
        where d.group_id = held.group_id
        returning * into held;
        start_at := least(behind, start_at);
    elsif
        start_at < held.others_done_to
        and not exists (
            select from headwater.filter_stop f
            where f.group_id = held.group_id and (f.catching_up or f.position > greatest(start_at, f.done_to))
        )
    then
        -- The filters that caught up are stopped again or gone.
        start_at := null;
    end if;
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
    peek boolean default false,
    epoch integer default null
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
    start_at bigint;
    going_on_at bigint;
    one_by_one boolean;
    caught record;
begin
    if after is not null and (epoch <> headwater.current_epoch() or after > headwater.head()) then
        perform headwater.refuse_other_epoch(epoch, after);
    end if;
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
    start_at := coalesce(after, held.position);
    if not peek then
        select * into caught from headwater.catch_up(held, start_at);
        held := caught.held;
        start_at := caught.start_at;
        if start_at is null then
            -- Nothing for now: what was read has to be noted as done first, or all of it was had before.
            return next (
                greatest(coalesce(after, held.position), held.others_done_to),
                null, null, null, null, null, null, null, null, null, null, null, null, null, null, null, null
            )::headwater.matched_event;
            return;
        end if;
    end if;
    settled_to := headwater.stable_position(held.topics);
    select array_agg(r order by r.position) into stored
    from headwater.read_settled(
        held.topics, start_at, settled_to,
        case when held.max_events is null then batch_size else least(batch_size, greatest(held.max_events, 1)) end,
        16777216, settled_to
    ) as r;
    going_on_at := coalesce((stored[cardinality(stored)]).position, greatest(start_at, settled_to));
    if stored is not null then
        events := headwater.as_condition_events(stored);
        one_by_one := coalesce(held.max_events = 0, false);
        begin
            matches := headwater.match(
                held, coalesce(headwater.undirected(events), '{}'), peek, one_by_one
            );
        exception
            when query_canceled then
                if one_by_one or not headwater.is_out_of_time() then
                    raise;
                end if;
                matches := null;
        end;
        if matches is null then
            -- Out of time. Nothing is passed over: the same events come again, in smaller parts.
            update headwater.reading d
            set max_events = case when one_by_one then 1 else cardinality(events) / 2 end
            where d.group_id = target.id;
            going_on_at := start_at;
        elsif held.max_events is not null then
            update headwater.reading d
            set max_events = nullif(least(greatest(d.max_events, 1) * 2, batch_size), batch_size)
            where d.group_id = target.id;
        end if;
        if matches is not null then
            -- What is directed at one subscription comes once, also while a filter catches up.
            matches := matches || headwater.directed_matches(target, events, held.others_done_to);
        end if;
        return query
        select
            null::bigint, m.subscription_ids, null::bigint, null::text, 1,
            r.position, r.topic, r.partition, r.topic_offset, r.key, r.type, r.routing_key,
            r.headers, r.content_type, r.payload, r.event_id, r.published_at
        from unnest(stored) as r
        join headwater.merge_matches(matches) as m on m.position = r.position
        order by r.position;
    end if;
    return next (
        going_on_at, null, null, null, null, null, null, null, null, null, null, null, null, null, null, null, null
    )::headwater.matched_event;
end;
$$;

-- Note how far a group has read; `release` lets another reader take over at once. HW014 if another is the reader, HW021
-- if the position was read in another epoch.
create or replace function headwater.set_reading(
    group_name text, reader text, to_position bigint, release boolean default false, epoch integer default null
)
returns void
language plpgsql
as $$
declare
    held constant headwater.reading := headwater.hold_reading(group_name, reader, 30);
begin
    if epoch <> headwater.current_epoch() or to_position > headwater.head() then
        perform headwater.refuse_other_epoch(epoch, to_position);
    end if;
    update headwater.reading d
    set
        position = to_position,
        reader = case when release then null else d.reader end,
        leased_until = case when release then null else d.leased_until end
    where d.group_id = held.group_id;
end;
$$;
