-- Claim: how a worker leases events for a limited time.

-- Claim events that are due for a retry: isolated ones, whose lease expired before, or the others. `room` is 1 for
-- isolated ones: such an event is handed out without any other, so that it cannot fail other events with it.
create or replace function headwater_internal.claim_due(
    target headwater_internal.queue, isolated boolean, lease bigint, worker text, room integer, ends_at timestamptz,
    leased_keys bigint[], due_after timestamptz, due_to timestamptz
)
returns setof headwater.claimed_event
language sql
begin atomic
    with due as (
        select r.position
        from headwater_internal.redelivery r
        join headwater_internal.topic t on t.id = r.topic_id
        where
            r.queue_id = target.id and r.visible_at > due_after and r.visible_at <= due_to and r.visible_at < 'infinity'
            and r.token is null and r.isolated = claim_due.isolated
            and t.deleted_at is null and r.position > t.expired_to
            and headwater_internal.is_next_of_key(r, leased_keys)
            and exists (select from headwater_internal.event e where e.topic_id = r.topic_id and e.position = r.position)
        order by r.visible_at, r.position
        limit room
        for update of r skip locked
    ),
    leased as (
        update headwater_internal.redelivery r
        set attempt = r.attempt + 1, token = lease, worker = claim_due.worker, visible_at = ends_at,
            dated_at = clock_timestamp()
        where r.queue_id = target.id and r.position = any (array(select d.position from due d))
        returning r.position, r.topic_id, r.attempt
    )
    select
        lease, l.attempt, claim_due.isolated, ends_at,
        e.position, t.name, e.partition, e.topic_offset, e.key, e.type, e.routing_key,
        e.headers, e.content_type, e.payload, e.event_id, e.published_at
    from leased l
    join headwater_internal.topic t on t.id = l.topic_id
    -- Lateral, so that no plan joins by topic first: a plan made for a small log would read a large one as a whole.
    cross join lateral (
        select * from headwater_internal.event f where f.topic_id = l.topic_id and f.position = l.position offset 0
    ) as e
    order by e.position;
end;

-- The events at these positions of these topics, as rows of a first attempt.
create or replace function headwater_internal.leased_events(
    positions bigint[], topic_ids integer[], lease bigint, ends_at timestamptz
)
returns setof headwater.claimed_event
language sql
stable
begin atomic
    select
        lease, 1, false, ends_at,
        e.position, t.name, e.partition, e.topic_offset, e.key, e.type, e.routing_key,
        e.headers, e.content_type, e.payload, e.event_id, e.published_at
    from unnest(leased_events.positions, leased_events.topic_ids) as c (position, topic_id)
    join headwater_internal.topic t on t.id = c.topic_id
    cross join lateral (
        select * from headwater_internal.event f where f.topic_id = c.topic_id and f.position = c.position offset 0
    ) as e
    order by e.position;
end;

-- Claim new events for a queue of several topics, with bindings that select by more than the topic, or with ordered
-- keys. The index finds the events of a topic, not those of a range of positions, so the work is limited to one lookup
-- for each topic: events are read from a window of positions, which holds no more events than positions. `ids` are the
-- topics; deleted ones have no events. One long function for speed: each further one with planner settings of its own
-- costs 7 us for each call.
create or replace function headwater_internal.claim_selected(
    target headwater_internal.queue,
    ids integer[],
    lease bigint,
    worker text,
    room integer,
    ends_at timestamptz,
    last_claimed bigint,
    stable_to bigint,
    due_after timestamptz
)
returns setof headwater.claimed_event
language plpgsql
volatile
as $$
declare
    -- The bindings select every event of the topics.
    plain constant boolean := not target.ordered_keys and not exists (
        select from headwater_internal.binding b
        where
            b.queue_id = target.id
            and (
                b.topic_id is null or b.type is not null or b.pattern is not null or b.headers is not null
                or greatest(b.from_position, b.to_position) > last_claimed
            )
    );
    few_topics constant integer := 4;
    scan_size constant integer := greatest(4 * room, 1000);
    enough constant integer := case when plain then room else scan_size end;
    -- The topics that have events in the window, or may have; the one whose events begin first comes first.
    active integer[];
    -- The position of the first event of each active topic.
    firsts bigint[];
    window_end bigint;
    scanned integer;
    scanned_to bigint;
    positions bigint[];
    topic_ids integer[];
    key_hashes bigint[];
    busy_keys bigint[];
    deferred bigint[];
begin
    -- One round, unless the bindings select none of the scanned events: then continue after them, up to a limit.
    for round in 1 .. 20 loop
        active := ids;
        window_end := case
            when cardinality(ids) > few_topics then least(last_claimed + scan_size, stable_to) else stable_to
        end;
        -- A window right after the last claim; if it holds less than a batch, a window that starts at the first event.
        for attempt in 1 .. 2 loop
            if cardinality(active) <= few_topics then
                select array_agg(s.position order by s.position), array_agg(s.topic_id order by s.position)
                into positions, topic_ids
                from (
                    select f.position, t.id as topic_id
                    from unnest(active) as i (id)
                    join headwater_internal.topic t on t.id = i.id and t.deleted_at is null
                    cross join lateral (
                        select e.position from headwater_internal.event e
                        where
                            e.topic_id = t.id and e.position > greatest(last_claimed, t.expired_to)
                            and e.position <= window_end
                        order by e.position
                        limit enough
                    ) as f
                    order by f.position
                    limit enough
                ) as s;
            else
                -- One index scan for all topics. Expired positions are looked up for each event: a join might read all
                -- topics.
                select array_agg(s.position order by s.position), array_agg(s.topic_id order by s.position)
                into positions, topic_ids
                from (
                    select e.position, e.topic_id
                    from headwater_internal.event e
                    where
                        e.topic_id = any (active) and e.position > last_claimed and e.position <= window_end
                        and e.position > (
                            select t.expired_to from headwater_internal.topic t
                            where t.id = e.topic_id and t.deleted_at is null
                        )
                    order by e.position
                    limit enough
                ) as s;
            end if;
            exit when attempt = 2 or window_end = stable_to or cardinality(positions) >= room;
            -- The queue is far behind, or other topics are busy: one lookup for each topic.
            select array_agg(f.id order by f.position), array_agg(f.position order by f.position)
            into active, firsts
            from (
                select t.id, n.position
                from unnest(ids) as i (id)
                join headwater_internal.topic t on t.id = i.id and t.deleted_at is null
                cross join lateral (
                    select e.position from headwater_internal.event e
                    where
                        e.topic_id = t.id and e.position > greatest(last_claimed, t.expired_to)
                        and e.position <= stable_to
                    order by e.position
                    limit 1
                ) as n
            ) as f;
            if active is null then
                return;
            end if;
            window_end := stable_to;
            if cardinality(active) > few_topics then
                -- The first events of that many topics fill the batch: a topic that begins later has no event before
                -- them.
                window_end := least(firsts[1] + scan_size - 1, firsts[enough], stable_to);
                active := active[:width_bucket(window_end, firsts)];
            end if;
        end loop;
        scanned := coalesce(cardinality(positions), 0);
        if scanned = 0 then
            return;
        end if;
        scanned_to := case when scanned < enough then window_end else positions[scanned] end;
        lease := coalesce(lease, headwater_internal.next_token());

        if plain then
            insert into headwater_internal.ledger (queue_id, token, lo, hi, events, worker, expires_at, settled, due_after)
            values (
                target.id, lease, last_claimed + 1, scanned_to, scanned, claim_selected.worker, ends_at, false,
                claim_selected.due_after
            );
            return query
            select * from headwater_internal.leased_events(positions, topic_ids, lease, ends_at);
            return;
        end if;

        active := array(select distinct a.id from unnest(topic_ids) as a (id));
        if target.ordered_keys then
            select array_agg(distinct k.key_hash) into busy_keys
            from (
                select unnest(headwater_internal.waiting_keys(target.id)) as key_hash
                union all
                select unnest(l.keys) from headwater_internal.open_claims(target) l
            ) as k;
        end if;
        select array_agg(c.position order by c.position), array_agg(c.topic_id order by c.position),
            array_agg(c.key_hash order by c.position)
        into positions, topic_ids, key_hashes
        from (
            select
                e.position, e.topic_id,
                case when target.ordered_keys then headwater_internal.key_order_hash(e.key) end as key_hash
            from headwater_internal.bound_events(target.id, active, last_claimed + 1, scanned_to) as e
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
            -- Events of a busy key wait outside of this lease.
            with waiting as (
                insert into headwater_internal.redelivery (queue_id, position, topic_id, attempt, visible_at, key_hash)
                select target.id, e.position, e.topic_id, 0, 'infinity', headwater_internal.key_order_hash(e.key)
                from headwater_internal.bound_events(target.id, active, last_claimed + 1, scanned_to) as e
                where headwater_internal.key_order_hash(e.key) = any (busy_keys)
                returning position
            )
            select array_agg(w.position) into deferred from waiting w;
        end if;
        if positions is null and deferred is null and scanned < least(scan_size, 100) then
            -- Too few to be worth a row: the next claim scans them again.
            return;
        end if;
        insert into headwater_internal.ledger
            (queue_id, token, lo, hi, events, worker, expires_at, settled, acked, acked_events, keys, due_after)
        values (
            target.id, lease, last_claimed + 1, scanned_to,
            coalesce(cardinality(positions), 0) + coalesce(cardinality(deferred), 0),
            claim_selected.worker, ends_at,
            positions is null,
            headwater_internal.as_multirange(deferred),
            coalesce(cardinality(deferred), 0),
            case
                when target.ordered_keys then array(select distinct k from unnest(key_hashes) as k where k is not null)
            end,
            claim_selected.due_after
        );
        if positions is null then
            last_claimed := scanned_to;
            lease := headwater_internal.next_token();
            continue;
        end if;
        return query
        select * from headwater_internal.leased_events(positions, topic_ids, lease, ends_at);
        return;
    end loop;
end;
$$;

-- The hot path of queues, fused into one function for speed: settling a batch of one event and claiming the next takes
-- 207 us of server time; settle() and then claim() take 298 us. In batches of 100, claiming and acknowledging takes 5 us
-- of server CPU for each event (docs/decisions/0007-ledger.md).
--
-- Settle one batch (null token: none) and claim the next one in one round trip. Returns the claimed events; no rows if
-- the queue is paused, busy or empty. Errors as for settle() and claim().
create or replace function headwater.settle_and_claim(
    queue_name text,
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
-- Planning again would cost twice the claim, and other data would not lead to a better plan.
set plan_cache_mode = force_generic_plan
-- A plan made while the ledger was small must not read all of it when it has grown.
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
    target headwater_internal.queue;
    ends_at timestamptz;
    room integer := batch_size;
    tries integer := 0;
    lease bigint;
    leased_keys bigint[] := '{}';
    stable_to bigint;
    refreshed boolean := false;
    seen record;
    looked_at timestamptz;
    due_after timestamptz;
    bound_ids integer[];
    nothing text;
begin
    -- Another isolation level would read the claimed position and the events from different times.
    if current_setting('transaction_isolation') <> 'read committed' then
        perform headwater.stable_position();
    end if;
    select * into target from headwater_internal.queue g where g.name = queue_name;
    if not found then
        target := headwater_internal.find_queue(queue_name);
    end if;
    if batch_size < 1 then
        raise exception 'invalid batch_size: expected at least 1' using errcode = 'HW002';
    end if;
    if relaxed then
        nothing := set_config('synchronous_commit', 'off', true);
    end if;
    if token is not null then
        if positions is null and not target.ordered_keys then
            -- The common case, inline: a call of settle() would double the cost.
            update headwater_internal.ledger l
            set settled = true
            where l.queue_id = target.id and l.token = settle_and_claim.token and not l.settled;
        end if;
        if positions is not null or target.ordered_keys or not found then
            perform headwater.settle(queue_name, token, positions, verdicts, errors, delays, true, relaxed);
        end if;
    end if;
    if target.paused_at is not null then
        return;
    end if;
    -- Retrying instead of waiting: waiters would queue up behind each other's commits. (pg_sleep() has a resolution of
    -- 1 ms.) Lock tag: see locks.sql.
    while not pg_try_advisory_xact_lock((29290::bigint << 48) | target.id) loop
        tries := tries + 1;
        if tries > 40 then
            return;
        end if;
        nothing := pg_sleep(0.001);
    end loop;
    -- Read again: the queue may have been rewound, paused or deleted before the lock was acquired.
    select * into target from headwater_internal.queue g where g.id = target.id and g.paused_at is null;
    if not found then
        return;
    end if;
    ends_at := clock_timestamp() + make_interval(secs => coalesce(lease_seconds, target.lease_seconds));
    if target.max_in_flight is not null then
        room := least(room, target.max_in_flight - headwater_internal.in_flight(target));
        if room < 1 then
            return;
        end if;
    end if;

    looked_at := clock_timestamp();
    select
        coalesce(f.hi, target.start_position) as last_claimed,
        f.due_after,
        exists (
            select from headwater_internal.redelivery r
            where
                r.queue_id = target.id and r.visible_at > f.due_after and r.visible_at <= looked_at
                and r.visible_at < 'infinity'
        ) as anything_due,
        b.ids,
        b.whole_topics,
        b.last_change,
        a.claimed_at
    into seen
    from (
        select
            array_agg(distinct b.topic_id) filter (where b.to_position is null) as ids,
            bool_and(b.topic_id is not null and b.type is null and b.pattern is null and b.headers is null)
                as whole_topics,
            max(greatest(b.from_position, b.to_position)) as last_change
        from headwater_internal.binding b
        where b.queue_id = target.id
    ) as b
    cross join lateral (
        -- Not later than the clock, which may have been set back since that claim.
        select
            n.hi,
            case
                when n.due_after > looked_at then looked_at - interval '1 second'
                else coalesce(n.due_after, '-infinity')
            end as due_after
        from (values (1)) as one
        left join lateral (
            select l.hi, l.due_after from headwater_internal.ledger l
            where l.queue_id = target.id and l.token > target.start_token
            order by l.token desc
            limit 1
        ) as n on true
    ) as f
    left join headwater_internal.queue_activity a on a.queue_id = target.id;
    if seen.claimed_at is null or seen.claimed_at not between looked_at - interval '10 seconds' and looked_at then
        -- Record that the queue has a worker, at most every 10 seconds: a claim that finds nothing usually writes
        -- nothing.
        insert into headwater_internal.queue_activity (queue_id, claimed_at, worker)
        values (target.id, looked_at, settle_and_claim.worker)
        on conflict (queue_id) do update set claimed_at = excluded.claimed_at, worker = excluded.worker;
    end if;
    due_after := seen.due_after;

    if seen.anything_due then
        if target.ordered_keys then
            leased_keys := headwater_internal.leased_keys(target);
        end if;
        lease := headwater_internal.next_token();
        return query
        select * from headwater_internal.claim_due(target, true, lease, worker, 1, ends_at, leased_keys, due_after, looked_at);
        if found then
            return;
        end if;
        return query
        select * from headwater_internal.claim_due(target, false, lease, worker, room, ends_at, leased_keys, due_after, looked_at);
        if found then
            return;
        end if;
    end if;

    -- New events, after the claimed position. The claim also records that no retry was due, so that the next one does
    -- not scan the same dead index entries, which vacuum may not be able to remove. A settle() that commits late may
    -- still add an earlier one: a delay of up to a second is allowed for here, a longer one is corrected by reap().
    if not seen.anything_due then
        due_after := greatest(due_after, looked_at - interval '1 second');
    end if;
    if coalesce(pg_sequence_last_value('headwater_internal.position'), 0) <= seen.last_claimed or seen.last_change is null then
        return;
    end if;
    lease := coalesce(lease, headwater_internal.next_token());
    if target.ordered_keys or not seen.whole_topics or seen.last_change > seen.last_claimed then
        bound_ids := headwater_internal.bound_topics(target.id, seen.last_claimed);
        return query
        select * from headwater_internal.claim_selected(
            target, bound_ids, lease, worker, room, ends_at, seen.last_claimed,
            -- A binding to any topic waits for every publisher: a topic may be created at this moment.
            headwater_internal.refresh_stable(
                case
                    when not exists (
                        select from headwater_internal.binding b where b.queue_id = target.id and b.topic_id is null
                    ) then bound_ids
                end
            ),
            due_after
        );
        return;
    end if;
    -- Null, and so 0, after a crash or a promotion, since the register is unlogged. Limited by the head: a restored
    -- dump may contain the value of another log.
    stable_to := least(
        coalesce(pg_sequence_last_value('headwater_internal.stable_register'), 0),
        coalesce(pg_sequence_last_value('headwater_internal.position'), 0)
    );
    loop
        -- The recorded stable position is enough, unless it yields nothing for this queue.
        if stable_to < seen.last_claimed + room then
            stable_to := headwater_internal.refresh_stable(seen.ids);
            refreshed := true;
        end if;
        if stable_to <= seen.last_claimed then
            return;
        end if;
        if cardinality(seen.ids) > 1 then
            return query
            select * from headwater_internal.claim_selected(
                target, seen.ids, lease, worker, room, ends_at, seen.last_claimed, stable_to, due_after
            );
        else
            return query
            with picked as materialized (
                select * from headwater_internal.event e
                where
                    e.topic_id = seen.ids[1] and e.position <= stable_to
                    and e.position > greatest(
                        seen.last_claimed, (select t.expired_to from headwater_internal.topic t where t.id = seen.ids[1])
                    )
                order by e.position
                limit room
            ),
            noted as (
                insert into headwater_internal.ledger (queue_id, token, lo, hi, events, worker, expires_at, settled, due_after)
                select
                    target.id, lease, seen.last_claimed + 1,
                    case when count(*) = room then max(p.position) else stable_to end,
                    count(*), settle_and_claim.worker, ends_at, false, due_after
                from picked p
                having count(*) > 0
            )
            select
                lease, 1, false, ends_at,
                p.position, (select t.name from headwater_internal.topic t where t.id = seen.ids[1]), p.partition, p.topic_offset,
                p.key, p.type, p.routing_key, p.headers, p.content_type, p.payload, p.event_id, p.published_at
            from picked p;
        end if;
        exit when found or refreshed;
        stable_to := 0;
    end loop;
end;
$$;

-- Claim up to `batch_size` events for a worker: those that are due for a retry, or else new ones. The lease ends after
-- `lease_seconds` (null: the queue's setting) unless extended, and is identified by its token. `relaxed` commits
-- without waiting for the disk, since a lost claim only causes a redelivery: use it only if the transaction contains
-- nothing else. HW011 if the queue does not exist, HW002 for an invalid batch size.
create or replace function headwater.claim(
    queue_name text,
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
    select * from headwater.settle_and_claim(queue_name, worker, batch_size, lease_seconds, null, relaxed => claim.relaxed);
end;
$$;
