-- Retention: what may go, and the upkeep of the log as a whole.

-- The last position that nobody who must not lose still needs.
create or replace function headwater.releasable()
returns bigint
language sql
volatile
return least(
    headwater.settled(),
    (select min(c.position) from headwater.cursor c where c.must_not_lose),
    (select min(headwater.group_low_water(g)) from headwater.consumer_group g where g.must_not_lose)
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
            where
                t.deleted_at is not null
                or (
                    old.closed_at < clock_timestamp() - t.retention
                    -- One that is only compacted keeps the newest event of each key, however old.
                    and not exists (select from headwater.kafka_topic k where k.topic_id = t.id and not k.deletes)
                    -- What an archive has yet to get waits for it.
                    and e.position <= headwater.archived_to(t)
                )
        loop
            -- A lane whose tail goes away must not start to count again; and it begins after what went.
            with gone as (
                select e.topic_id, e.partition, max(e.topic_offset) + 1 as next_offset
                from headwater.event e
                where
                    e.topic_id = expired.id and e.position >= old.lo and e.position < old.hi
                    and e.topic_offset is not null
                group by e.topic_id, e.partition
            ), counted as (
                insert into headwater.lane as l (topic_id, partition, next_offset)
                select g.topic_id, g.partition, g.next_offset from gone g
                on conflict (topic_id, partition) do update
                    set next_offset = greatest(l.next_offset, excluded.next_offset)
            )
            insert into headwater.kafka_lane as l (topic_id, partition, start_offset)
            select g.topic_id, g.partition, g.next_offset from gone g
            on conflict (topic_id, partition) do update
                set start_offset = greatest(l.start_offset, excluded.start_offset);
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
                update headwater.upkeep u
                set dropped_positions = u.dropped_positions + coalesce(old.last_position - greatest(old.lo, 1) + 1, 0);
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
    with gone as (
        delete from headwater.topic t
        where
            t.deleted_at < clock_timestamp() - interval '1 day'
            and not exists (select from headwater.event e where e.topic_id = t.id)
        returning t.id
    )
    delete from headwater.event_identity i using gone where i.topic_id = gone.id;
end;
$$;

-- All the upkeep of the log, safe to call from anywhere at any time: due events enter, segments are made ahead
-- and dropped behind, leases that ran out end. `busy` says that somebody else is at it.
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
declare
    group_name text;
begin
    busy := not pg_try_advisory_xact_lock(29288::bigint << 48);
    if busy then
        return;
    end if;
    update headwater.upkeep u set maintained_at = clock_timestamp();
    select r.released into released from headwater.release_due() as r;
    begin
        segments_made := headwater.rotate();
        select e.segments_dropped, e.events_swept into segments_dropped, events_swept from headwater.expire() as e;
    exception
        when lock_not_available then
            -- Somebody works on the tables themselves. The next round tries again.
            busy := true;
    end;
    begin
        events_swept := coalesce(events_swept, 0) + headwater.expire_by_size();
        perform headwater.kafka_expire_groups();
    exception
        -- Somebody measures a topic, or commits for a group that was to be forgotten.
        when lock_not_available then null;
    end;
    perform headwater.expire_subscriptions();
    perform headwater.clear_staged();
    perform headwater.forget_answers();
    perform headwater.clear_marks();
    -- Last, since it keeps the groups from claiming until the end of the transaction.
    for group_name in select g.name from headwater.consumer_group g order by g.id loop
        begin
            perform headwater.reap(group_name);
            perform headwater.pass_over(group_name);
        exception
            -- Deleted meanwhile, or in somebody's hands.
            when sqlstate 'HW011' or lock_not_available then null;
        end;
    end loop;
end;
$$;
