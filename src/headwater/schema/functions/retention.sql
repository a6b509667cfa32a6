-- Segments of the log, and what keeps them few: rotation, retention, the sweeping of mixed segments.

-- How many positions a segment holds. Its half is the margin that keeps rotation from ever moving the
-- sequence backwards: it would have to be passed between two adjacent calls.
create or replace function headwater.segment_size()
returns bigint
language sql
immutable
return 100000000;

-- How many positions after `low`, up to `high`, were drawn at all. Lag is arithmetic, and rotation leaves gaps.
create or replace function headwater.positions_between(low bigint, high bigint)
returns bigint
language sql
stable
begin atomic
    select coalesce(sum(greatest(least(high, coalesce(s.last_position, s.hi - 1)) - greatest(low, s.lo - 1), 0)), 0)::bigint
    from headwater.segment s
    where s.hi > low and s.lo <= high;
end;

-- Make the segment that starts at `lo`. Attaching takes a lock that neither readers nor publishers mind.
create or replace function headwater.make_segment(lo bigint)
returns void
language plpgsql
as $$
declare
    hi constant bigint := lo + headwater.segment_size();
    name constant text := 'event_' || lpad((lo / headwater.segment_size())::text, 7, '0');
begin
    execute format('create table headwater.%I (like headwater.event including defaults including constraints)', name);
    -- The twin of the partition bound: with it, attaching need not scan.
    execute format('alter table headwater.%I add constraint bound check (position >= %s and position < %s)', name, lo, hi);
    -- Somebody who inserts into a segment directly must advertise too.
    execute format(
        'create trigger advertise before insert on headwater.%I '
        'for each statement execute function headwater.advertise_on_insert()', name
    );
    execute format(
        'alter table headwater.event attach partition headwater.%I for values from (%s) to (%s)', name, lo, hi
    );
    execute format('alter table headwater.%I drop constraint bound', name);
    insert into headwater.segment (lo, hi) values (make_segment.lo, hi);
end;
$$;

-- Make segments ahead of the log, note which the log has reached and left, and move on to the next one when
-- the open one is as old as the interval says.
create or replace function headwater.rotate()
returns integer
language plpgsql
as $$
declare
    settings headwater.setting;
    drawn bigint := headwater.head();
    open_segment headwater.segment;
    made integer := 0;
    newest bigint;
begin
    select * into settings from headwater.setting;
    select max(s.lo) into newest from headwater.segment s;
    while newest is null or newest < drawn + settings.segments_ahead * headwater.segment_size() loop
        newest := coalesce(newest + headwater.segment_size(), 0);
        perform headwater.make_segment(newest);
        made := made + 1;
    end loop;

    select * into open_segment from headwater.segment s where drawn + 1 >= s.lo and drawn + 1 < s.hi;
    update headwater.segment s set opened_at = clock_timestamp() where s.lo = open_segment.lo and s.opened_at is null;
    if open_segment.opened_at <= clock_timestamp() - settings.segment_interval
        and drawn >= open_segment.lo
        and open_segment.hi - drawn > headwater.segment_size() / 2
    then
        perform setval('headwater.position', open_segment.hi - 1);
        update headwater.segment s
        set closed_at = clock_timestamp(), last_position = drawn
        where s.lo = open_segment.lo;
        update headwater.segment s
        set opened_at = clock_timestamp()
        where s.lo = open_segment.hi and s.opened_at is null;
    end if;
    -- Segments that the log left by itself.
    update headwater.segment s
    set closed_at = clock_timestamp(), opened_at = coalesce(s.opened_at, clock_timestamp())
    where s.hi <= drawn and s.closed_at is null;
    return made;
end;
$$;

-- The last position that nobody who must not lose still needs.
create or replace function headwater.releasable()
returns bigint
language sql
volatile
return least(
    headwater.settled(),
    (select min(c.position) from headwater.cursor c where c.must_not_lose)
);

-- Expire what the topics' retention allows: whole segments are dropped; where a segment must stay for one
-- topic, the events of others are swept out of it, `sweep_size` at a time.
create or replace function headwater.expire(
    sweep_size integer default 50000,
    out segments_dropped integer,
    out events_swept bigint
)
language plpgsql
as $$
declare
    releasable constant bigint := headwater.releasable();
    old record;
    expired record;
    swept bigint;
begin
    segments_dropped := 0;
    events_swept := 0;
    for old in
        select s.* from headwater.segment s
        where s.closed_at is not null and s.hi - 1 <= releasable
        order by s.lo
    loop
        for expired in
            select t.id, e.position as last_position
            from headwater.topic t
            cross join lateral (
                select e.position
                from headwater.event e
                where e.topic_id = t.id and e.position >= old.lo and e.position < old.hi
                order by e.position desc
                limit 1
            ) as e
            where t.deleted_at is not null or old.closed_at < clock_timestamp() - t.retention
        loop
            -- A lane whose tail goes away must not start to count again.
            insert into headwater.lane as l (topic_id, partition, next_offset)
            select e.topic_id, e.partition, max(e.topic_offset) + 1
            from headwater.event e
            where
                e.topic_id = expired.id and e.position >= old.lo and e.position < old.hi
                and e.topic_offset is not null
            group by e.topic_id, e.partition
            on conflict (topic_id, partition) do update
                set next_offset = greatest(l.next_offset, excluded.next_offset);
            update headwater.topic t
            set expired_to = expired.last_position
            where t.id = expired.id and t.expired_to < expired.last_position;
            delete from headwater.event_identity i
            where i.topic_id = expired.id and i.position <= expired.last_position;
        end loop;
        -- Dropped only if no topic that is there still wants an event of it.
        if not exists (
            select
            from headwater.topic t
            cross join lateral (
                select from headwater.event e
                where
                    e.topic_id = t.id and e.position >= old.lo and e.position < old.hi
                    and e.position > t.expired_to
                limit 1
            ) as e
            where t.deleted_at is null
        ) then
            begin
                execute format(
                    'drop table headwater.%I',
                    'event_' || lpad((old.lo / headwater.segment_size())::text, 7, '0')
                );
                delete from headwater.segment s where s.lo = old.lo;
                segments_dropped := segments_dropped + 1;
            exception
                when lock_not_available then
                    -- A long transaction reads or publishes. The next round tries again.
                    null;
            end;
        elsif events_swept < sweep_size then
            delete from headwater.event e
            using (
                select f.topic_id, f.position
                from headwater.topic t
                join headwater.event f on f.topic_id = t.id
                where
                    f.position >= old.lo and f.position < old.hi
                    and (t.deleted_at is not null or f.position <= t.expired_to)
                limit sweep_size - events_swept
            ) as gone
            where e.topic_id = gone.topic_id and e.position = gone.position;
            get diagnostics swept = row_count;
            events_swept := events_swept + swept;
        end if;
    end loop;
    delete from headwater.topic t
    where
        t.deleted_at < clock_timestamp() - interval '1 day'
        and not exists (select from headwater.event e where e.topic_id = t.id);
end;
$$;

-- All the upkeep of the log, safe to call from anywhere at any time: due events enter, segments are made ahead
-- and dropped behind. `busy` says that somebody else is at it.
create or replace function headwater.maintain(
    out busy boolean,
    out released integer,
    out segments_made integer,
    out segments_dropped integer,
    out events_swept bigint
)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '250ms'
as $$
begin
    busy := not pg_try_advisory_xact_lock(29288::bigint << 48);
    if busy then
        return;
    end if;
    select r.released into released from headwater.release_due() as r;
    segments_made := headwater.rotate();
    select e.segments_dropped, e.events_swept into segments_dropped, events_swept from headwater.expire() as e;
end;
$$;
