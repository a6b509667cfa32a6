-- Segments: the physical tables of the log, created ahead of the head and dropped behind it.

-- The number of positions in a segment. Half of it is the margin that keeps rotation from moving the sequence
-- backwards: publishers would have to assign that many positions between two adjacent calls.
create or replace function headwater_internal.segment_size()
returns bigint
language sql
immutable
return 100000000;

-- The number of positions after `low`, up to `high`, that were assigned. Lag is computed from it, and rotation leaves
-- gaps.
create or replace function headwater_internal.positions_between(low bigint, high bigint)
returns bigint
language sql
stable
begin atomic
    select coalesce(sum(greatest(least(high, coalesce(s.last_position, s.hi - 1)) - greatest(low, s.lo - 1), 0)), 0)::bigint
    from headwater_internal.segment s
    where s.hi > low and s.lo <= high;
end;

-- Create the segment that starts at `lo`. Attaching it takes a lock that blocks neither readers nor publishers.
create or replace function headwater_internal.make_segment(lo bigint)
returns void
language plpgsql
as $$
declare
    hi constant bigint := lo + headwater_internal.segment_size();
    name constant text := 'event_' || lpad((lo / headwater_internal.segment_size())::text, 7, '0');
begin
    execute format('create table headwater_internal.%I (like headwater_internal.event including defaults including constraints)', name);
    -- The same bound as that of the partition: with it, attaching does not scan the table.
    execute format('alter table headwater_internal.%I add constraint bound check (position >= %s and position < %s)', name, lo, hi);
    execute format(
        'alter table headwater_internal.event attach partition headwater_internal.%I for values from (%s) to (%s)', name, lo, hi
    );
    execute format('alter table headwater_internal.%I drop constraint bound', name);
    insert into headwater_internal.segment (lo, hi) values (make_segment.lo, hi);
end;
$$;

-- Create segments ahead of the log, record which segments the log has entered and left, and move on to the next segment
-- when the open one is older than the rotation interval. Returns the number of segments created.
create or replace function headwater_internal.rotate()
returns integer
language plpgsql
as $$
declare
    settings headwater_internal.setting;
    head bigint := headwater.head();
    open_segment headwater_internal.segment;
    made integer := 0;
    newest bigint;
begin
    select * into settings from headwater_internal.setting;
    select max(s.lo) into newest from headwater_internal.segment s;
    while newest is null or newest < head + settings.segments_ahead * headwater_internal.segment_size() loop
        newest := coalesce(newest + headwater_internal.segment_size(), 0);
        perform headwater_internal.make_segment(newest);
        made := made + 1;
    end loop;

    select * into open_segment from headwater_internal.segment s where head + 1 >= s.lo and head + 1 < s.hi;
    update headwater_internal.segment s set opened_at = clock_timestamp() where s.lo = open_segment.lo and s.opened_at is null;
    if open_segment.opened_at <= clock_timestamp() - settings.segment_interval
        and head >= open_segment.lo
        and open_segment.hi - head > headwater_internal.segment_size() / 2
    then
        -- Take all locks first: moving the sequence is not undone with the transaction.
        perform from headwater_internal.segment s where s.lo in (open_segment.lo, open_segment.hi) for update;
        head := headwater.head();
        perform setval('headwater_internal.position', open_segment.hi - 1);
        update headwater_internal.segment s
        set closed_at = clock_timestamp(), last_position = head
        where s.lo = open_segment.lo;
        update headwater_internal.segment s
        set opened_at = clock_timestamp()
        where s.lo = open_segment.hi and s.opened_at is null;
    end if;
    -- Segments that the log left by growing, or in a rotation whose transaction was lost in a crash while the sequence
    -- moved.
    update headwater_internal.segment s
    set
        closed_at = greatest(s.opened_at, clock_timestamp()),
        opened_at = coalesce(s.opened_at, clock_timestamp()),
        last_position = (
            select max(e.position)
            from headwater_internal.topic t
            cross join lateral (
                select e.position
                from headwater_internal.event e
                where e.topic_id = t.id and e.position >= s.lo and e.position < s.hi
                order by e.position desc
                limit 1
            ) as e
        )
    where s.hi <= head and s.closed_at is null;
    return made;
end;
$$;
