-- Order: how a position becomes stable. Read this before changing anything that assigns or reads positions.
--
-- A sequence assigns positions at insert, but transactions commit in another order: a reader that has seen 7 could
-- later find a 6. Every publishing transaction therefore advertises, before it assigns its first position of a topic, a
-- lower bound of the positions that it will assign: a shared advisory lock whose key is a tag and the last value of the
-- sequence. A second shared lock names the topic, so that readers of other topics do not wait. A number within the
-- transaction connects the two locks; each further topic of the transaction gets a bound of its own, so the stable
-- position of a topic never goes back. Three rules; breaking any of them has lost events:
--   * Both locks are taken before the first nextval for an event of the topic.
--   * A reader takes the last value of the sequence first and looks at the locks second.
--   * A reader reads the events in a later snapshot than both.
--
-- Keys (tags are listed in locks.sql): (29300 + number) << 48 | bound; 29292 << 48 | hash of the topic << 16 | number;
-- 29294 << 48 | number for a publisher to any topic. Number 0 is used by a transaction that has written nothing yet;
-- number 15 is always for any topic.

-- The hash of a topic in the lock keys of publishers. Two topics with the same hash wait for each other's publishers;
-- there is no other effect.
create or replace function headwater_internal.publisher_hash(topic text)
returns bigint
language sql
immutable
return hashtext(topic)::bigint & 4294967295;

-- Advertise the transaction as a publisher to a topic (null: to any topic). A savepoint that is rolled back releases
-- the locks, and also resets the setting that lists them: the transaction id and the topic hashes, as in
-- 753/1234/5678/. A transaction without an id has written nothing yet, and most transactions write once, so the first
-- call does not set it. (Assignments instead of PERFORM: plpgsql evaluates them in a tenth of the time.)
create or replace function headwater_internal.advertise_publisher(topic text)
returns void
language plpgsql
as $$
declare
    register constant bigint := pg_sequence_last_value('headwater_internal.epoch_register');
    publisher text;
    held text;
    number integer := 0;
    nothing text;
begin
    if register is null or register & 1 = 0 or register >> 32 <> headwater_internal.epoch_identity() then
        nothing := headwater_internal.begin_epoch();
    end if;
    publisher := pg_current_xact_id_if_assigned()::text;
    if publisher is not null then
        held := current_setting('headwater.publisher', true);
        if not coalesce(starts_with(held, publisher || '/'), false) then
            held := publisher || '/';
        elsif right(held, 3) = '/*/' or strpos(held, '/' || headwater_internal.publisher_hash(topic) || '/') > 0 then
            return;
        end if;
        number := cardinality(string_to_array(held, '/')) - 1;
        if number >= 15 then
            number := 15;
            topic := null;
        end if;
        nothing := set_config(
            'headwater.publisher', held || coalesce(headwater_internal.publisher_hash(topic)::text, '*') || '/', true
        );
    end if;
    if topic is null then
        nothing := pg_advisory_xact_lock_shared((29294::bigint << 48) | number);
    else
        nothing := pg_advisory_xact_lock_shared((29292::bigint << 48) | (headwater_internal.publisher_hash(topic) << 16) | number);
    end if;
    nothing := pg_advisory_xact_lock_shared(
        ((29300 + number)::bigint << 48) | coalesce(pg_sequence_last_value('headwater_internal.position'), 0)
    );
end;
$$;

-- The locks of publishers, one row for each bound: its transaction and its topics (null: any topic). Number 0 may have
-- several topics: a transaction that has written nothing yet does not list its locks.
create or replace view headwater_internal.publisher_lock as
select
    k.pid,
    k.virtualtransaction,
    min(k.value) filter (where k.tag >= 29300) as position_bound,
    -- A publisher that names no topic may publish to any.
    case when not bool_or(k.tag = 29294) then array_agg(k.value >> 16) filter (where k.tag = 29292) end as topic_hashes
from (
    select
        p.pid, p.virtualtransaction, p.classid::bigint >> 16 as tag,
        ((p.classid::bigint & 65535) << 32) | p.objid::bigint as value
    from pg_locks p
    where
        p.locktype = 'advisory'
        and p.objsubid = 1
        and (p.classid::bigint >> 16 between 29300 and 29315 or p.classid::bigint >> 16 in (29292, 29294))
        and p.database = (select d.oid from pg_database d where d.datname = current_database())
) as k
group by k.pid, k.virtualtransaction, case when k.tag >= 29300 then k.tag - 29300 else k.value & 65535 end
having bool_or(k.tag >= 29300);

-- The default of event.position, for a plain INSERT or a COPY by the table's owner. The topics are not known yet, so
-- the transaction is advertised for all of them; `headwater.advertised` then skips this call for the following rows.
create or replace function headwater_internal.assign_position()
returns bigint
language plpgsql
volatile
as $$
declare
    nothing text;
begin
    nothing := headwater_internal.advertise_publisher(null);
    -- A transaction without an id has not recorded that it holds the lock: this is its first write.
    if pg_current_xact_id_if_assigned() is not null then
        nothing := set_config('headwater.advertised', 'y', true);
    end if;
    return nextval('headwater_internal.position');
end;
$$;

-- Advertise a COPY into `event` whose rows all belong to one topic; end_copy() must follow in the same transaction.
-- Returns false if the current role may not write to `event`: then publish with headwater.publish_batch().
create or replace function headwater_internal.begin_copy(topic text)
returns boolean
language plpgsql
volatile
as $$
begin
    if not has_table_privilege('headwater_internal.event', 'insert') then
        return false;
    end if;
    perform headwater_internal.advertise_publisher(topic);
    perform set_config('headwater.advertised', 'y', true);
    return true;
end;
$$;

-- Allow further writes of the transaction to advertise their topics again, after begin_copy().
create or replace function headwater_internal.end_copy()
returns void
language plpgsql
volatile
as $$
begin
    perform set_config('headwater.advertised', '', true);
end;
$$;

-- The head of the log: the highest position that any transaction has assigned; 0 for an empty log. Takes no snapshot,
-- so it is cheap enough to poll.
create or replace function headwater.head()
returns bigint
language sql
return coalesce(pg_sequence_last_value('headwater_internal.position'), 0);

-- The open publishing transactions: the process, the position from which each may publish, and its topics (null: any).
create or replace view headwater.publisher_in_flight as
select
    l.pid,
    l.pid is null as prepared,
    l.position_bound,
    case when not l.any_topic then (
        select array_agg(t.name order by t.name)
        from headwater_internal.topic t
        where t.deleted_at is null and headwater_internal.publisher_hash(t.name) = any (l.topic_hashes)
    ) end as topics,
    a.usename as user_name,
    a.application_name,
    a.state,
    a.xact_start as began_at,
    clock_timestamp() - a.xact_start as age
from (
    select
        p.pid,
        min(p.position_bound) as position_bound,
        array_agg(h.topic_hash) as topic_hashes,
        bool_or(p.topic_hashes is null) as any_topic
    from headwater_internal.publisher_lock p
    left join lateral unnest(p.topic_hashes) as h (topic_hash) on true
    group by p.pid, p.virtualtransaction
) as l
left join pg_stat_activity a using (pid);

-- Finds the topic of a publisher's lock, however many topics exist.
create index if not exists topic_publisher_hash on headwater_internal.topic (headwater_internal.publisher_hash(name));

-- The positions at or below which no event can still appear: `log_stable` for all topics, `stable` for these topics, by
-- name or by id (both null: for all). Read the events in a later statement. HW012 outside of READ COMMITTED or on a
-- standby.
create or replace function headwater_internal.stable_positions(
    topics text[], topic_ids integer[] default null, out head bigint, out log_stable bigint, out stable bigint
)
language plpgsql
volatile
as $$
declare
    hashes constant bigint[] := (select array_agg(headwater_internal.publisher_hash(t)) from unnest(topics) as t);
    lowest_bound bigint;
    lowest_of_topics bigint;
begin
    if current_setting('transaction_isolation') <> 'read committed' or pg_is_in_recovery() then
        raise exception 'the log can be read only at READ COMMITTED and on a primary'
            using errcode = 'HW012',
                  hint = 'Use a READ COMMITTED transaction (the default) on the primary.';
    end if;
    head := coalesce(pg_sequence_last_value('headwater_internal.position'), 0);
    select
        min(p.position_bound),
        min(p.position_bound) filter (
            where
                p.topic_hashes is null
                or case
                    when topics is not null then p.topic_hashes && hashes
                    when topic_ids is not null then exists (
                        select from headwater_internal.topic t
                        where headwater_internal.publisher_hash(t.name) = any (p.topic_hashes) and t.id = any (topic_ids)
                    )
                    else true
                end
        )
    into lowest_bound, lowest_of_topics
    from headwater_internal.publisher_lock p;
    log_stable := least(head, lowest_bound);
    stable := least(head, lowest_of_topics);
end;
$$;

-- The position at or below which no event of these topics (null: of the whole log) can still appear. HW012 outside of
-- READ COMMITTED or on a standby.
create or replace function headwater.stable_position(topics text[] default null)
returns bigint
language sql
volatile
return (headwater_internal.stable_positions(topics)).stable;

-- Wait until the stable position of a topic (null: of the whole log) reaches a position; 55P03 after 10 seconds.
create or replace function headwater_internal.await_stable(topic text, at_position bigint)
returns void
language plpgsql
volatile
as $$
declare
    topics constant text[] := case when topic is not null then array[topic] end;
    deadline constant timestamptz := clock_timestamp() + interval '10 seconds';
begin
    while headwater.stable_position(topics) < at_position loop
        if clock_timestamp() > deadline then
            raise exception 'a transaction that publishes to % has been open for 10 seconds', coalesce(topic, 'the log')
                using errcode = '55P03',
                      hint = 'Find its process in headwater.publisher_in_flight, end it, then try again.';
        end if;
        perform pg_sleep(0.01);
    end loop;
end;
$$;

-- The state that a reader of these topics needs: the head of the log, the stable position, and the current epoch. HW012
-- outside of READ COMMITTED or on a standby.
create or replace function headwater.log_state(
    topics text[] default null, out head bigint, out stable bigint, out epoch integer
)
language plpgsql
volatile
as $$
begin
    epoch := headwater.current_epoch();
    select s.head, s.stable into head, stable from headwater_internal.stable_positions(topics) as s;
end;
$$;

-- The same for a process that serves readers of many topics: the stable position of the whole log, and those of these
-- topics that are stable only below `head`. `bounds` are those of all open publishers: while they and `head` do not
-- change, the result for any topic does not change either.
create or replace function headwater_internal.log_state_by_topic(
    topics text[],
    out head bigint,
    out stable bigint,
    out epoch integer,
    out bounds bigint[],
    out held_topics text[],
    out held_to bigint[]
)
language plpgsql
volatile
as $$
begin
    epoch := headwater.current_epoch();
    select s.head, s.log_stable into head, stable from headwater_internal.stable_positions(null) as s;
    -- Here, too, the locks are read after the sequence.
    with publisher as materialized (
        select p.position_bound, p.topic_hashes from headwater_internal.publisher_lock p
    ),
    bound_of_hash as (
        select h.topic_hash, min(p.position_bound) as position_bound
        from publisher p
        cross join lateral unnest(p.topic_hashes) as h (topic_hash)
        group by h.topic_hash
    ),
    bound_of_all as (
        select min(p.position_bound) as position_bound from publisher p where p.topic_hashes is null
    ),
    held as (
        select t.name, least(b.position_bound, a.position_bound) as held_to
        from unnest(topics) as t (name)
        cross join bound_of_all a
        left join bound_of_hash b on b.topic_hash = headwater_internal.publisher_hash(t.name)
    )
    select
        (select array_agg(p.position_bound order by p.position_bound) from publisher p),
        (select array_agg(h.name order by h.name) from held h where h.held_to < log_state_by_topic.head),
        (select array_agg(h.held_to order by h.name) from held h where h.held_to < log_state_by_topic.head)
    into bounds, held_topics, held_to;
end;
$$;

-- Terminate the sessions of publishers that stay open longer than the setting `max_publisher_seconds`; returns their
-- number. Prepared transactions, and sessions that this role may not terminate, remain: `headwater doctor` lists them.
create or replace function headwater_internal.end_long_publishers()
returns integer
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    longest constant interval := (
        select make_interval(secs => s.max_publisher_seconds) from headwater_internal.setting s
    );
    publisher record;
    ended integer := 0;
begin
    if longest is null then
        return 0;
    end if;
    for publisher in
        select p.pid, p.age from headwater.publisher_in_flight p
        where p.pid is not null and p.pid <> pg_backend_pid() and p.age > longest
    loop
        begin
            if pg_terminate_backend(publisher.pid) then
                ended := ended + 1;
                raise log 'headwater: ended the publishing transaction of pid % after %', publisher.pid, publisher.age;
            end if;
        exception
            when insufficient_privilege then null;
        end;
    end loop;
    return ended;
end;
$$;

-- Used by a plain INSERT and by COPY.
do $$
declare
    drawing constant text := $default$case when current_setting('headwater.advertised', true) = 'y'
        then nextval('headwater_internal.position') else headwater_internal.assign_position() end$default$;
begin
    if not exists (
        select from pg_attrdef d
        where d.adrelid = 'headwater_internal.event'::regclass and pg_get_expr(d.adbin, d.adrelid) like '%assign_position%'
    ) then
        execute 'alter table headwater_internal.event alter column position set default ' || drawing;
    end if;
end;
$$;
