-- Leases: how they end, are kept, and run out.

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
        dated_at = clock_timestamp(),
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
    set expires_at = ends_at, dated_at = clock_timestamp()
    where l.group_id = target.id and l.token = extend_lease.token and not l.settled;
    kept := found;
    update headwater.redelivery r
    set visible_at = ends_at, dated_at = clock_timestamp()
    where r.group_id = target.id and r.token = extend_lease.token;
    if not kept and not found then
        perform headwater.refuse_lost_lease(group_name, token);
    end if;
    return ends_at;
end;
$$;

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
            and not l.settled
            and (l.expires_at < ended_at or l.dated_at > ended_at + headwater.clock_tolerance())
        order by l.token
        for update skip locked
    loop
        if lapsed.dated_at > ended_at + headwater.clock_tolerance() then
            -- The clock went back since: the lease is counted from now on.
            update headwater.ledger l
            set expires_at = ended_at + (lapsed.expires_at - lapsed.dated_at), dated_at = ended_at
            where l.group_id = target.id and l.token = lapsed.token;
            continue;
        end if;
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

    -- Leases of second tries, and waits, that began before the clock went back.
    update headwater.redelivery r
    set visible_at = ended_at + (r.visible_at - r.dated_at), dated_at = ended_at
    where
        r.group_id = target.id and r.visible_at > ended_at and r.visible_at < 'infinity'
        and r.dated_at > ended_at + headwater.clock_tolerance();

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
            dated_at = ended_at,
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
    set visible_at = clock_timestamp(), dated_at = clock_timestamp()
    where
        r.group_id = target.id and r.token is null
        and r.visible_at <= (
            select case when l.due_after is not null then least(l.due_after, ended_at) end from headwater.ledger l
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

-- The queues for which reap() may find work: a lease that ended, a lease or a wait dated by a clock that was set back, a
-- redelivery, or claims to forget. One query for all queues, so that an idle queue costs a few index lookups.
create or replace function headwater.queues_to_reap()
returns setof text
language sql
stable
set enable_seqscan = off
set enable_bitmapscan = off
begin atomic
    select g.name
    from headwater.consumer_group g
    left join headwater.group_progress p on p.group_id = g.id
    where
        g.kind = 'queue'
        and (
            exists (select from headwater.redelivery r where r.group_id = g.id)
            or exists (
                select from headwater.ledger l
                where
                    l.group_id = g.id and l.token > greatest(p.settled_token, g.start_token) and not l.settled
                    and (
                        l.expires_at < clock_timestamp()
                        or l.dated_at > clock_timestamp() + headwater.clock_tolerance()
                    )
            )
            -- As many as reap() forgets at once.
            or exists (
                select from headwater.ledger l
                where l.group_id = g.id and l.token > coalesce(p.settled_token, 0)
                offset 999
                limit 1
            )
        )
    order by g.id;
end;

-- By how many positions a queue is moved past events of others, at least.
create or replace function headwater.skip_stride()
returns integer
language sql
immutable
return 10000;

-- The queues that are so far behind the head that skip_unbound_events() may move them, in random order: where a round has
-- to end early, every queue gets its turn in some later round. `selective`: those with a binding that selects by more than
-- the topic, whose events must be looked at one by one; else those of whole topics.
create or replace function headwater.queues_to_skip(selective boolean)
returns setof text
language sql
volatile
set enable_seqscan = off
set enable_bitmapscan = off
begin atomic
    select g.name
    from headwater.consumer_group g
    where
        g.kind = 'queue'
        -- A queue that was never bound to anything still waits for its beginning.
        and exists (select from headwater.binding b where b.group_id = g.id)
        and selective = exists (
            select from headwater.binding b
            where
                b.group_id = g.id
                and (b.topic_id is null or b.type is not null or b.pattern is not null or b.headers is not null)
        )
        and headwater.head() - headwater.frontier(g) >= headwater.skip_stride()
    order by random();
end;

-- Move a queue's claimed position past events that are not its own, in strides, so that a queue whose events are rare
-- does not hold retention back. Returns how much it looked at: topics and events. Any process may call it at any time.
create or replace function headwater.skip_unbound_events(group_name text)
returns bigint
language plpgsql
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
    target headwater.consumer_group := headwater.find_group(group_name);
    stride constant integer := headwater.skip_stride();
    last_claimed bigint;
    ids integer[];
    whole_topics boolean;
    pass_to bigint;
    looked_at bigint;
    scanned integer;
    scanned_to bigint;
    first_own bigint;
begin
    if headwater.head() - headwater.frontier(target) < stride or not headwater.try_lock_group(target.id) then
        return 1;
    end if;
    target := headwater.find_group(group_name);
    last_claimed := headwater.frontier(target);
    -- Every event of the topics is the queue's. Null: it was never bound to anything, and waits for its beginning.
    select
        bool_and(
            b.topic_id is not null and b.type is null and b.pattern is null and b.headers is null
            and greatest(b.from_position, b.to_position) <= last_claimed
        )
    into whole_topics
    from headwater.binding b
    where b.group_id = target.id;
    if whole_topics is null then
        return 1;
    end if;
    ids := headwater.bound_topics(target.id, last_claimed);
    looked_at := 1 + cardinality(ids);
    pass_to := headwater.refresh_settled();
    if whole_topics then
        select min(f.position) into first_own
        from unnest(ids) as i (id)
        join headwater.topic t on t.id = i.id
        cross join lateral (
            select e.position from headwater.event e
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
                select e.position from headwater.event e
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
        from headwater.bound_events(target.id, ids, last_claimed + 1, pass_to) as e;
    end if;
    pass_to := least(pass_to, first_own - 1);
    if pass_to - last_claimed >= stride then
        insert into headwater.ledger (group_id, token, lo, hi, events, worker, expires_at, settled)
        values (
            target.id, headwater.next_token(), last_claimed + 1, pass_to, 0, '', clock_timestamp(), true
        );
    end if;
    return looked_at;
end;
$$;
