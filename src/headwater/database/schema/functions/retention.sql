-- Retention: what may go, and the upkeep of the log as a whole.

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
    stable constant bigint := headwater.settled();
    -- The lowest hold on each topic that has one; and that on all topics.
    held_topics integer[];
    held_to bigint[];
    all_held_to bigint;
    old record;
    expired record;
    swept bigint;
begin
    segments_dropped := 0;
    events_swept := 0;
    select
        array_agg(h.topic_id) filter (where h.topic_id is not null),
        array_agg(h.position) filter (where h.topic_id is not null),
        min(h.position) filter (where h.topic_id is null)
    into held_topics, held_to, all_held_to
    from (
        select h.topic_id, min(h.held_after) as position from headwater.retention_holds() as h group by h.topic_id
    ) as h;
    for old in
        -- Closed at the latest of the times of those before it: a clock that was set back must not let a segment
        -- expire before an older one.
        select c.lo, c.hi, c.last_position, c.closed_at
        from (
            select s.lo, s.hi, s.last_position, max(s.closed_at) over (order by s.lo) as closed_at
            from headwater.segment s
            where s.closed_at is not null
        ) as c
        where c.hi - 1 <= stable
        order by c.lo
    loop
        for expired in
            select t.id, e.position as last_position
            from headwater.topic t
            left join unnest(held_topics, held_to) as h (topic_id, position) on h.topic_id = t.id
            cross join lateral (
                select e.position
                from headwater.event e
                where e.topic_id = t.id and e.position >= old.lo and e.position < old.hi
                order by e.position desc
                limit 1
            ) as e
            where
                t.expired_to < coalesce(old.last_position, old.hi - 1)
                and (
                    t.deleted_at is not null
                    or (
                        old.closed_at < clock_timestamp() - t.retention
                        -- One that is only compacted keeps the newest event of each key, however old.
                        and not exists (select from headwater.kafka_topic k where k.topic_id = t.id and not k.deletes)
                        -- What a consumer still needs waits for it. (least() leaves out what is null.)
                        and e.position <= least(h.position, all_held_to, stable)
                    )
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
            where t.deleted_at is null and t.expired_to < coalesce(old.last_position, old.hi - 1)
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
    selective boolean;
    looked_at bigint;
begin
    busy := not pg_try_advisory_xact_lock(29288::bigint << 48);
    if busy then
        return;
    end if;
    perform headwater.note_clock();
    perform headwater.redate();
    perform headwater.current_epoch();
    perform headwater.end_long_publishers();
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
    -- Last, since it keeps these queues from claiming until the end of the transaction. Only those with something to do.
    for group_name in select * from headwater.queues_to_reap() loop
        begin
            perform headwater.reap(group_name);
        exception
            -- Deleted meanwhile, or locked by another session.
            when sqlstate 'HW011' or lock_not_available then null;
        end;
    end loop;
    -- The slow ones must not keep the fast ones waiting, nor these those: each kind has its own bound.
    foreach selective in array array[false, true] loop
        looked_at := 0;
        for group_name in select * from headwater.queues_to_skip(selective) loop
            -- The rest waits for the next round.
            exit when looked_at >= 100000;
            begin
                looked_at := looked_at + headwater.skip_unbound_events(group_name);
            exception
                when sqlstate 'HW011' or lock_not_available then null;
            end;
        end loop;
    end loop;
end;
$$;
