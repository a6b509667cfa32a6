-- Segments: the physical tables of the log, made ahead and left behind.

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
        -- All locks first: what moves the sequence is not undone with the transaction.
        perform from headwater.segment s where s.lo in (open_segment.lo, open_segment.hi) for update;
        drawn := headwater.head();
        perform setval('headwater.position', open_segment.hi - 1);
        update headwater.segment s
        set closed_at = clock_timestamp(), last_position = drawn
        where s.lo = open_segment.lo;
        update headwater.segment s
        set opened_at = clock_timestamp()
        where s.lo = open_segment.hi and s.opened_at is null;
    end if;
    -- Segments that the log left by itself, or in a rotation that a crash undid but for the sequence.
    update headwater.segment s
    set
        closed_at = greatest(s.opened_at, clock_timestamp()),
        opened_at = coalesce(s.opened_at, clock_timestamp()),
        last_position = (
            select max(e.position)
            from headwater.topic t
            cross join lateral (
                select e.position
                from headwater.event e
                where e.topic_id = t.id and e.position >= s.lo and e.position < s.hi
                order by e.position desc
                limit 1
            ) as e
        )
    where s.hi <= drawn and s.closed_at is null;
    return made;
end;
$$;
