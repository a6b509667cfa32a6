-- The life of events in a group: claim, settle, retry, die, come back. Claiming and settling cost a row a batch;
-- only failures cost rows of their own.

-- Find out how far the log is settled, note it where every session sees it, and return how far these topics are (null:
-- all of them).
create or replace function headwater.refresh_settled(topic_ids integer[] default null)
returns bigint
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    found_positions record;
begin
    select s.settled, s.stable into found_positions
    from headwater.stable_positions(null, refresh_settled.topic_ids) as s;
    perform setval('headwater.settled_register', found_positions.settled);
    return found_positions.stable;
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

-- In a group with ordered keys: the keys of which an event waits or is tried again. A loose index scan, one lookup a key:
-- many thousands of events may wait for few keys. (Rows are compared whole, and their order asked for, so that the index
-- on keys is the only one that serves: with equalities, a plan made without statistics may read all that the group has.)
create or replace function headwater.waiting_keys(group_id integer)
returns bigint[]
language sql
stable
return array(
    with recursive waiting as (
        select f.group_id, f.key_hash
        from (
            select r.group_id, r.key_hash
            from headwater.redelivery r
            where
                (r.group_id, r.key_hash) >= (waiting_keys.group_id, '-9223372036854775808'::bigint)
                and r.key_hash is not null
            order by r.group_id, r.key_hash
            limit 1
        ) as f
        union all
        select n.group_id, n.key_hash
        from waiting w
        cross join lateral (
            select r.group_id, r.key_hash
            from headwater.redelivery r
            where (r.group_id, r.key_hash) > (w.group_id, w.key_hash) and r.key_hash is not null
            order by r.group_id, r.key_hash
            limit 1
        ) as n
        where w.group_id = waiting_keys.group_id
    )
    select w.key_hash from waiting w where w.group_id = waiting_keys.group_id
);

-- In a group with ordered keys: the position of the first event of a key that waits. The same index, for the same reason.
create or replace function headwater.first_of_key(group_id integer, key_hash bigint)
returns bigint
language sql
stable
return (
    select case when f.group_id = first_of_key.group_id and f.key_hash = first_of_key.key_hash then f.position end
    from (
        select r.group_id, r.key_hash, r.position
        from headwater.redelivery r
        where
            (r.group_id, r.key_hash, r.position) >= (first_of_key.group_id, first_of_key.key_hash, 0)
            and r.key_hash is not null
        order by r.group_id, r.key_hash, r.position
        limit 1
    ) as f
);

-- Whether an event is the first of its key that waits, and none of its key is leased: see leased_keys().
create or replace function headwater.is_next_of_key(waiting headwater.redelivery, leased_keys bigint[])
returns boolean
language sql
stable
return waiting.key_hash is null or (
    waiting.key_hash <> all (leased_keys)
    and headwater.first_of_key(waiting.group_id, waiting.key_hash) = waiting.position
);

-- In a group with ordered keys: the keys of events that are leased, for the first time or again.
create or replace function headwater.leased_keys(target headwater.consumer_group)
returns bigint[]
language sql
stable
return array(select unnest(l.keys) from headwater.open_claims(target) l) || array(
    select r.key_hash
    from headwater.redelivery r
    where r.group_id = target.id and r.token is not null and r.key_hash is not null
    order by r.token
);

-- In a group with ordered keys: free the next waiting event of each of these keys.
create or replace function headwater.free_next_of_keys(group_id integer, keys bigint[])
returns void
language sql
begin atomic
    update headwater.redelivery r
    set visible_at = clock_timestamp(), dated_at = clock_timestamp()
    where
        r.group_id = free_next_of_keys.group_id
        and r.position = any (
            array(select headwater.first_of_key(free_next_of_keys.group_id, k) from unnest(keys) as k)
        )
        and r.visible_at = 'infinity';
end;

-- A new proof of a lease. Within a group a later one is greater. A crash may take the sequence back by what was not
-- yet on disk, and the number then comes again: the random part keeps it from proving somebody else's lease.
create or replace function headwater.next_token()
returns bigint
language sql
volatile
return (nextval('headwater.lease_token') << 24) | floor(random() * 16777216)::bigint;
