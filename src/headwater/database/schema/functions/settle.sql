-- Order: how a position becomes stable. Read this before changing anything that draws or reads positions.
--
-- A sequence hands out positions at insert, transactions commit in another order, so a reader that has seen 7 could
-- later find a 6. Every publishing transaction therefore advertises, before it draws its first position of a topic, a
-- lower bound of what it will draw: a shared advisory lock whose key is our tag and the sequence's last value. Beside it,
-- a lock that names the topic: readers of other topics do not wait for it. The two belong together by a number within
-- the transaction, so that a topic that it publishes to later has a bound of its own time, and the stable position of a
-- topic never goes back.
-- The rules that bite, each of which lost events when broken:
--   * both locks come before the first nextval for an event of the topic;
--   * a reader takes the sequence's last value first and looks at the locks second;
--   * it reads the events in a later snapshot than both.
--
-- Keys: (29300 + number) << 48 | bound;  29292 << 48 | hash of the topic << 16 | number;  29294 << 48 | number for a
-- publisher to any topic. Number 0 is that of a transaction that has written nothing yet; 15 is always to any topic.

-- What stands for a topic among the locks of publishers. Two topics with one hash wait for each other's publishers, and
-- nothing else.
create or replace function headwater.publisher_hash(topic text)
returns bigint
language sql
immutable
return hashtext(topic)::bigint & 4294967295;

-- Advertise the transaction as a publisher to a topic (null: to any). The locks go with a savepoint that is rolled back,
-- and so does the setting that says which are held: the transaction's id, and the hashes, as 753/1234/5678/. A
-- transaction without an id has written nothing yet, and most write once, so the first time notes nothing.
-- (Assignments, since plpgsql evaluates them in a tenth of the time of a perform.)
create or replace function headwater.advertise_publisher(topic text)
returns void
language plpgsql
as $$
declare
    register constant bigint := pg_sequence_last_value('headwater.epoch_register');
    publisher text;
    held text;
    number integer := 0;
    nothing text;
begin
    if register is null or register & 1 = 0 or register >> 32 <> headwater.epoch_identity() then
        nothing := headwater.begin_epoch();
    end if;
    publisher := pg_current_xact_id_if_assigned()::text;
    if publisher is not null then
        held := current_setting('headwater.publisher', true);
        if not coalesce(starts_with(held, publisher || '/'), false) then
            held := publisher || '/';
        elsif right(held, 3) = '/*/' or strpos(held, '/' || headwater.publisher_hash(topic) || '/') > 0 then
            return;
        end if;
        number := cardinality(string_to_array(held, '/')) - 1;
        if number >= 15 then
            number := 15;
            topic := null;
        end if;
        nothing := set_config(
            'headwater.publisher', held || coalesce(headwater.publisher_hash(topic)::text, '*') || '/', true
        );
    end if;
    if topic is null then
        nothing := pg_advisory_xact_lock_shared((29294::bigint << 48) | number);
    else
        nothing := pg_advisory_xact_lock_shared((29292::bigint << 48) | (headwater.publisher_hash(topic) << 16) | number);
    end if;
    nothing := pg_advisory_xact_lock_shared(
        ((29300 + number)::bigint << 48) | coalesce(pg_sequence_last_value('headwater.position'), 0)
    );
end;
$$;

-- The locks of publishers, one row for each bound: of which transaction, and to which topics it is (null: to any). Number 0
-- may have several: a transaction that has written nothing yet notes none of them.
create or replace view headwater.publisher_lock as
select
    k.pid,
    k.virtualtransaction,
    min(k.value) filter (where k.tag >= 29300) as position_bound,
    -- A publisher that names no topic may be one of any.
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

-- The default of event.position, for a plain INSERT or a COPY of the table's owner. Which topics it writes to is not
-- known yet, so it is advertised for all of them, and with that the rest of the transaction: `headwater.advertised` spares
-- the next row this call.
create or replace function headwater.draw_position()
returns bigint
language plpgsql
volatile
as $$
declare
    nothing text;
begin
    nothing := headwater.advertise_publisher(null);
    -- Without an id, the transaction did not note that the lock is held: this is the first thing that it writes.
    if pg_current_xact_id_if_assigned() is not null then
        nothing := set_config('headwater.advertised', 'y', true);
    end if;
    return nextval('headwater.position');
end;
$$;

-- Advertise a COPY into `event` that has rows of one topic only; end_copy() must follow in the same transaction. False:
-- the caller may not write to `event`, and publishes by headwater.publish_batch().
create or replace function headwater.begin_copy(topic text)
returns boolean
language plpgsql
volatile
as $$
begin
    if not has_table_privilege('headwater.event', 'insert') then
        return false;
    end if;
    perform headwater.advertise_publisher(topic);
    perform set_config('headwater.advertised', 'y', true);
    return true;
end;
$$;

create or replace function headwater.end_copy()
returns void
language plpgsql
volatile
as $$
begin
    perform set_config('headwater.advertised', '', true);
end;
$$;

-- The highest position that any transaction has drawn. Takes no snapshot: cheap enough to poll.
create or replace function headwater.head()
returns bigint
language sql
return coalesce(pg_sequence_last_value('headwater.position'), 0);

-- Who is publishing right now: from which position on, and to which topics (null: to any).
create or replace view headwater.publisher_in_flight as
select
    l.pid,
    l.pid is null as prepared,
    l.position_bound,
    case when not l.any_topic then (
        select array_agg(t.name order by t.name)
        from headwater.topic t
        where t.deleted_at is null and headwater.publisher_hash(t.name) = any (l.topic_hashes)
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
    from headwater.publisher_lock p
    left join lateral unnest(p.topic_hashes) as h (topic_hash) on true
    group by p.pid, p.virtualtransaction
) as l
left join pg_stat_activity a using (pid);

-- The topic of a publisher's lock is found by this, however many topics there are.
create index if not exists topic_publisher_hash on headwater.topic (headwater.publisher_hash(name));

-- The positions at or below which nothing can still appear: `settled` of any topic, `stable` of these topics, by name or
-- by id (both null: of any). Read events in a later statement than this.
create or replace function headwater.stable_positions(
    topics text[], topic_ids integer[] default null, out drawn bigint, out settled bigint, out stable bigint
)
language plpgsql
volatile
as $$
declare
    hashes constant bigint[] := (select array_agg(headwater.publisher_hash(t)) from unnest(topics) as t);
    lowest_bound bigint;
    lowest_of_topics bigint;
begin
    if current_setting('transaction_isolation') <> 'read committed' or pg_is_in_recovery() then
        raise exception 'the log is read at READ COMMITTED and on a primary only'
            using errcode = 'HW012',
                  hint = 'Use a READ COMMITTED transaction (the default) on the primary.';
    end if;
    drawn := coalesce(pg_sequence_last_value('headwater.position'), 0);
    select
        min(p.position_bound),
        min(p.position_bound) filter (
            where
                p.topic_hashes is null
                or case
                    when topics is not null then p.topic_hashes && hashes
                    when topic_ids is not null then exists (
                        select from headwater.topic t
                        where headwater.publisher_hash(t.name) = any (p.topic_hashes) and t.id = any (topic_ids)
                    )
                    else true
                end
        )
    into lowest_bound, lowest_of_topics
    from headwater.publisher_lock p;
    settled := least(drawn, lowest_bound);
    stable := least(drawn, lowest_of_topics);
end;
$$;

-- The position at or below which nothing of the whole log can still appear.
create or replace function headwater.settled()
returns bigint
language sql
volatile
return (headwater.stable_positions(null)).settled;

-- The position at or below which nothing of these topics can still appear; null: of the whole log.
create or replace function headwater.stable_position(topics text[] default null)
returns bigint
language sql
volatile
return (headwater.stable_positions(topics)).stable;

-- Wait until the stable position of a topic (null: of the whole log) is at a position or above, for 10 seconds at most.
create or replace function headwater.await_stable(topic text, at_position bigint)
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
                      hint = 'See headwater.publisher_in_flight for its process; end it, then try again.';
        end if;
        perform pg_sleep(0.01);
    end loop;
end;
$$;

-- What a reader of these topics goes by: how far the log has grown, how far it may read, and in which epoch that is.
create or replace function headwater.log_state(
    topics text[] default null, out drawn bigint, out settled bigint, out epoch integer
)
language plpgsql
volatile
as $$
begin
    epoch := headwater.current_epoch();
    select s.drawn, s.stable into drawn, settled from headwater.stable_positions(topics) as s;
end;
$$;

-- The same for a reader that serves readers of many topics: how far the whole log is stable, and of these topics, how far
-- those are that are stable to less than `drawn`. `bounds` are those of all open publishers: while they and `drawn` are
-- the same, so is the answer for any topic.
create or replace function headwater.log_state_by_topic(
    topics text[],
    out drawn bigint,
    out settled bigint,
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
    select s.drawn, s.settled into drawn, settled from headwater.stable_positions(null) as s;
    -- The locks are looked at after the sequence, here too.
    with publisher as materialized (
        select p.position_bound, p.topic_hashes from headwater.publisher_lock p
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
        select t.name, least(b.position_bound, a.position_bound) as stable
        from unnest(topics) as t (name)
        cross join bound_of_all a
        left join bound_of_hash b on b.topic_hash = headwater.publisher_hash(t.name)
    )
    select
        (select array_agg(p.position_bound order by p.position_bound) from publisher p),
        (select array_agg(h.name order by h.name) from held h where h.stable < log_state_by_topic.drawn),
        (select array_agg(h.stable order by h.name) from held h where h.stable < log_state_by_topic.drawn)
    into bounds, held_topics, held_to;
end;
$$;

-- End publishers that stay open longer than the log's `max_publisher_seconds`; returns how many. Those that are prepared
-- for a two-phase commit, or of a role that may not be ended, stay: `headwater doctor` names them.
create or replace function headwater.end_long_publishers()
returns integer
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    longest constant interval := (
        select make_interval(secs => s.max_publisher_seconds) from headwater.setting s
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

-- A plain INSERT and a COPY come by here.
do $$
declare
    drawing constant text := $default$case when current_setting('headwater.advertised', true) = 'y'
        then nextval('headwater.position') else headwater.draw_position() end$default$;
begin
    if not exists (
        select from pg_attrdef d
        where d.adrelid = 'headwater.event'::regclass and pg_get_expr(d.adbin, d.adrelid) like '%draw_position%'
    ) then
        execute 'alter table headwater.event alter column position set default ' || drawing;
    end if;
end;
$$;
