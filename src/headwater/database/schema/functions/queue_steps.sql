-- Building blocks of queues: stable position, backoff, ordered keys, lease tokens. Claiming and settling a batch costs
-- one ledger row; only failed events have rows of their own.

-- Compute the stable position of the log, record it in a sequence that all sessions read, and return the stable
-- position of these topics (null: of all).
create or replace function headwater_internal.refresh_stable(topic_ids integer[] default null)
returns bigint
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    found_positions record;
begin
    select s.log_stable, s.stable into found_positions
    from headwater_internal.stable_positions(null, refresh_stable.topic_ids) as s;
    perform setval('headwater_internal.stable_register', found_positions.log_stable);
    return found_positions.stable;
end;
$$;

-- Positions as a multirange.
create or replace function headwater_internal.as_multirange(positions bigint[])
returns int8multirange
language sql
immutable strict
return (select range_agg(int8range(p, p, '[]')) from unnest(positions) as p);

-- The hash by which the events of a key are ordered. If two keys share a hash, one only waits for the other.
create or replace function headwater_internal.key_order_hash(key bytea)
returns bigint
language sql
immutable strict
return ('x' || left(md5(key), 16))::bit(64)::bigint;

-- The wait of a queue after a failed attempt.
create or replace function headwater_internal.backoff(target headwater_internal.queue, attempt integer)
returns interval
language sql
volatile
return make_interval(
    secs => least(
        target.backoff_seconds * power(target.backoff_factor, least(greatest(attempt - 1, 0), 200)),
        target.backoff_max_seconds
    ) * (1 + target.backoff_jitter * (2 * random() - 1))
);

-- Whether an event is too old for another attempt. The age is that at the begin of the statement: the same event must
-- not be given up and retried by one settle().
create or replace function headwater_internal.is_past_retry_age(
    target headwater_internal.queue, topic_id integer, "position" bigint
)
returns boolean
language sql
stable
return target.retry_age_seconds is not null and exists (
    select
    from headwater_internal.event e
    where
        e.topic_id = is_past_retry_age.topic_id and e.position = is_past_retry_age.position
        and e.published_at < statement_timestamp() - make_interval(secs => target.retry_age_seconds)
);

-- The unsettled claims of new events.
create or replace function headwater_internal.open_claims(target headwater_internal.queue)
returns setof headwater_internal.ledger
language sql
stable
begin atomic
    select l.*
    from headwater_internal.ledger l
    where
        l.queue_id = target.id and not l.settled
        and l.token > greatest(
            target.start_token,
            (select p.settled_token from headwater_internal.queue_progress p where p.queue_id = target.id)
        );
end;

-- The number of events of a queue that are leased now.
create or replace function headwater_internal.in_flight(target headwater_internal.queue)
returns bigint
language sql
stable
return (
    select coalesce(sum(l.events - l.acked_events), 0)
    from headwater_internal.open_claims(target) l
    where l.expires_at > clock_timestamp()
) + (
    select count(*)
    from headwater_internal.redelivery r
    where r.queue_id = target.id and r.token is not null and r.visible_at > clock_timestamp()
);

-- Append one attempt to the history of an event.
create or replace function headwater_internal.with_try(history jsonb, attempt integer, worker text, error text)
returns jsonb
language sql
volatile
return history || jsonb_build_object(
    'attempt', attempt, 'at', clock_timestamp(), 'worker', worker, 'error', left(error, 2000)
);

-- For a queue with ordered keys: the keys with an event that waits or is retried. A loose index scan with one lookup
-- for each key, since many thousands of events may wait for few keys. (Rows are compared as a whole and their order is
-- requested, so that only the index on keys can be used: with equalities, a plan made without statistics may read all
-- rows of the queue.)
create or replace function headwater_internal.waiting_keys(queue_id integer)
returns bigint[]
language sql
stable
return array(
    with recursive waiting as (
        select f.queue_id, f.key_hash
        from (
            select r.queue_id, r.key_hash
            from headwater_internal.redelivery r
            where
                (r.queue_id::bigint, r.key_hash) >= (waiting_keys.queue_id, '-9223372036854775808'::bigint)
                and r.key_hash is not null
            order by r.queue_id::bigint, r.key_hash
            limit 1
        ) as f
        union all
        select n.queue_id, n.key_hash
        from waiting w
        cross join lateral (
            select r.queue_id, r.key_hash
            from headwater_internal.redelivery r
            where (r.queue_id::bigint, r.key_hash) > (w.queue_id, w.key_hash) and r.key_hash is not null
            order by r.queue_id::bigint, r.key_hash
            limit 1
        ) as n
        where w.queue_id = waiting_keys.queue_id
    )
    select w.key_hash from waiting w where w.queue_id = waiting_keys.queue_id
);

-- For a queue with ordered keys: the position of the first waiting event of a key. Uses the same index, for the same
-- reason.
create or replace function headwater_internal.first_of_key(queue_id integer, key_hash bigint)
returns bigint
language sql
stable
return (
    select case when f.queue_id = first_of_key.queue_id and f.key_hash = first_of_key.key_hash then f.position end
    from (
        select r.queue_id, r.key_hash, r.position
        from headwater_internal.redelivery r
        where
            (r.queue_id::bigint, r.key_hash, r.position) >= (first_of_key.queue_id, first_of_key.key_hash, 0)
            and r.key_hash is not null
        order by r.queue_id::bigint, r.key_hash, r.position
        limit 1
    ) as f
);

-- Whether an event is the first waiting event of its key, and no event of its key is leased: see leased_keys().
create or replace function headwater_internal.is_next_of_key(waiting headwater_internal.redelivery, leased_keys bigint[])
returns boolean
language sql
stable
return waiting.key_hash is null or (
    waiting.key_hash <> all (leased_keys)
    and headwater_internal.first_of_key(waiting.queue_id, waiting.key_hash) = waiting.position
);

-- For a queue with ordered keys: the keys of the leased events, first attempts and retries.
create or replace function headwater_internal.leased_keys(target headwater_internal.queue)
returns bigint[]
language sql
stable
return array(select unnest(l.keys) from headwater_internal.open_claims(target) l) || array(
    select r.key_hash
    from headwater_internal.redelivery r
    where r.queue_id = target.id and r.token is not null and r.key_hash is not null
    order by r.token
);

-- For a queue with ordered keys: make the next waiting event of each of these keys available.
create or replace function headwater_internal.free_next_of_keys(queue_id integer, keys bigint[])
returns void
language sql
begin atomic
    update headwater_internal.redelivery r
    set visible_at = clock_timestamp(), dated_at = clock_timestamp()
    where
        r.queue_id = free_next_of_keys.queue_id
        and r.position = any (
            array(select headwater_internal.first_of_key(free_next_of_keys.queue_id, k) from unnest(keys) as k)
        )
        and r.visible_at = 'infinity';
end;

-- A new lease token. Within a queue, later tokens are greater. A crash may set the sequence back by the values that
-- were not yet on disk; the random part keeps a repeated number from matching another worker's lease.
create or replace function headwater_internal.next_token()
returns bigint
language sql
volatile
return (nextval('headwater_internal.lease_token') << 24) | floor(random() * 16777216)::bigint;
