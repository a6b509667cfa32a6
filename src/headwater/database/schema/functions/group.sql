-- Groups and what they are bound to.

-- The group of that name, or HW011.
create or replace function headwater.find_group(group_name text)
returns headwater.consumer_group
language plpgsql
stable
as $$
declare
    found_group headwater.consumer_group;
begin
    select * into found_group from headwater.consumer_group g where g.name = group_name;
    if not found then
        raise exception 'there is no group "%"', group_name
            using errcode = 'HW011',
                  detail = json_build_object('group', group_name)::text,
                  hint = 'Create it: headwater group create, or headwater.create_group().';
    end if;
    return found_group;
end;
$$;

-- The queue of that name; HW002 for a group that reads for subscriptions.
create or replace function headwater.find_queue(group_name text)
returns headwater.consumer_group
language plpgsql
stable
as $$
declare
    found_group constant headwater.consumer_group := headwater.find_group(group_name);
begin
    if found_group.kind <> 'queue' then
        raise exception 'group "%" reads for subscriptions: it has no bindings and no leases', group_name
            using errcode = 'HW002';
    end if;
    return found_group;
end;
$$;

-- Only the holder may claim for a group or move its frontier. Held to the end of the transaction.
create or replace function headwater.lock_group(group_id integer)
returns void
language sql
return pg_advisory_xact_lock((29290::bigint << 48) | group_id);

create or replace function headwater.try_lock_group(group_id integer)
returns boolean
language sql
return pg_try_advisory_xact_lock((29290::bigint << 48) | group_id);

-- The last position that a group has claimed: the end of its newest claim.
create or replace function headwater.frontier(target headwater.consumer_group)
returns bigint
language sql
stable
return coalesce(
    (
        select l.hi
        from headwater.ledger l
        where l.group_id = target.id and l.token > target.start_token
        order by l.token desc
        limit 1
    ),
    target.start_position
);

-- Create a group at a position (null: the beginning of the log), bound to whole topics, or to none yet. An
-- existing one is HW013, unless `if_missing`: then it is returned as it is.
create or replace function headwater.create_group(
    group_name text,
    topics text[] default null,
    start_position bigint default null,
    lease_seconds float8 default null,
    max_attempts integer default null,
    backoff_seconds float8 default null,
    backoff_factor float8 default null,
    backoff_max_seconds float8 default null,
    backoff_jitter float8 default null,
    ordered_keys boolean default null,
    max_in_flight integer default null,
    must_not_lose boolean default null,
    if_missing boolean default false
)
returns headwater.consumer_group
language plpgsql
as $$
declare
    created headwater.consumer_group;
begin
    insert into headwater.consumer_group (
        name, start_position, lease_seconds, max_attempts, backoff_seconds, backoff_factor, backoff_max_seconds,
        backoff_jitter, ordered_keys, max_in_flight, must_not_lose
    )
    values (
        group_name,
        coalesce(create_group.start_position, 0),
        coalesce(create_group.lease_seconds, 30),
        coalesce(create_group.max_attempts, 5),
        coalesce(create_group.backoff_seconds, 1),
        coalesce(create_group.backoff_factor, 2),
        coalesce(create_group.backoff_max_seconds, 3600),
        coalesce(create_group.backoff_jitter, 0.2),
        coalesce(create_group.ordered_keys, false),
        create_group.max_in_flight,
        coalesce(create_group.must_not_lose, true)
    )
    on conflict (name) do nothing
    returning * into created;
    if created.id is null then
        if not if_missing then
            raise exception 'group "%" exists already', group_name
                using errcode = 'HW013', detail = json_build_object('group', group_name)::text;
        end if;
        return headwater.find_group(group_name);
    end if;
    insert into headwater.binding (group_id, topic_id, from_position)
    -- Where the group starts is the group's to say: a rewind may go further back.
    select created.id, t.id, 0
    from unnest(headwater.topic_ids(coalesce(topics, '{}'))) as t (id);
    return created;
end;
$$;

-- Change what can change; null leaves a setting as it is; 0 for max_in_flight removes the limit.
create or replace function headwater.alter_group(
    group_name text,
    lease_seconds float8 default null,
    max_attempts integer default null,
    backoff_seconds float8 default null,
    backoff_factor float8 default null,
    backoff_max_seconds float8 default null,
    backoff_jitter float8 default null,
    max_in_flight integer default null,
    must_not_lose boolean default null
)
returns headwater.consumer_group
language plpgsql
as $$
declare
    altered headwater.consumer_group := headwater.find_group(group_name);
begin
    update headwater.consumer_group g
    set
        lease_seconds = coalesce(alter_group.lease_seconds, g.lease_seconds),
        max_attempts = coalesce(alter_group.max_attempts, g.max_attempts),
        backoff_seconds = coalesce(alter_group.backoff_seconds, g.backoff_seconds),
        backoff_factor = coalesce(alter_group.backoff_factor, g.backoff_factor),
        backoff_max_seconds = coalesce(alter_group.backoff_max_seconds, g.backoff_max_seconds),
        backoff_jitter = coalesce(alter_group.backoff_jitter, g.backoff_jitter),
        max_in_flight = nullif(coalesce(alter_group.max_in_flight, g.max_in_flight), 0),
        must_not_lose = coalesce(alter_group.must_not_lose, g.must_not_lose)
    where g.id = altered.id
    returning * into altered;
    return altered;
end;
$$;

-- No more claims until resumed. What is leased may still be acknowledged.
create or replace function headwater.pause_group(group_name text)
returns void
language plpgsql
as $$
declare
    target constant headwater.consumer_group := headwater.find_queue(group_name);
begin
    update headwater.consumer_group g set paused_at = clock_timestamp() where g.id = target.id and g.paused_at is null;
end;
$$;

create or replace function headwater.resume_group(group_name text)
returns void
language plpgsql
as $$
declare
    target constant headwater.consumer_group := headwater.find_queue(group_name);
begin
    update headwater.consumer_group g set paused_at = null where g.id = target.id;
end;
$$;

-- Forget a group with everything about it. True if it was there.
create or replace function headwater.delete_group(group_name text)
returns boolean
language plpgsql
as $$
declare
    doomed integer;
begin
    select g.id into doomed from headwater.consumer_group g where g.name = group_name;
    if not found then
        return false;
    end if;
    perform headwater.lock_group(doomed);
    delete from headwater.ledger l where l.group_id = doomed;
    delete from headwater.redelivery r where r.group_id = doomed;
    delete from headwater.dead_letter d where d.group_id = doomed;
    delete from headwater.consumer_group g where g.id = doomed;
    return true;
end;
$$;

-- Let a group begin again after a position, back or forth: it gets every event above the position that its bindings
-- take, those that it has done before included. A binding whose from_position was not given goes back with it; one
-- whose from_position was given still takes nothing at or below that. Leases of the pass before are void; what was
-- leased or waits for another try at or below the position still gets it; dead letters there stay.
create or replace function headwater.rewind_group(group_name text, to_position bigint)
returns void
language plpgsql
as $$
declare
    target constant headwater.consumer_group := headwater.find_queue(group_name);
begin
    perform headwater.lock_group(target.id);
    update headwater.consumer_group g
    set start_position = to_position, start_token = headwater.next_token()
    where g.id = target.id;
    update headwater.binding b
    set from_position = rewind_group.to_position
    where
        b.group_id = target.id and not b.from_position_given and b.to_position is null
        and b.from_position > rewind_group.to_position;
    delete from headwater.redelivery r where r.group_id = target.id and r.position > to_position;
    delete from headwater.dead_letter d where d.group_id = target.id and d.position > to_position;
    delete from headwater.group_progress p where p.group_id = target.id;
    update headwater.redelivery r
    set attempt = r.attempt - 1, token = null, worker = null, visible_at = clock_timestamp(),
        dated_at = clock_timestamp()
    where r.group_id = target.id and r.token is not null;
    with void as (
        delete from headwater.ledger l where l.group_id = target.id returning l.*
    )
    insert into headwater.redelivery (group_id, position, topic_id, attempt, visible_at, key_hash)
    select
        target.id, e.position, e.topic_id, 0,
        case when target.ordered_keys and e.key is not null then 'infinity' else clock_timestamp() end,
        case when target.ordered_keys then headwater.key_order_hash(e.key) end
    from void v
    cross join lateral headwater.bound_events(
        target.id, headwater.bound_topics(target.id, v.lo - 1), v.lo, least(v.hi, to_position)
    ) as e
    where not v.settled and (v.acked is null or not e.position <@ v.acked)
    on conflict (group_id, position) do nothing;
    if target.ordered_keys then
        perform headwater.free_next_of_keys(target.id, headwater.waiting_keys(target.id));
    end if;
end;
$$;

-- A pattern of words as a regular expression over '.word.word': * is one word, # any number of them. As in AMQP
-- a word may be empty, and no routing key is no words.
create or replace function headwater.pattern_regex(pattern text)
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
        '' order by w.place
    ) || '$'
    from unnest(string_to_array(pattern, '.')) with ordinality as w (word, place)
);

-- Bind a group to more events: those that fit every part given. Takes effect for the events after from_position.
-- Null: for those that the group has yet to claim; events that it has passed come by a rewind, which goes below such a
-- binding's beginning. A from_position that is given is a bound: no rewind goes below it, and one below what the group
-- has claimed brings nothing by itself: rewind too.
create or replace function headwater.bind(
    group_name text,
    topic text default null,
    pattern text default null,
    headers jsonb default null,
    type text default null,
    from_position bigint default null
)
returns headwater.binding
language plpgsql
as $$
declare
    target headwater.consumer_group := headwater.find_queue(group_name);
    bound headwater.binding;
    leased int8multirange;
begin
    if '>' = any (string_to_array(bind.pattern, '.')) then
        raise exception 'invalid pattern "%": ">" is no wildcard here', bind.pattern
            using errcode = 'HW002',
                  detail = json_build_object('pattern', bind.pattern)::text,
                  hint = format(
                      'For any number of words use "#": "%s".',
                      array_to_string(array_replace(string_to_array(bind.pattern, '.'), '>', '#'), '.')
                  );
    end if;
    perform headwater.lock_group(target.id);
    target := headwater.find_queue(group_name);
    -- What the topic's publishers have in flight is above what the group has claimed, or the group would never get it.
    perform headwater.await_stable(topic, headwater.frontier(target));
    if bind.from_position < headwater.frontier(target) then
        select range_agg(int8range(e.position, e.position, '[]')) into leased
        from headwater.ledger l
        cross join lateral headwater.bound_events(
            target.id, headwater.bound_topics(target.id, l.lo - 1), l.lo, l.hi
        ) as e
        where l.group_id = target.id and not l.settled;
    end if;
    insert into headwater.binding
        (group_id, topic_id, type, pattern, pattern_regex, headers, from_position, from_position_given)
    values (
        target.id,
        case when topic is not null then (headwater.find_topic(topic)).id end,
        bind.type,
        bind.pattern,
        headwater.pattern_regex(bind.pattern),
        bind.headers,
        coalesce(
            bind.from_position,
            (select headwater.frontier(target) where exists (select from headwater.ledger l where l.group_id = target.id)),
            0
        ),
        bind.from_position is not null
    )
    returning * into bound;
    if leased is not null then
        -- Leases that are out stay what they are: an event that fits only now was never in one.
        update headwater.ledger l
        set acked = coalesce(l.acked, '{}') + n.positions
        from (
            select o.token, range_agg(int8range(e.position, e.position, '[]')) as positions
            from headwater.ledger o
            cross join lateral headwater.bound_events(
                target.id, headwater.bound_topics(target.id, o.lo - 1), o.lo, o.hi
            ) as e
            where o.group_id = target.id and not o.settled and not e.position <@ leased
            group by o.token
        ) as n
        where l.group_id = target.id and l.token = n.token;
    end if;
    return bound;
end;
$$;

-- End a binding after a position, but not before what the group has claimed. Returns the position.
create or replace function headwater.unbind(group_name text, binding_id integer, to_position bigint default null)
returns bigint
language plpgsql
as $$
declare
    target headwater.consumer_group := headwater.find_queue(group_name);
    ended bigint;
begin
    perform headwater.lock_group(target.id);
    target := headwater.find_queue(group_name);
    update headwater.binding b
    set to_position = greatest(unbind.to_position, headwater.frontier(target), b.from_position)
    where b.group_id = target.id and b.id = binding_id and b.to_position is null
    returning b.to_position into ended;
    if ended is null then
        raise exception 'group "%" has no binding %', group_name, binding_id using errcode = 'HW011';
    end if;
    return ended;
end;
$$;

-- The topics that a group's bindings may take events of, after a position. Two lists, since a join on "this topic or any"
-- would compare each binding with each topic.
create or replace function headwater.bound_topics(group_id integer, after bigint)
returns integer[]
language sql
stable
begin atomic
    select coalesce(array_agg(n.id), '{}')
    from (
        select b.topic_id as id
        from headwater.binding b
        join headwater.topic t on t.id = b.topic_id and t.deleted_at is null
        where
            b.group_id = bound_topics.group_id and b.topic_id is not null
            and (b.to_position is null or b.to_position > after)
        union
        select t.id
        from headwater.topic t
        where
            t.deleted_at is null
            and exists (
                select from headwater.binding b
                where
                    b.group_id = bound_topics.group_id and b.topic_id is null
                    and (b.to_position is null or b.to_position > after)
            )
    ) as n;
end;

-- Whether a binding selects an event with these parts. The only place that says what a binding means. (An expression
-- without a query, so that Postgres puts it in the place of its call; the parts one by one, since a whole event would be
-- put together with its payload.)
create or replace function headwater.binding_selects(
    b headwater.binding, topic_id integer, "position" bigint, type text, routing_key text, headers jsonb
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

-- The events of some topics, from one position to another, that a group is bound to.
-- `without`: as if one of its bindings were not there.
create or replace function headwater.bound_events_without(
    group_id integer, without integer, topic_ids integer[], low bigint, high bigint
)
returns setof headwater.event
language sql
stable
begin atomic
    select e.*
    from headwater.event e
    where
        e.topic_id = any (bound_events_without.topic_ids)
        and e.position >= low
        and e.position <= high
        -- What retention took may still wait to be cleared away. (A scalar, since a join might read all topics.)
        and not coalesce((select t.expired_to >= e.position from headwater.topic t where t.id = e.topic_id), false)
        and exists (
            select
            -- Those of this topic and those of any: two lookups, however many bindings there are.
            from (
                select o.* from headwater.binding o
                where o.group_id = bound_events_without.group_id and o.topic_id = e.topic_id
                union all
                select o.* from headwater.binding o
                where o.group_id = bound_events_without.group_id and o.topic_id is null
            ) as b
            where
                b.id is distinct from without
                and headwater.binding_selects(b, e.topic_id, e.position, e.type, e.routing_key, e.headers)
        );
end;

create or replace function headwater.bound_events(group_id integer, topic_ids integer[], low bigint, high bigint)
returns setof headwater.event
language sql
stable
begin atomic
    select e.*
    from headwater.bound_events_without(bound_events.group_id, null, bound_events.topic_ids, low, high) as e;
end;
