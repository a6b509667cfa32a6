-- The life of events in a group: claim, settle, retry, die, come back. Claiming and settling cost a row a batch;
-- only failures cost rows of their own.

-- Find out how far the log is settled and note it where every session sees it.
create or replace function headwater.refresh_settled()
returns bigint
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    settled_to constant bigint := headwater.settled();
begin
    perform setval('headwater.settled_register', settled_to);
    return settled_to;
end;
$$;

create or replace function headwater.as_multirange(positions bigint[])
returns int8multirange
language sql
immutable strict
return (select range_agg(int8range(p, p, '[]')) from unnest(positions) as p);

-- What orders the events of a key. That two keys may share a hash only makes one wait for the other.
create or replace function headwater.key_order_hash(key bytea)
returns bigint
language sql
immutable strict
return ('x' || left(md5(key), 16))::bit(64)::bigint;

-- How long a group waits after a failed try.
create or replace function headwater.backoff(target headwater.consumer_group, attempt integer)
returns interval
language sql
volatile
return make_interval(
    secs => least(
        target.backoff_seconds * power(target.backoff_factor, least(greatest(attempt - 1, 0), 200)),
        target.backoff_max_seconds
    ) * (1 + target.backoff_jitter * (2 * random() - 1))
);

-- The claims of new events that are not settled yet.
create or replace function headwater.open_claims(target headwater.consumer_group)
returns setof headwater.ledger
language sql
stable
begin atomic
    select l.*
    from headwater.ledger l
    where
        l.group_id = target.id and not l.settled
        and l.token > greatest(
            target.start_token,
            (select p.settled_token from headwater.group_progress p where p.group_id = target.id)
        );
end;

-- How many events of a group are leased now.
create or replace function headwater.in_flight(target headwater.consumer_group)
returns bigint
language sql
stable
return (
    select coalesce(sum(l.events - l.acked_events), 0)
    from headwater.open_claims(target) l
    where l.expires_at > clock_timestamp()
) + (
    select count(*)
    from headwater.redelivery r
    where r.group_id = target.id and r.token is not null and r.visible_at > clock_timestamp()
);

-- One more line in an event's history of tries.
create or replace function headwater.with_try(history jsonb, attempt integer, worker text, error text)
returns jsonb
language sql
volatile
return history || jsonb_build_object(
    'attempt', attempt, 'at', clock_timestamp(), 'worker', worker, 'error', left(error, 2000)
);

-- In a group with ordered keys: the keys of which an event waits or is tried again.
create or replace function headwater.waiting_keys(group_id integer)
returns bigint[]
language sql
stable
return array(
    select distinct r.key_hash
    from headwater.redelivery r
    where r.group_id = waiting_keys.group_id and r.key_hash is not null
);

-- Whether an event is the first of its key that waits, and none of its key is leased: `leased_keys` are those of
-- claims of new events.
create or replace function headwater.is_next_of_key(waiting headwater.redelivery, leased_keys bigint[])
returns boolean
language sql
stable
return waiting.key_hash is null or (
    waiting.key_hash <> all (leased_keys)
    and not exists (
        select from headwater.redelivery o
        where
            o.group_id = waiting.group_id and o.key_hash = waiting.key_hash
            and (o.position < waiting.position or o.token is not null)
    )
);

-- In a group with ordered keys: free the next waiting event of each of these keys.
create or replace function headwater.free_next_of_keys(group_id integer, keys bigint[])
returns void
language sql
begin atomic
    update headwater.redelivery r
    set visible_at = clock_timestamp()
    from unnest(keys) as k (key_hash)
    cross join lateral (
        select n.position
        from headwater.redelivery n
        where n.group_id = free_next_of_keys.group_id and n.key_hash = k.key_hash
        order by n.position
        limit 1
    ) as next
    where r.group_id = free_next_of_keys.group_id and r.position = next.position and r.visible_at = 'infinity';
end;

-- Turn leases that ran out into redeliveries, and forget claims that are long settled. Returns how many events
-- were given back. Any process may call it at any time.
create or replace function headwater.reap(group_name text)
returns integer
language plpgsql
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
    target constant headwater.consumer_group := headwater.find_group(group_name);
    forgotten bigint := coalesce(
        (select p.settled_token from headwater.group_progress p where p.group_id = target.id), 0
    );
    -- One time for all: they come again in the order of the log.
    ended_at constant timestamptz := clock_timestamp();
    lapsed headwater.ledger;
    lapsed_again record;
    given_back integer := 0;
    step integer;
    freed bigint[];
    lowest_open bigint;
begin
    if not headwater.try_lock_group(target.id) then
        return 0;
    end if;
    for lapsed in
        select l.* from headwater.ledger l
        where
            l.group_id = target.id and l.token > greatest(forgotten, target.start_token)
            and not l.settled and l.expires_at < ended_at
        order by l.token
        for update skip locked
    loop
        update headwater.ledger l set settled = true where l.group_id = target.id and l.token = lapsed.token;
        with unacked as (
            select
                e.position, e.topic_id,
                case when target.ordered_keys then headwater.key_order_hash(e.key) end as key_hash,
                -- Nobody knows which event of several was at fault, so none is counted down.
                case when lapsed.events - lapsed.acked_events = 1 then 1 else 0 end as attempt
            from headwater.bound_events(
                target.id, headwater.bound_topics(target.id, lapsed.lo - 1), lapsed.lo, lapsed.hi
            ) as e
            where
                (lapsed.acked is null or not e.position <@ lapsed.acked)
                -- Events that had to wait behind their key were never in this lease.
                and not exists (
                    select from headwater.redelivery r where r.group_id = target.id and r.position = e.position
                )
        ),
        died as (
            insert into headwater.dead_letter
                (group_id, position, topic_id, attempts, alone, last_error, history)
            select
                target.id, u.position, u.topic_id, u.attempt, true, 'lease expired',
                headwater.with_try('[]', u.attempt, lapsed.worker, 'lease expired')
            from unacked u
            where u.attempt >= target.max_attempts
        )
        insert into headwater.redelivery
            (group_id, position, topic_id, attempt, visible_at, alone, key_hash, last_error, history)
        select
            target.id, u.position, u.topic_id, u.attempt,
            case when u.key_hash is null then ended_at else 'infinity' end,
            true, u.key_hash, 'lease expired', headwater.with_try('[]', u.attempt, lapsed.worker, 'lease expired')
        from unacked u
        where u.attempt < target.max_attempts;
        get diagnostics step = row_count;
        given_back := given_back + step;
        if lapsed.keys is not null then
            perform headwater.free_next_of_keys(target.id, lapsed.keys);
        end if;
    end loop;

    -- The same for second tries and later.
    for lapsed_again in
        select r.token, count(*) as held
        from headwater.redelivery r
        where r.group_id = target.id and r.token is not null and r.visible_at < ended_at
        group by r.token
    loop
        select array_agg(r.key_hash) filter (where r.key_hash is not null), count(*) into freed, step
        from (
            select r.key_hash from headwater.redelivery r
            where r.group_id = target.id and r.token = lapsed_again.token
            for update skip locked
        ) as r;
        -- A lease is lost as a whole or not at all, and this one is just being settled.
        continue when step < lapsed_again.held;
        if step = 1 then
            perform headwater.bury(target, array[r.position], array['lease expired'])
            from headwater.redelivery r
            where r.group_id = target.id and r.token = lapsed_again.token and r.attempt >= target.max_attempts;
        end if;
        update headwater.redelivery r
        set
            attempt = case when step = 1 then r.attempt else r.attempt - 1 end,
            visible_at = ended_at,
            token = null,
            worker = null,
            alone = true,
            last_error = 'lease expired',
            history = headwater.with_try(
                r.history, case when step = 1 then r.attempt else r.attempt - 1 end, r.worker, 'lease expired'
            )
        where r.group_id = target.id and r.token = lapsed_again.token;
        get diagnostics step = row_count;
        given_back := given_back + step;
        if freed is not null then
            perform headwater.free_next_of_keys(target.id, freed);
        end if;
    end loop;

    -- What became due at a time at which claims do not look any more: its settle() was slow to commit.
    update headwater.redelivery r
    set visible_at = clock_timestamp()
    where
        r.group_id = target.id and r.token is null
        and r.visible_at <= (
            select l.due_after from headwater.ledger l
            where l.group_id = target.id and l.token > target.start_token
            order by l.token desc
            limit 1
        );

    -- What retention took, or went with its topic, will not be tried again.
    with gone as (
        delete from headwater.redelivery r
        using headwater.topic t
        where
            r.group_id = target.id and r.token is null and t.id = r.topic_id
            and (t.deleted_at is not null or r.position <= t.expired_to)
        returning r.key_hash
    )
    select array_agg(g.key_hash) filter (where g.key_hash is not null) into freed from gone g;
    if freed is not null then
        perform headwater.free_next_of_keys(target.id, freed);
    end if;

    -- Forget in bulk: a row a call would be a hot row.
    select min(l.token) into lowest_open
    from headwater.ledger l
    where l.group_id = target.id and l.token > forgotten and not l.settled;
    lowest_open := coalesce(lowest_open, (select max(l.token) from headwater.ledger l where l.group_id = target.id));
    if (
        select count(*) from (
            select from headwater.ledger l
            where l.group_id = target.id and l.token > forgotten and l.token < lowest_open
            limit 1000
        ) as many
    ) = 1000 then
        with gone as (
            delete from headwater.ledger l
            where l.group_id = target.id and l.token > forgotten and l.token < lowest_open
            returning l.events
        )
        insert into headwater.group_progress as p (group_id, settled_token, past_events)
        select target.id, lowest_open - 1, coalesce(sum(g.events), 0) from gone g
        on conflict (group_id) do update
            set settled_token = excluded.settled_token, past_events = p.past_events + excluded.past_events;
    end if;
    return given_back;
end;
$$;

-- Move a group's frontier past events that are not its own, in strides, so that a group whose events are rare
-- does not hold retention back. Any process may call it at any time.
create or replace function headwater.pass_over(group_name text)
returns void
language plpgsql
as $$
declare
    target headwater.consumer_group := headwater.find_group(group_name);
    stride constant integer := 10000;
    last_claimed bigint;
    ids integer[];
    pass_to bigint;
    scanned integer;
    scanned_to bigint;
    first_own bigint;
begin
    if headwater.head() - headwater.frontier(target) < stride or not headwater.try_lock_group(target.id) then
        return;
    end if;
    target := headwater.find_group(group_name);
    -- A group that was never bound to anything still waits for its beginning.
    if not exists (select from headwater.binding b where b.group_id = target.id) then
        return;
    end if;
    last_claimed := headwater.frontier(target);
    ids := headwater.bound_topics(target.id, last_claimed);
    pass_to := headwater.refresh_settled();
    select count(*), max(s.position) into scanned, scanned_to
    from (
        select f.position
        from unnest(ids) as i (id)
        cross join lateral (
            select e.position from headwater.event e
            where e.topic_id = i.id and e.position > last_claimed and e.position <= pass_to
            order by e.position
            limit stride
        ) as f
        order by f.position
        limit stride
    ) as s;
    if scanned = stride then
        pass_to := scanned_to;
    end if;
    select min(e.position) into first_own from headwater.bound_events(target.id, ids, last_claimed + 1, pass_to) as e;
    pass_to := least(pass_to, first_own - 1);
    if pass_to - last_claimed >= stride then
        insert into headwater.ledger (group_id, token, lo, hi, events, worker, expires_at, settled)
        values (
            target.id, nextval('headwater.lease_token'), last_claimed + 1, pass_to, 0, '', clock_timestamp(), true
        );
    end if;
end;
$$;

-- Claim one event whose lease ran out before: alone, so that it can take nobody with it.
create or replace function headwater.claim_suspect(
    target headwater.consumer_group, lease bigint, worker text, ends_at timestamptz, leased_keys bigint[],
    due_after timestamptz, due_to timestamptz
)
returns setof headwater.claimed_event
language sql
begin atomic
    with due as (
        select r.position
        from headwater.redelivery r
        join headwater.topic t on t.id = r.topic_id
        where
            r.group_id = target.id and r.visible_at > due_after and r.visible_at <= due_to
            and r.token is null and r.alone
            and t.deleted_at is null
            and headwater.is_next_of_key(r, leased_keys)
            and exists (select from headwater.event e where e.topic_id = r.topic_id and e.position = r.position)
        order by r.visible_at, r.position
        limit 1
        for update of r skip locked
    ),
    leased as (
        update headwater.redelivery r
        set attempt = r.attempt + 1, token = lease, worker = claim_suspect.worker, visible_at = ends_at
        where r.group_id = target.id and r.position = any (array(select d.position from due d))
        returning r.position, r.topic_id, r.attempt
    )
    select
        lease, l.attempt, true, ends_at,
        e.position, t.name, e.partition, e.topic_offset, e.key, e.type, e.routing_key,
        e.headers, e.content_type, e.payload, e.event_id, e.published_at
    from leased l
    join headwater.topic t on t.id = l.topic_id
    cross join lateral (
        select * from headwater.event f where f.topic_id = l.topic_id and f.position = l.position offset 0
    ) as e;
end;

-- Claim events that failed and are due again.
create or replace function headwater.claim_due(
    target headwater.consumer_group, lease bigint, worker text, room integer, ends_at timestamptz, leased_keys bigint[],
    due_after timestamptz, due_to timestamptz
)
returns setof headwater.claimed_event
language sql
begin atomic
    with due as (
        select r.position
        from headwater.redelivery r
        join headwater.topic t on t.id = r.topic_id
        where
            r.group_id = target.id and r.visible_at > due_after and r.visible_at <= due_to
            and r.token is null and not r.alone
            and t.deleted_at is null
            and headwater.is_next_of_key(r, leased_keys)
            and exists (select from headwater.event e where e.topic_id = r.topic_id and e.position = r.position)
        order by r.visible_at, r.position
        limit room
        for update of r skip locked
    ),
    leased as (
        update headwater.redelivery r
        set attempt = r.attempt + 1, token = lease, worker = claim_due.worker, visible_at = ends_at
        where r.group_id = target.id and r.position = any (array(select d.position from due d))
        returning r.position, r.topic_id, r.attempt
    )
    select
        lease, l.attempt, false, ends_at,
        e.position, t.name, e.partition, e.topic_offset, e.key, e.type, e.routing_key,
        e.headers, e.content_type, e.payload, e.event_id, e.published_at
    from leased l
    join headwater.topic t on t.id = l.topic_id
    -- Lateral, so that no plan joins by topic first: that of a small log would read a large one whole.
    cross join lateral (
        select * from headwater.event f where f.topic_id = l.topic_id and f.position = l.position offset 0
    ) as e
    order by e.position;
end;

-- Claim new events for a group whose bindings must be looked at event by event, or whose keys are ordered.
create or replace function headwater.claim_selected(
    target headwater.consumer_group,
    lease bigint,
    worker text,
    room integer,
    ends_at timestamptz,
    last_claimed bigint,
    settled_to bigint,
    due_after timestamptz
)
returns setof headwater.claimed_event
language plpgsql
volatile
as $$
declare
    ids constant integer[] := headwater.bound_topics(target.id, last_claimed);
    -- Every event of the topics is the group's: nothing to select.
    plain constant boolean := not target.ordered_keys and not exists (
        select from headwater.binding b
        where
            b.group_id = target.id
            and (
                b.topic_id is null or b.type is not null or b.pattern is not null or b.headers is not null
                or greatest(b.from_position, b.to_position) > last_claimed
            )
    );
    scan_size constant integer := greatest(4 * room, 1000);
    enough constant integer := case when plain then room else scan_size end;
    window_end bigint;
    scanned integer;
    scanned_to bigint;
    positions bigint[];
    topic_ids integer[];
    key_hashes bigint[];
    busy_keys bigint[];
    deferred bigint[];
begin
    -- One round, unless bindings match nothing of what was scanned: then on from there, within bounds.
    for round in 1 .. 20 loop
        window_end := settled_to;
        if cardinality(ids) > 4 then
            -- Many topics: as many positions as are to be scanned hold at most that many events.
            select min(f.position) - 1 + scan_size into window_end
            from unnest(ids) as i (id)
            cross join lateral (
                select e.position from headwater.event e
                where e.topic_id = i.id and e.position > last_claimed and e.position <= settled_to
                order by e.position
                limit 1
            ) as f;
            if window_end is null then
                return;
            end if;
            window_end := least(window_end, settled_to);
        end if;
        select count(*), max(s.position) into scanned, scanned_to
        from (
            select f.position
            from unnest(ids) as i (id)
            cross join lateral (
                select e.position from headwater.event e
                where e.topic_id = i.id and e.position > last_claimed and e.position <= window_end
                order by e.position
                limit enough
            ) as f
            order by f.position
            limit enough
        ) as s;
        if scanned = 0 then
            return;
        end if;
        if scanned < enough then
            scanned_to := window_end;
        end if;
        lease := coalesce(lease, nextval('headwater.lease_token'));

        if plain then
            return query
            select
                lease, 1, false, ends_at,
                e.position, t.name, e.partition, e.topic_offset, e.key, e.type, e.routing_key,
                e.headers, e.content_type, e.payload, e.event_id, e.published_at
            from headwater.event e
            join headwater.topic t on t.id = e.topic_id
            where e.topic_id = any (ids) and e.position > last_claimed and e.position <= scanned_to
            order by e.position;
            insert into headwater.ledger (group_id, token, lo, hi, events, worker, expires_at, settled, due_after)
            values (
                target.id, lease, last_claimed + 1, scanned_to, scanned, claim_selected.worker, ends_at, false,
                claim_selected.due_after
            );
            return;
        end if;

        if target.ordered_keys then
            select array_agg(distinct k.key_hash) into busy_keys
            from (
                select unnest(headwater.waiting_keys(target.id)) as key_hash
                union all
                select unnest(l.keys) from headwater.open_claims(target) l
            ) as k;
        end if;
        select array_agg(c.position order by c.position), array_agg(c.topic_id order by c.position),
            array_agg(c.key_hash order by c.position)
        into positions, topic_ids, key_hashes
        from (
            select
                e.position, e.topic_id,
                case when target.ordered_keys then headwater.key_order_hash(e.key) end as key_hash
            from headwater.bound_events(target.id, ids, last_claimed + 1, scanned_to) as e
        ) as c
        where c.key_hash is null or busy_keys is null or c.key_hash <> all (busy_keys);
        if cardinality(positions) > room then
            scanned_to := positions[room];
            positions := positions[:room];
            topic_ids := topic_ids[:room];
            key_hashes := key_hashes[:room];
        end if;
        deferred := null;
        if busy_keys is not null then
            -- Events of a busy key wait for their turn, outside of this lease.
            with waiting as (
                insert into headwater.redelivery (group_id, position, topic_id, attempt, visible_at, key_hash)
                select target.id, e.position, e.topic_id, 0, 'infinity', headwater.key_order_hash(e.key)
                from headwater.bound_events(target.id, ids, last_claimed + 1, scanned_to) as e
                where headwater.key_order_hash(e.key) = any (busy_keys)
                returning position
            )
            select array_agg(w.position) into deferred from waiting w;
        end if;
        if positions is null and deferred is null and scanned < least(scan_size, 100) then
            -- Too little to be worth a row: the next claim looks at it again.
            return;
        end if;
        insert into headwater.ledger
            (group_id, token, lo, hi, events, worker, expires_at, settled, acked, acked_events, keys, due_after)
        values (
            target.id, lease, last_claimed + 1, scanned_to,
            coalesce(cardinality(positions), 0) + coalesce(cardinality(deferred), 0),
            claim_selected.worker, ends_at,
            positions is null,
            headwater.as_multirange(deferred),
            coalesce(cardinality(deferred), 0),
            case
                when target.ordered_keys then array(select distinct k from unnest(key_hashes) as k where k is not null)
            end,
            claim_selected.due_after
        );
        if positions is null then
            last_claimed := scanned_to;
            lease := nextval('headwater.lease_token');
            continue;
        end if;
        return query
        select
            lease, 1, false, ends_at,
            e.position, t.name, e.partition, e.topic_offset, e.key, e.type, e.routing_key,
            e.headers, e.content_type, e.payload, e.event_id, e.published_at
        from unnest(positions, topic_ids) as c (position, topic_id)
        join headwater.topic t on t.id = c.topic_id
        cross join lateral (
            select * from headwater.event f where f.topic_id = c.topic_id and f.position = c.position offset 0
        ) as e
        order by e.position;
        return;
    end loop;
end;
$$;

-- Settle one batch (null: none) and claim the next: one round trip a batch. See settle() and claim() for the parts.
create or replace function headwater.settle_and_claim(
    group_name text,
    worker text,
    batch_size integer,
    lease_seconds float8,
    token bigint,
    positions bigint[] default null,
    verdicts text[] default null,
    errors text[] default null,
    delays float8[] default null,
    relaxed boolean default false
)
returns setof headwater.claimed_event
language plpgsql
volatile
-- The shape of the data changes under a plan only in ways that no plan would use; planning anew costs twice the claim.
set plan_cache_mode = force_generic_plan
-- A plan made while the ledger was small must not read all of it when it has grown.
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
    target headwater.consumer_group;
    ends_at timestamptz;
    room integer := batch_size;
    tries integer := 0;
    lease bigint;
    leased_keys bigint[] := '{}';
    settled_to bigint;
    refreshed boolean := false;
    seen record;
    looked_at timestamptz;
    due_after timestamptz;
    nothing text;
begin
    -- Another isolation level would take the frontier from one time and the events from another.
    if current_setting('transaction_isolation') <> 'read committed' then
        perform headwater.settled();
    end if;
    select * into target from headwater.consumer_group g where g.name = group_name;
    if not found then
        target := headwater.find_group(group_name);
    end if;
    if batch_size < 1 then
        raise exception 'a batch is 1 event or more' using errcode = 'HW002';
    end if;
    if relaxed then
        nothing := set_config('synchronous_commit', 'off', true);
    end if;
    if token is not null then
        if positions is null and not target.ordered_keys then
            -- The happy path, here since a call costs as much again.
            update headwater.ledger l
            set settled = true
            where l.group_id = target.id and l.token = settle_and_claim.token and not l.settled;
        end if;
        if positions is not null or target.ordered_keys or not found then
            perform headwater.settle(group_name, token, positions, verdicts, errors, delays, true, relaxed);
        end if;
    end if;
    if target.paused_at is not null then
        return;
    end if;
    -- Trying beats waiting: waiters would queue up behind each other's commits. (A sleep is whole milliseconds.)
    while not pg_try_advisory_xact_lock((29290::bigint << 48) | target.id) loop
        tries := tries + 1;
        if tries > 40 then
            return;
        end if;
        nothing := pg_sleep(0.001);
    end loop;
    -- Read again: it may have been rewound, paused or deleted before the lock was ours.
    select * into target from headwater.consumer_group g where g.id = target.id and g.paused_at is null;
    if not found then
        return;
    end if;
    ends_at := clock_timestamp() + make_interval(secs => coalesce(lease_seconds, target.lease_seconds));
    if target.max_in_flight is not null then
        room := least(room, target.max_in_flight - headwater.in_flight(target));
        if room < 1 then
            return;
        end if;
    end if;

    looked_at := clock_timestamp();
    select
        coalesce(f.hi, target.start_position) as last_claimed,
        f.due_after,
        exists (
            select from headwater.redelivery r
            where
                r.group_id = target.id
                and r.visible_at > coalesce(f.due_after, '-infinity') and r.visible_at <= looked_at
        ) as anything_due,
        b.ids,
        b.whole_topics,
        b.last_change
    into seen
    from (
        select
            array_agg(distinct b.topic_id) filter (where b.to_position is null) as ids,
            bool_and(b.topic_id is not null and b.type is null and b.pattern is null and b.headers is null)
                as whole_topics,
            max(greatest(b.from_position, b.to_position)) as last_change
        from headwater.binding b
        where b.group_id = target.id
    ) as b
    left join lateral (
        select l.hi, l.due_after from headwater.ledger l
        where l.group_id = target.id and l.token > target.start_token
        order by l.token desc
        limit 1
    ) as f on true;
    due_after := coalesce(seen.due_after, '-infinity');

    if seen.anything_due then
        if target.ordered_keys then
            leased_keys := array(select unnest(l.keys) from headwater.open_claims(target) l);
        end if;
        lease := nextval('headwater.lease_token');
        return query select * from headwater.claim_suspect(target, lease, worker, ends_at, leased_keys, due_after, looked_at);
        if found then
            return;
        end if;
        return query select * from headwater.claim_due(target, lease, worker, room, ends_at, leased_keys, due_after, looked_at);
        if found then
            return;
        end if;
    end if;

    -- New events, after the frontier. With them is noted that nothing was due, so that the next claim does not look
    -- there again, through dead rows that vacuum may be kept from. A settle() that was slow to commit may put
    -- something there yet: of up to a second it is waited for, of longer reap() gives it another time.
    if not seen.anything_due then
        due_after := greatest(due_after, looked_at - interval '1 second');
    end if;
    if coalesce(pg_sequence_last_value('headwater.position'), 0) <= seen.last_claimed or seen.last_change is null then
        return;
    end if;
    lease := coalesce(lease, nextval('headwater.lease_token'));
    if target.ordered_keys or not seen.whole_topics or seen.last_change > seen.last_claimed then
        return query
        select * from headwater.claim_selected(
            target, lease, worker, room, ends_at, seen.last_claimed, headwater.refresh_settled(), due_after
        );
        return;
    end if;
    settled_to := coalesce(pg_sequence_last_value('headwater.settled_register'), 0);
    loop
        -- What somebody noted as settled will do, unless it holds nothing for this group.
        if settled_to < seen.last_claimed + room then
            settled_to := headwater.refresh_settled();
            refreshed := true;
        end if;
        if settled_to <= seen.last_claimed then
            return;
        end if;
        if cardinality(seen.ids) > 1 then
            return query
            select * from headwater.claim_selected(
                target, lease, worker, room, ends_at, seen.last_claimed, settled_to, due_after
            );
        else
            return query
            with picked as materialized (
                select * from headwater.event e
                where e.topic_id = seen.ids[1] and e.position > seen.last_claimed and e.position <= settled_to
                order by e.position
                limit room
            ),
            noted as (
                insert into headwater.ledger (group_id, token, lo, hi, events, worker, expires_at, settled, due_after)
                select
                    target.id, lease, seen.last_claimed + 1,
                    case when count(*) = room then max(p.position) else settled_to end,
                    count(*), settle_and_claim.worker, ends_at, false, due_after
                from picked p
                having count(*) > 0
            )
            select
                lease, 1, false, ends_at,
                p.position, (select t.name from headwater.topic t where t.id = seen.ids[1]), p.partition, p.topic_offset,
                p.key, p.type, p.routing_key, p.headers, p.content_type, p.payload, p.event_id, p.published_at
            from picked p;
        end if;
        exit when found or refreshed;
        settled_to := 0;
    end loop;
end;
$$;

-- Claim up to `batch_size` events for a worker: those that are due for another try, or else new ones. The lease
-- ends after `lease_seconds` (null: the group's) unless extended; its token proves it. `relaxed` commits without
-- waiting for the disk, since a lost claim is only a redelivery: for callers whose transaction is this call alone.
create or replace function headwater.claim(
    group_name text,
    worker text,
    batch_size integer default 1,
    lease_seconds float8 default null,
    relaxed boolean default false
)
returns setof headwater.claimed_event
language plpgsql
volatile
as $$
begin
    return query
    select * from headwater.settle_and_claim(group_name, worker, batch_size, lease_seconds, null, relaxed => claim.relaxed);
end;
$$;

-- Move these redeliveries to the dead letters.
create or replace function headwater.bury(target headwater.consumer_group, positions bigint[], errors text[])
returns void
language sql
begin atomic
    with dying as (
        delete from headwater.redelivery r
        using unnest(positions, errors) as u (position, error)
        where r.group_id = target.id and r.position = u.position
        returning r.*, u.error
    )
    insert into headwater.dead_letter (group_id, position, topic_id, attempts, alone, last_error, history)
    select
        d.group_id, d.position, d.topic_id, d.attempt, d.alone,
        left(coalesce(d.error, d.last_error), 10000),
        headwater.with_try(d.history, d.attempt, d.worker, d.error)
    from dying d;
end;

-- Say how the events of a lease ended: 'done', 'retry' (after the delay, or the group's backoff), 'dead', or
-- 'release' (again after the delay, not counted as a try). `rest_done`: all events not named are done, and the lease
-- ends. A lease that another worker may have by now is HW006, and then nothing is changed.
create or replace function headwater.settle(
    group_name text,
    token bigint,
    positions bigint[] default null,
    verdicts text[] default null,
    errors text[] default null,
    delays float8[] default null,
    rest_done boolean default true,
    relaxed boolean default false
)
returns void
language plpgsql
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
    target constant headwater.consumer_group := headwater.find_group(group_name);
    lease headwater.ledger;
    held bigint[];
    fresh bigint[];
    held_keys bigint[];
    fresh_keys bigint[];
    open_keys bigint[];
    doomed bigint[];
    doomed_errors text[];
begin
    if relaxed then
        perform set_config('synchronous_commit', 'off', true);
    end if;
    if target.ordered_keys then
        -- A claim must not decide that a key is busy while its lease ends.
        perform headwater.lock_group(target.id);
    end if;
    if positions is null and rest_done and not target.ordered_keys then
        -- The happy path: two statements, no rows of its own.
        update headwater.ledger l
        set settled = true
        where l.group_id = target.id and l.token = settle.token and not l.settled;
        if not found then
            delete from headwater.redelivery r where r.group_id = target.id and r.token = settle.token;
            if not found then
                perform headwater.refuse_lost_lease(group_name, token);
            end if;
        elsif exists (select from headwater.redelivery r where r.group_id = target.id and r.token = settle.token) then
            delete from headwater.redelivery r where r.group_id = target.id and r.token = settle.token;
        end if;
        return;
    end if;

    select * into lease
    from headwater.ledger l
    where l.group_id = target.id and l.token = settle.token and not l.settled
    for update;
    select array_agg(r.position), array_agg(r.key_hash) filter (where r.key_hash is not null) into held, held_keys
    from (
        select r.position, r.key_hash from headwater.redelivery r
        where r.group_id = target.id and r.token = settle.token
        for update
    ) as r;
    if lease.token is null and held is null then
        perform headwater.refuse_lost_lease(group_name, token);
    end if;
    if exists (select from unnest(verdicts) as v where v is null or v not in ('done', 'retry', 'dead', 'release'))
        or cardinality(verdicts) <> (select count(distinct p) from unnest(positions) as p)
    then
        raise exception 'each position needs a verdict: done, retry, dead or release' using errcode = 'HW002';
    end if;

    -- Second tries and later.
    delete from headwater.redelivery r
    using unnest(positions, verdicts) as u (position, verdict)
    where r.group_id = target.id and r.token = settle.token and r.position = u.position and u.verdict = 'done';
    select array_agg(r.position), array_agg(u.error) into doomed, doomed_errors
    from headwater.redelivery r
    join unnest(positions, verdicts, errors) as u (position, verdict, error) on u.position = r.position
    where
        r.group_id = target.id and r.token = settle.token
        and (u.verdict = 'dead' or u.verdict = 'retry' and r.attempt >= target.max_attempts);
    if doomed is not null then
        perform headwater.bury(target, doomed, doomed_errors);
    end if;
    update headwater.redelivery r
    set
        attempt = case u.verdict when 'release' then r.attempt - 1 else r.attempt end,
        visible_at = clock_timestamp() + coalesce(
            make_interval(secs => u.delay),
            case u.verdict when 'release' then interval '0' else headwater.backoff(target, r.attempt) end
        ),
        token = null,
        worker = null,
        alone = r.alone and u.verdict = 'release',
        last_error = coalesce(left(u.error, 10000), r.last_error),
        history = case u.verdict
            when 'release' then r.history
            else headwater.with_try(r.history, r.attempt, r.worker, u.error)
        end
    from unnest(positions, verdicts, errors, delays) as u (position, verdict, error, delay)
    where
        r.group_id = target.id and r.token = settle.token and r.position = u.position
        and u.verdict in ('retry', 'release');
    if rest_done then
        delete from headwater.redelivery r where r.group_id = target.id and r.token = settle.token;
    end if;

    -- First tries.
    if lease.token is not null then
        with ended as (
            select e.position, e.topic_id, e.key, u.verdict, u.error, u.delay
            from headwater.bound_events(
                target.id, headwater.bound_topics(target.id, lease.lo - 1), lease.lo, lease.hi
            ) as e
            left join unnest(positions, verdicts, errors, delays) as u (position, verdict, error, delay)
                on u.position = e.position
            where lease.acked is null or not e.position <@ lease.acked
        ),
        judged as (
            select
                d.*,
                case when target.ordered_keys then headwater.key_order_hash(d.key) end as key_hash,
                -- In a group with ordered keys nothing is done behind a try that failed.
                coalesce(
                    d.verdict,
                    case
                        when target.ordered_keys and d.key is not null and exists (
                            select from ended b
                            where b.key = d.key and b.position < d.position and b.verdict in ('retry', 'release')
                        ) then 'release'
                        when rest_done then 'done'
                    end
                ) as outcome
            from ended d
        ),
        died as (
            insert into headwater.dead_letter (group_id, position, topic_id, attempts, alone, last_error, history)
            select
                target.id, j.position, j.topic_id, 1, false, left(j.error, 10000),
                headwater.with_try('[]', 1, lease.worker, j.error)
            from judged j
            where j.outcome = 'dead' or j.outcome = 'retry' and target.max_attempts = 1
        ),
        again as (
            insert into headwater.redelivery
                (group_id, position, topic_id, attempt, visible_at, key_hash, last_error, history)
            select
                target.id, j.position, j.topic_id,
                case j.outcome when 'retry' then 1 else 0 end,
                case
                    when j.delay is null and j.outcome = 'release' and j.key_hash is not null then 'infinity'
                    else clock_timestamp() + coalesce(
                        make_interval(secs => j.delay),
                        case j.outcome when 'retry' then headwater.backoff(target, 1) else interval '0' end
                    )
                end,
                j.key_hash,
                left(j.error, 10000),
                case j.outcome
                    when 'retry' then headwater.with_try('[]', 1, lease.worker, j.error)
                    else '[]'
                end
            from judged j
            where j.outcome = 'release' or j.outcome = 'retry' and target.max_attempts > 1
        )
        select
            array_agg(j.position) filter (where j.outcome is not null),
            array_agg(distinct j.key_hash) filter (where j.outcome is not null and j.key_hash is not null),
            array_agg(distinct j.key_hash) filter (where j.outcome is null and j.key_hash is not null)
        into fresh, fresh_keys, open_keys
        from judged j;
        update headwater.ledger l
        set
            settled = rest_done or l.acked_events + coalesce(cardinality(fresh), 0) >= l.events,
            acked = coalesce(l.acked, '{}') + coalesce(headwater.as_multirange(fresh), '{}'),
            acked_events = l.acked_events + coalesce(cardinality(fresh), 0),
            keys = case when l.keys is not null then coalesce(open_keys, '{}') end
        where l.group_id = target.id and l.token = settle.token;
    end if;
    if exists (
        select
        from unnest(positions, verdicts) as u (position, verdict)
        where
            not (u.position = any (coalesce(held, '{}')) or u.position = any (coalesce(fresh, '{}')))
            -- To give back what one no longer has is nothing, and so is an event that went with its topic.
            and u.verdict <> 'release'
            and (
                lease.token is null
                or u.position not between lease.lo and lease.hi
                or u.position <@ coalesce(lease.acked, '{}')
            )
    ) then
        perform headwater.refuse_lost_lease(group_name, token);
    end if;
    if target.ordered_keys then
        perform headwater.free_next_of_keys(
            target.id, coalesce(held_keys, '{}') || coalesce(fresh_keys, '{}') || coalesce(lease.keys, '{}')
        );
    end if;
end;
$$;

create or replace function headwater.refuse_lost_lease(group_name text, token bigint)
returns void
language plpgsql
as $$
begin
    raise exception 'lease % of group "%" is lost: it ended, ran out or was rewound', token, group_name
        using errcode = 'HW006',
              detail = json_build_object('group', group_name, 'token', token)::text,
              hint = 'Another worker may have its events. Drop this result, claim anew, and extend leases in time.';
end;
$$;

-- Keep a lease for so many seconds from now (null: the group's). Returns when it ends; HW006 if it is lost.
create or replace function headwater.extend_lease(group_name text, token bigint, lease_seconds float8 default null)
returns timestamptz
language plpgsql
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
    target constant headwater.consumer_group := headwater.find_group(group_name);
    ends_at constant timestamptz :=
        clock_timestamp() + make_interval(secs => coalesce(lease_seconds, target.lease_seconds));
    kept boolean;
begin
    update headwater.ledger l
    set expires_at = ends_at
    where l.group_id = target.id and l.token = extend_lease.token and not l.settled;
    kept := found;
    update headwater.redelivery r
    set visible_at = ends_at
    where r.group_id = target.id and r.token = extend_lease.token;
    if not kept and not found then
        perform headwater.refuse_lost_lease(group_name, token);
    end if;
    return ends_at;
end;
$$;

-- The dead letters of a group, oldest first: all of them, or those named, of a topic, or whose error is like a pattern.
create or replace function headwater.dead_letters(
    group_name text,
    positions bigint[] default null,
    topic text default null,
    error_like text default null,
    after bigint default 0,
    batch_size integer default 1000
)
returns table (
    "position" bigint,
    topic_name text,
    key bytea,
    type text,
    attempts integer,
    last_error text,
    history jsonb,
    died_at timestamptz
)
language sql
stable
begin atomic
    select d.position, t.name, e.key, e.type, d.attempts, d.last_error, d.history, d.died_at
    from headwater.dead_letter d
    left join headwater.topic t on t.id = d.topic_id
    left join headwater.event e on e.topic_id = d.topic_id and e.position = d.position
    where
        d.group_id = (headwater.find_group(group_name)).id
        and (positions is null or d.position = any (positions))
        and (dead_letters.topic is null or t.name = dead_letters.topic)
        and (error_like is null or d.last_error like error_like)
        and d.position > after
    order by d.position
    limit batch_size;
end;

-- Give dead letters a fresh set of tries, those whose event is still there. Returns how many.
create or replace function headwater.redrive(
    group_name text,
    positions bigint[] default null,
    topic text default null,
    error_like text default null,
    batch_size integer default 1000000
)
returns bigint
language plpgsql
as $$
declare
    target constant headwater.consumer_group := headwater.find_group(group_name);
    redriven bigint;
begin
    perform headwater.lock_group(target.id);
    with chosen as (
        delete from headwater.dead_letter d
        using
            headwater.dead_letters(group_name, redrive.positions, redrive.topic, redrive.error_like, 0, batch_size) as c,
            headwater.event e
        where
            d.group_id = target.id and d.position = c.position
            and e.topic_id = d.topic_id and e.position = d.position
        returning d.*, e.key
    ),
    kept as (
        insert into headwater.redelivery
            (group_id, position, topic_id, attempt, visible_at, alone, key_hash, last_error, history)
        select
            c.group_id, c.position, c.topic_id, 0,
            case when target.ordered_keys and c.key is not null then 'infinity' else clock_timestamp() end,
            c.alone,
            case when target.ordered_keys then headwater.key_order_hash(c.key) end,
            c.last_error, c.history
        from chosen c
        on conflict (group_id, position) do nothing
        returning key_hash
    )
    select count(*) into redriven from kept;
    if target.ordered_keys then
        perform headwater.free_next_of_keys(target.id, headwater.waiting_keys(target.id));
    end if;
    return redriven;
end;
$$;

-- Drop dead letters for good: the group counts them as done. Returns how many.
create or replace function headwater.discard(
    group_name text,
    positions bigint[] default null,
    topic text default null,
    error_like text default null,
    batch_size integer default 1000000
)
returns bigint
language sql
begin atomic
    with gone as (
        delete from headwater.dead_letter d
        using headwater.dead_letters(group_name, discard.positions, discard.topic, discard.error_like, 0, batch_size) as c
        where d.group_id = (headwater.find_group(group_name)).id and d.position = c.position
        returning 1
    )
    select count(*) from gone;
end;

-- The last position that a group has no more use for.
create or replace function headwater.group_low_water(target headwater.consumer_group)
returns bigint
language sql
stable
return least(
    case target.kind
        when 'queue' then headwater.frontier(target)
        else (select d.position from headwater.reading d where d.group_id = target.id)
    end,
    (
        select min(l.lo) - 1 from headwater.ledger l
        where l.group_id = target.id and not l.settled and l.token > target.start_token
    ),
    (select min(r.position) - 1 from headwater.redelivery r where r.group_id = target.id)
);

-- Every event of every group with its state, as if there were a row for each.
create or replace view headwater.delivery as
select
    g.name as group_name,
    e.position,
    t.name as topic,
    case
        when d.position is not null then 'dead'
        when r.position is not null then
            case when r.token is not null and r.visible_at > clock_timestamp() then 'processing' else 'ready' end
        when e.position > f.frontier then 'ready'
        when l.token is not null and l.expires_at > clock_timestamp() then 'processing'
        when l.token is not null then 'ready'
        else 'done'
    end as status,
    coalesce(d.attempts, r.attempt, case when e.position > f.frontier then 0 else 1 end) as attempts,
    case when r.token is null then nullif(r.visible_at, 'infinity') end as run_at,
    coalesce(l.expires_at, case when r.token is not null then r.visible_at end) as leased_until,
    coalesce(r.worker, l.worker) as worker,
    coalesce(d.last_error, r.last_error) as last_error
from headwater.consumer_group g
cross join lateral (select headwater.frontier(g) as frontier) as f
cross join lateral (
    select b.position, b.topic_id
    from headwater.bound_events(
        g.id, headwater.bound_topics(g.id, 0), g.start_position + 1, 281474976710655
    ) as b
    union all
    -- Left over from before a rewind.
    select o.position, o.topic_id from headwater.redelivery o
    where o.group_id = g.id and o.position <= g.start_position
    union all
    select o.position, o.topic_id from headwater.dead_letter o
    where o.group_id = g.id and o.position <= g.start_position
) as e
join headwater.topic t on t.id = e.topic_id
left join headwater.redelivery r on r.group_id = g.id and r.position = e.position
left join headwater.dead_letter d on d.group_id = g.id and d.position = e.position
left join lateral (
    select o.token, o.expires_at, o.worker
    from headwater.ledger o
    where
        o.group_id = g.id and o.token > g.start_token and not o.settled
        and e.position between o.lo and o.hi
        and (o.acked is null or not e.position <@ o.acked)
    order by o.token desc
    limit 1
) as l on true;

-- One line a group. Everything but `ready` is arithmetic on a few small tables; `ready` is counted up to 10,000.
create or replace view headwater.group_overview as
select
    g.name,
    g.paused_at is not null as paused,
    f.frontier,
    least(c.new_events, 10000) + c.lapsed + c.due_again as ready,
    c.new_events > 10000 as ready_is_more,
    headwater.positions_between(f.frontier, headwater.head()) as positions_behind,
    headwater.in_flight(g) as processing,
    c.waiting_again as retrying,
    c.dead,
    greatest(c.claimed - c.not_done, 0) as done,
    g.ordered_keys,
    g.max_attempts,
    g.lease_seconds,
    g.max_in_flight,
    g.must_not_lose,
    g.created_at
from headwater.consumer_group g
cross join lateral (select headwater.frontier(g) as frontier) as f
cross join lateral (
    select
        (
            select count(*) from (
                select from headwater.bound_events(
                    g.id, headwater.bound_topics(g.id, f.frontier), f.frontier + 1, 281474976710655
                )
                limit 10001
            ) as counted
        ) as new_events,
        (
            select coalesce(sum(l.events - l.acked_events), 0)
            from headwater.open_claims(g) l
            where l.expires_at <= clock_timestamp()
        ) as lapsed,
        (
            select count(*) from headwater.redelivery r
            where r.group_id = g.id and r.visible_at <= clock_timestamp()
        ) as due_again,
        (
            select count(*) from headwater.redelivery r
            where r.group_id = g.id and r.visible_at > clock_timestamp() and r.token is null
        ) as waiting_again,
        (select count(*) from headwater.dead_letter d where d.group_id = g.id) as dead,
        coalesce((select p.past_events from headwater.group_progress p where p.group_id = g.id), 0)
            + coalesce((select sum(l.events) from headwater.ledger l where l.group_id = g.id), 0) as claimed,
        (select coalesce(sum(l.events - l.acked_events), 0) from headwater.open_claims(g) l)
            + (select count(*) from headwater.redelivery r where r.group_id = g.id and r.position > g.start_position)
            + (select count(*) from headwater.dead_letter d where d.group_id = g.id and d.position > g.start_position)
            as not_done
) as c;
