-- Leases: how they are settled, extended and expire.

-- Move these redeliveries to the dead letters.
create or replace function headwater_internal.bury(target headwater_internal.queue, positions bigint[], errors text[])
returns void
language sql
begin atomic
    with dying as (
        delete from headwater_internal.redelivery r
        -- An array, not a join: a plan of a join may read all redeliveries of the queue.
        where r.queue_id = target.id and r.position = any (positions)
        returning r.*, errors[array_position(positions, r.position)] as error
    )
    insert into headwater_internal.dead_letter (queue_id, position, topic_id, attempts, isolated, last_error, history)
    select
        d.queue_id, d.position, d.topic_id, d.attempt, d.isolated,
        left(coalesce(d.error, d.last_error), 10000),
        headwater_internal.with_try(d.history, d.attempt, d.worker, d.error)
    from dying d;
end;

-- Fused for speed: first attempts (ledger) and retries (redelivery) are settled in one function. Settling a batch takes
-- 43 us of server time; a further function with planner settings of its own would add 7 us for each call.
--
-- Settle events of a lease with a verdict for each: 'done', 'retry' (after the delay, or the queue's backoff), 'dead',
-- or 'release' (available again after the delay, not counted as an attempt). With `rest_done`, all events not listed
-- are done and the lease ends. HW006 if the lease has expired, ended or was revoked: then nothing is changed. HW002 for
-- invalid verdicts, HW011 if the queue does not exist.
create or replace function headwater.settle(
    queue_name text,
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
    target constant headwater_internal.queue := headwater_internal.find_queue(queue_name);
    lease headwater_internal.ledger;
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
        -- A claim must not see a key as busy while the lease of that key ends.
        perform headwater_internal.lock_queue(target.id);
    end if;
    if positions is null and rest_done and not target.ordered_keys then
        -- The common case: two statements and no additional rows.
        update headwater_internal.ledger l
        set settled = true
        where l.queue_id = target.id and l.token = settle.token and not l.settled;
        if not found then
            delete from headwater_internal.redelivery r where r.queue_id = target.id and r.token = settle.token;
            if not found then
                perform headwater_internal.refuse_lost_lease(queue_name, token);
            end if;
        elsif exists (select from headwater_internal.redelivery r where r.queue_id = target.id and r.token = settle.token) then
            delete from headwater_internal.redelivery r where r.queue_id = target.id and r.token = settle.token;
        end if;
        return;
    end if;

    select * into lease
    from headwater_internal.ledger l
    where l.queue_id = target.id and l.token = settle.token and not l.settled
    for update;
    select array_agg(r.position), array_agg(r.key_hash) filter (where r.key_hash is not null) into held, held_keys
    from (
        select r.position, r.key_hash from headwater_internal.redelivery r
        where r.queue_id = target.id and r.token = settle.token
        for update
    ) as r;
    if lease.token is null and held is null then
        perform headwater_internal.refuse_lost_lease(queue_name, token);
    end if;
    if exists (select from unnest(verdicts) as v where v is null or v not in ('done', 'retry', 'dead', 'release'))
        or cardinality(verdicts) <> (select count(distinct p) from unnest(positions) as p)
    then
        raise exception 'each position needs one verdict: done, retry, dead or release' using errcode = 'HW002';
    end if;

    -- Retries.
    delete from headwater_internal.redelivery r
    using unnest(positions, verdicts) as u (position, verdict)
    where r.queue_id = target.id and r.token = settle.token and r.position = u.position and u.verdict = 'done';
    select array_agg(r.position), array_agg(u.error) into doomed, doomed_errors
    from headwater_internal.redelivery r
    join unnest(positions, verdicts, errors) as u (position, verdict, error) on u.position = r.position
    where
        r.queue_id = target.id and r.token = settle.token
        and (
            u.verdict = 'dead'
            or u.verdict = 'retry' and (
                r.attempt >= target.max_attempts
                or headwater_internal.is_past_retry_age(target, r.topic_id, r.position)
            )
        );
    if doomed is not null then
        perform headwater_internal.bury(target, doomed, doomed_errors);
    end if;
    update headwater_internal.redelivery r
    set
        attempt = case u.verdict when 'release' then r.attempt - 1 else r.attempt end,
        visible_at = clock_timestamp() + coalesce(
            make_interval(secs => u.delay),
            case u.verdict when 'release' then interval '0' else headwater_internal.backoff(target, r.attempt) end
        ),
        dated_at = clock_timestamp(),
        token = null,
        worker = null,
        isolated = r.isolated and u.verdict = 'release',
        last_error = coalesce(left(u.error, 10000), r.last_error),
        history = case u.verdict
            when 'release' then r.history
            else headwater_internal.with_try(r.history, r.attempt, r.worker, u.error)
        end
    from unnest(positions, verdicts, errors, delays) as u (position, verdict, error, delay)
    where
        r.queue_id = target.id and r.token = settle.token and r.position = u.position
        and u.verdict in ('retry', 'release');
    if rest_done then
        delete from headwater_internal.redelivery r where r.queue_id = target.id and r.token = settle.token;
    end if;

    -- First attempts.
    if lease.token is not null then
        with ended as (
            select e.position, e.topic_id, e.key, u.verdict, u.error, u.delay
            from headwater_internal.bound_events(
                target.id, headwater_internal.bound_topics(target.id, lease.lo - 1), lease.lo, lease.hi
            ) as e
            left join unnest(positions, verdicts, errors, delays) as u (position, verdict, error, delay)
                on u.position = e.position
            where lease.acked is null or not e.position <@ lease.acked
        ),
        judged as (
            select
                d.*,
                target.max_attempts = 1
                or d.verdict = 'retry' and headwater_internal.is_past_retry_age(target, d.topic_id, d.position) as is_last,
                case when target.ordered_keys then headwater_internal.key_order_hash(d.key) end as key_hash,
                -- With ordered keys, no event is done after a failed event of the same key.
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
            insert into headwater_internal.dead_letter (queue_id, position, topic_id, attempts, isolated, last_error, history)
            select
                target.id, j.position, j.topic_id, 1, false, left(j.error, 10000),
                headwater_internal.with_try('[]', 1, lease.worker, j.error)
            from judged j
            where j.outcome = 'dead' or j.outcome = 'retry' and j.is_last
        ),
        again as (
            insert into headwater_internal.redelivery
                (queue_id, position, topic_id, attempt, visible_at, key_hash, last_error, history)
            select
                target.id, j.position, j.topic_id,
                case j.outcome when 'retry' then 1 else 0 end,
                case
                    when j.delay is null and j.outcome = 'release' and j.key_hash is not null then 'infinity'
                    else clock_timestamp() + coalesce(
                        make_interval(secs => j.delay),
                        case j.outcome when 'retry' then headwater_internal.backoff(target, 1) else interval '0' end
                    )
                end,
                j.key_hash,
                left(j.error, 10000),
                case j.outcome
                    when 'retry' then headwater_internal.with_try('[]', 1, lease.worker, j.error)
                    else '[]'
                end
            from judged j
            where j.outcome = 'release' or j.outcome = 'retry' and not j.is_last
        )
        select
            array_agg(j.position) filter (where j.outcome is not null),
            array_agg(distinct j.key_hash) filter (where j.outcome is not null and j.key_hash is not null),
            array_agg(distinct j.key_hash) filter (where j.outcome is null and j.key_hash is not null)
        into fresh, fresh_keys, open_keys
        from judged j;
        update headwater_internal.ledger l
        set
            settled = rest_done or l.acked_events + coalesce(cardinality(fresh), 0) >= l.events,
            acked = coalesce(l.acked, '{}') + coalesce(headwater_internal.as_multirange(fresh), '{}'),
            acked_events = l.acked_events + coalesce(cardinality(fresh), 0),
            keys = case when l.keys is not null then coalesce(open_keys, '{}') end
        where l.queue_id = target.id and l.token = settle.token;
    end if;
    if exists (
        select
        from unnest(positions, verdicts) as u (position, verdict)
        where
            not (u.position = any (coalesce(held, '{}')) or u.position = any (coalesce(fresh, '{}')))
            -- Releasing an event that is no longer leased is not an error, nor is an event deleted with its topic.
            and u.verdict <> 'release'
            and (
                lease.token is null
                or u.position not between lease.lo and lease.hi
                or u.position <@ coalesce(lease.acked, '{}')
            )
    ) then
        perform headwater_internal.refuse_lost_lease(queue_name, token);
    end if;
    if target.ordered_keys then
        perform headwater_internal.free_next_of_keys(
            target.id, coalesce(held_keys, '{}') || coalesce(fresh_keys, '{}') || coalesce(lease.keys, '{}')
        );
    end if;
end;
$$;

-- Raise HW006 for a lease.
create or replace function headwater_internal.refuse_lost_lease(queue_name text, token bigint)
returns void
language plpgsql
as $$
begin
    raise exception 'lease % of queue "%" is lost: it was settled, has expired or was revoked by a rewind', token, queue_name
        using errcode = 'HW006',
              detail = json_build_object('queue', queue_name, 'token', token)::text,
              hint = 'Another worker may have claimed its events. Discard this result, claim again, and extend leases in time.';
end;
$$;

-- Extend a lease to `lease_seconds` from now (null: the queue's setting). Returns the time at which it ends. HW006 if
-- the lease is lost, HW011 if the queue does not exist.
create or replace function headwater.extend_lease(queue_name text, token bigint, lease_seconds float8 default null)
returns timestamptz
language plpgsql
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
    target constant headwater_internal.queue := headwater_internal.find_queue(queue_name);
    ends_at constant timestamptz :=
        clock_timestamp() + make_interval(secs => coalesce(lease_seconds, target.lease_seconds));
    kept boolean;
begin
    update headwater_internal.ledger l
    set expires_at = ends_at, dated_at = clock_timestamp()
    where l.queue_id = target.id and l.token = extend_lease.token and not l.settled;
    kept := found;
    update headwater_internal.redelivery r
    set visible_at = ends_at, dated_at = clock_timestamp()
    where r.queue_id = target.id and r.token = extend_lease.token;
    if not kept and not found then
        perform headwater_internal.refuse_lost_lease(queue_name, token);
    end if;
    return ends_at;
end;
$$;

-- Long, because all steps run under one acquisition of the queue's lock.
--
-- Return the events of expired leases to the queue, and delete the rows of claims that were settled long ago. Returns
-- the number of events returned. Any process may call it at any time. HW011 if the queue does not exist.
create or replace function headwater.reap(queue_name text)
returns integer
language plpgsql
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
    target constant headwater_internal.queue := headwater_internal.find_queue(queue_name);
    forgotten bigint := coalesce(
        (select p.settled_token from headwater_internal.queue_progress p where p.queue_id = target.id), 0
    );
    -- One time for all of them, so that they are redelivered in the order of the log.
    ended_at constant timestamptz := clock_timestamp();
    lapsed headwater_internal.ledger;
    lapsed_again record;
    given_back integer := 0;
    step integer;
    freed bigint[];
    lowest_open bigint;
begin
    if not headwater_internal.try_lock_queue(target.id) then
        return 0;
    end if;
    for lapsed in
        select l.* from headwater_internal.ledger l
        where
            l.queue_id = target.id and l.token > greatest(forgotten, target.start_token)
            and not l.settled
            and (l.expires_at < ended_at or l.dated_at > ended_at + headwater_internal.clock_tolerance())
        order by l.token
        for update skip locked
    loop
        if lapsed.dated_at > ended_at + headwater_internal.clock_tolerance() then
            -- The clock was set back since: restart the lease.
            update headwater_internal.ledger l
            set expires_at = ended_at + (lapsed.expires_at - lapsed.dated_at), dated_at = ended_at
            where l.queue_id = target.id and l.token = lapsed.token;
            continue;
        end if;
        update headwater_internal.ledger l set settled = true where l.queue_id = target.id and l.token = lapsed.token;
        with unacked as (
            select
                e.position, e.topic_id,
                case when target.ordered_keys then headwater_internal.key_order_hash(e.key) end as key_hash,
                -- It is unknown which of several events failed, so the attempt is not counted for any of them.
                case when lapsed.events - lapsed.acked_events = 1 then 1 else 0 end as attempt,
                lapsed.events - lapsed.acked_events = 1 and (
                    target.max_attempts = 1 or headwater_internal.is_past_retry_age(target, e.topic_id, e.position)
                ) as is_last
            from headwater_internal.bound_events(
                target.id, headwater_internal.bound_topics(target.id, lapsed.lo - 1), lapsed.lo, lapsed.hi
            ) as e
            where
                (lapsed.acked is null or not e.position <@ lapsed.acked)
                -- Events deferred because of their key were never in this lease.
                and not exists (
                    select from headwater_internal.redelivery r where r.queue_id = target.id and r.position = e.position
                )
        ),
        died as (
            insert into headwater_internal.dead_letter
                (queue_id, position, topic_id, attempts, isolated, last_error, history)
            select
                target.id, u.position, u.topic_id, u.attempt, true, 'lease expired',
                headwater_internal.with_try('[]', u.attempt, lapsed.worker, 'lease expired')
            from unacked u
            where u.is_last
        )
        insert into headwater_internal.redelivery
            (queue_id, position, topic_id, attempt, visible_at, isolated, key_hash, last_error, history)
        select
            target.id, u.position, u.topic_id, u.attempt,
            case when u.key_hash is null then ended_at else 'infinity' end,
            true, u.key_hash, 'lease expired', headwater_internal.with_try('[]', u.attempt, lapsed.worker, 'lease expired')
        from unacked u
        where not u.is_last;
        get diagnostics step = row_count;
        given_back := given_back + step;
        if lapsed.keys is not null then
            perform headwater_internal.free_next_of_keys(target.id, lapsed.keys);
        end if;
    end loop;

    -- Leases of retries, and waits, that began before the clock was set back.
    update headwater_internal.redelivery r
    set visible_at = ended_at + (r.visible_at - r.dated_at), dated_at = ended_at
    where
        r.queue_id = target.id and r.visible_at > ended_at and r.visible_at < 'infinity'
        and r.dated_at > ended_at + headwater_internal.clock_tolerance();

    -- The same for retries.
    for lapsed_again in
        select r.token, count(*) as held
        from headwater_internal.redelivery r
        where r.queue_id = target.id and r.token is not null and r.visible_at < ended_at
        group by r.token
    loop
        select array_agg(r.key_hash) filter (where r.key_hash is not null), count(*) into freed, step
        from (
            select r.key_hash from headwater_internal.redelivery r
            where r.queue_id = target.id and r.token = lapsed_again.token
            for update skip locked
        ) as r;
        -- A lease is lost as a whole or not at all; this one is being settled at the moment.
        continue when step < lapsed_again.held;
        if step = 1 then
            perform headwater_internal.bury(target, array[r.position], array['lease expired'])
            from headwater_internal.redelivery r
            where
                r.queue_id = target.id and r.token = lapsed_again.token
                and (
                    r.attempt >= target.max_attempts
                    or headwater_internal.is_past_retry_age(target, r.topic_id, r.position)
                );
        end if;
        update headwater_internal.redelivery r
        set
            attempt = case when step = 1 then r.attempt else r.attempt - 1 end,
            visible_at = ended_at,
            dated_at = ended_at,
            token = null,
            worker = null,
            isolated = true,
            last_error = 'lease expired',
            history = headwater_internal.with_try(
                r.history, case when step = 1 then r.attempt else r.attempt - 1 end, r.worker, 'lease expired'
            )
        where r.queue_id = target.id and r.token = lapsed_again.token;
        get diagnostics step = row_count;
        given_back := given_back + step;
        if freed is not null then
            perform headwater_internal.free_next_of_keys(target.id, freed);
        end if;
    end loop;

    -- Events that became due at a time that claims no longer scan, because their settle() committed late.
    update headwater_internal.redelivery r
    set visible_at = clock_timestamp(), dated_at = clock_timestamp()
    where
        r.queue_id = target.id and r.token is null and r.visible_at < 'infinity'
        and r.visible_at <= (
            select case when l.due_after is not null then least(l.due_after, ended_at) end from headwater_internal.ledger l
            where l.queue_id = target.id and l.token > target.start_token
            order by l.token desc
            limit 1
        );

    -- Events removed by retention or deleted with their topic are not retried.
    with gone as (
        delete from headwater_internal.redelivery r
        using headwater_internal.topic t
        where
            r.queue_id = target.id and r.token is null and t.id = r.topic_id
            and (t.deleted_at is not null or r.position <= t.expired_to)
        returning r.key_hash
    )
    select array_agg(g.key_hash) filter (where g.key_hash is not null) into freed from gone g;
    if freed is not null then
        perform headwater_internal.free_next_of_keys(target.id, freed);
    end if;

    -- Delete in bulk: deleting one row with each call would create a hot row.
    select min(l.token) into lowest_open
    from headwater_internal.ledger l
    where l.queue_id = target.id and l.token > forgotten and not l.settled;
    lowest_open := coalesce(lowest_open, (select max(l.token) from headwater_internal.ledger l where l.queue_id = target.id));
    if (
        select count(*) from (
            select from headwater_internal.ledger l
            where l.queue_id = target.id and l.token > forgotten and l.token < lowest_open
            limit 1000
        ) as many
    ) = 1000 then
        with gone as (
            delete from headwater_internal.ledger l
            where l.queue_id = target.id and l.token > forgotten and l.token < lowest_open
            returning l.events
        )
        insert into headwater_internal.queue_progress as p (queue_id, settled_token, past_events)
        select target.id, lowest_open - 1, coalesce(sum(g.events), 0) from gone g
        on conflict (queue_id) do update
            set settled_token = excluded.settled_token, past_events = p.past_events + excluded.past_events;
    end if;
    return given_back;
end;
$$;

-- Those of these queues (null: of all) for which reap() may have work: an expired lease, a lease or wait dated before the
-- clock was set back, a redelivery, or claims to delete. One query for all, so that an idle queue costs a few index
-- lookups.
create or replace function headwater_internal.queues_to_reap(names text[] default null)
returns setof text
language sql
stable
set enable_seqscan = off
set enable_bitmapscan = off
begin atomic
    select g.name
    from headwater_internal.queue g
    left join headwater_internal.queue_progress p on p.queue_id = g.id
    where
        g.kind = 'bindings'
        and (names is null or g.name = any (names))
        and (
            exists (select from headwater_internal.redelivery r where r.queue_id = g.id)
            or exists (
                select from headwater_internal.ledger l
                where
                    l.queue_id = g.id and l.token > greatest(p.settled_token, g.start_token) and not l.settled
                    and (
                        l.expires_at < clock_timestamp()
                        or l.dated_at > clock_timestamp() + headwater_internal.clock_tolerance()
                    )
            )
            -- As many as reap() deletes at once.
            or exists (
                select from headwater_internal.ledger l
                where l.queue_id = g.id and l.token > coalesce(p.settled_token, 0)
                offset 999
                limit 1
            )
        )
    order by g.id;
end;

-- The minimum number of positions by which a queue is moved past events of other topics.
create or replace function headwater_internal.skip_stride()
returns integer
language sql
immutable
return 10000;

-- The queues that are far enough behind the head for skip_unbound_events() to move them, in random order: if a round
-- ends early, every queue is reached in a later one. `selective`: queues with a binding that selects by more than the
-- topic, whose events must be checked one by one; otherwise queues of whole topics.
create or replace function headwater_internal.queues_to_skip(selective boolean)
returns setof text
language sql
volatile
set enable_seqscan = off
set enable_bitmapscan = off
begin atomic
    select g.name
    from headwater_internal.queue g
    where
        g.kind = 'bindings'
        -- A queue that never had a binding still waits at its start position.
        and exists (select from headwater_internal.binding b where b.queue_id = g.id)
        and selective = exists (
            select from headwater_internal.binding b
            where
                b.queue_id = g.id
                and (b.topic_id is null or b.type is not null or b.pattern is not null or b.headers is not null)
        )
        and headwater.head() - headwater_internal.claimed_position(g) >= headwater_internal.skip_stride()
    order by random();
end;

-- Move the claimed position of a queue past events that its bindings do not select, in strides, so that a queue with
-- rare events does not hold retention back. Returns the number of topics and events examined. Any process may call it
-- at any time.
create or replace function headwater_internal.skip_unbound_events(queue_name text)
returns bigint
language plpgsql
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
    target headwater_internal.queue := headwater_internal.find_queue(queue_name);
    stride constant integer := headwater_internal.skip_stride();
    last_claimed bigint;
    ids integer[];
    whole_topics boolean;
    pass_to bigint;
    looked_at bigint;
    scanned integer;
    scanned_to bigint;
    first_own bigint;
begin
    if headwater.head() - headwater_internal.claimed_position(target) < stride or not headwater_internal.try_lock_queue(target.id) then
        return 1;
    end if;
    target := headwater_internal.find_queue(queue_name);
    last_claimed := headwater_internal.claimed_position(target);
    -- Whether the bindings select every event of the topics. Null: the queue never had a binding and waits at its start
    -- position.
    select
        bool_and(
            b.topic_id is not null and b.type is null and b.pattern is null and b.headers is null
            and greatest(b.from_position, b.to_position) <= last_claimed
        )
    into whole_topics
    from headwater_internal.binding b
    where b.queue_id = target.id;
    if whole_topics is null then
        return 1;
    end if;
    ids := headwater_internal.bound_topics(target.id, last_claimed);
    looked_at := 1 + cardinality(ids);
    pass_to := headwater_internal.refresh_stable();
    if whole_topics then
        select min(f.position) into first_own
        from unnest(ids) as i (id)
        join headwater_internal.topic t on t.id = i.id
        cross join lateral (
            select e.position from headwater_internal.event e
            where e.topic_id = t.id and e.position > greatest(last_claimed, t.expired_to) and e.position <= pass_to
            order by e.position
            limit 1
        ) as f;
    else
        looked_at := looked_at + cardinality(ids);
        select count(*), max(s.position) into scanned, scanned_to
        from (
            select f.position
            from unnest(ids) as i (id)
            cross join lateral (
                select e.position from headwater_internal.event e
                where e.topic_id = i.id and e.position > last_claimed and e.position <= pass_to
                order by e.position
                limit stride
            ) as f
            order by f.position
            limit stride
        ) as s;
        looked_at := looked_at + 2 * scanned;
        if scanned = stride then
            pass_to := scanned_to;
        end if;
        select min(e.position) into first_own
        from headwater_internal.bound_events(target.id, ids, last_claimed + 1, pass_to) as e;
    end if;
    pass_to := least(pass_to, first_own - 1);
    if pass_to - last_claimed >= stride then
        insert into headwater_internal.ledger (queue_id, token, lo, hi, events, worker, expires_at, settled)
        values (
            target.id, headwater_internal.next_token(), last_claimed + 1, pass_to, 0, '', clock_timestamp(), true
        );
    end if;
    return looked_at;
end;
$$;
