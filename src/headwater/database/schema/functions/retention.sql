-- Retention: which events may be removed, and the maintenance of the log as a whole.

-- Remove events beyond the retention of their topics: whole segments are dropped; if a segment must stay for one topic,
-- the events of other topics are deleted from it, `sweep_size` at a time. One long function, because each segment is
-- decided and changed under the same locks.
create or replace function headwater_internal.expire(
    sweep_size integer default 50000,
    out segments_dropped integer,
    out events_swept bigint
)
language plpgsql
as $$
declare
    stable constant bigint := headwater.stable_position();
    -- The lowest hold on each topic that has one, and the lowest hold on all topics.
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
        select h.topic_id, min(h.held_after) as position from headwater_internal.retention_holds() as h group by h.topic_id
    ) as h;
    for old in
        -- The latest closing time of this and all earlier segments: after the clock was set back, a segment must not
        -- expire before an older one.
        select c.lo, c.hi, c.last_position, c.closed_at
        from (
            select s.lo, s.hi, s.last_position, max(s.closed_at) over (order by s.lo) as closed_at
            from headwater_internal.segment s
            where s.closed_at is not null
        ) as c
        where c.hi - 1 <= stable
        order by c.lo
    loop
        for expired in
            select t.id, e.position as last_position
            from headwater_internal.topic t
            left join unnest(held_topics, held_to) as h (topic_id, position) on h.topic_id = t.id
            cross join lateral (
                select e.position
                from headwater_internal.event e
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
                        -- A topic that is only compacted keeps the newest event of each key, however old.
                        and not exists (select from headwater_internal.kafka_topic k where k.topic_id = t.id and not k.deletes)
                        -- Events that a consumer still needs are kept. (least() ignores nulls.)
                        and e.position <= least(h.position, all_held_to, stable)
                    )
                )
        loop
            -- A partition whose last event is removed must not restart its offsets; its first offset is after the
            -- removed events.
            with gone as (
                select e.topic_id, e.partition, max(e.topic_offset) + 1 as next_offset
                from headwater_internal.event e
                where
                    e.topic_id = expired.id and e.position >= old.lo and e.position < old.hi
                    and e.topic_offset is not null
                group by e.topic_id, e.partition
            ), counted as (
                insert into headwater_internal.partition_tail as l (topic_id, partition, next_offset)
                select g.topic_id, g.partition, g.next_offset from gone g
                on conflict (topic_id, partition) do update
                    set next_offset = greatest(l.next_offset, excluded.next_offset)
            )
            insert into headwater_internal.kafka_partition as l (topic_id, partition, start_offset)
            select g.topic_id, g.partition, g.next_offset from gone g
            on conflict (topic_id, partition) do update
                set start_offset = greatest(l.start_offset, excluded.start_offset);
            update headwater_internal.topic t
            set expired_to = expired.last_position
            where t.id = expired.id and t.expired_to < expired.last_position;
            delete from headwater_internal.event_identity i
            where i.topic_id = expired.id and i.position <= expired.last_position;
        end loop;
        -- Dropped only if no existing topic still needs an event of it.
        if not exists (
            select
            from headwater_internal.topic t
            cross join lateral (
                select from headwater_internal.event e
                where
                    e.topic_id = t.id and e.position >= old.lo and e.position < old.hi
                    and e.position > t.expired_to
                limit 1
            ) as e
            where t.deleted_at is null and t.expired_to < coalesce(old.last_position, old.hi - 1)
        ) then
            begin
                execute format(
                    'drop table headwater_internal.%I',
                    'event_' || lpad((old.lo / headwater_internal.segment_size())::text, 7, '0')
                );
                delete from headwater_internal.segment s where s.lo = old.lo;
                update headwater_internal.maintenance_state u
                set dropped_positions = u.dropped_positions + coalesce(old.last_position - greatest(old.lo, 1) + 1, 0);
                segments_dropped := segments_dropped + 1;
            exception
                when lock_not_available then
                    -- A long transaction is reading or publishing. The next round retries.
                    null;
            end;
        elsif events_swept < sweep_size then
            delete from headwater_internal.event e
            using (
                select f.topic_id, f.position
                from headwater_internal.topic t
                join headwater_internal.event f on f.topic_id = t.id
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
        delete from headwater_internal.topic t
        where
            t.deleted_at < clock_timestamp() - interval '1 day'
            and not exists (select from headwater_internal.event e where e.topic_id = t.id)
        returning t.id
    )
    delete from headwater_internal.event_identity i using gone where i.topic_id = gone.id;
end;
$$;

-- Run all maintenance of the log: publish due events, create segments ahead and drop expired ones, return the events of
-- expired leases, delete expired data. Safe to call from any process at any time. Returns what was done; `busy` if
-- another session is running it, or a table was locked.
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
    queue_name text;
    selective boolean;
    looked_at bigint;
begin
    busy := not pg_try_advisory_xact_lock(29288::bigint << 48);
    if busy then
        return;
    end if;
    perform headwater_internal.note_clock();
    perform headwater_internal.redate();
    perform headwater.current_epoch();
    perform headwater_internal.end_long_publishers();
    select r.released into released from headwater_internal.release_due() as r;
    begin
        segments_made := headwater_internal.rotate();
        select e.segments_dropped, e.events_swept into segments_dropped, events_swept from headwater_internal.expire() as e;
    exception
        when lock_not_available then
            -- A table is locked by another session. The next round retries.
            busy := true;
    end;
    begin
        events_swept := coalesce(events_swept, 0) + headwater_internal.expire_by_size();
        perform headwater_internal.kafka_expire_groups();
    exception
        -- Another session is measuring a topic, or committing for a group that was to be deleted.
        when lock_not_available then null;
    end;
    perform headwater_internal.expire_subscriptions();
    perform headwater_internal.clear_staged();
    perform headwater_internal.forget_answers();
    perform headwater_internal.clear_index_terms();
    -- Last, because it keeps these queues from claiming until the end of the transaction. Only queues with work to do.
    for queue_name in select * from headwater_internal.queues_to_reap() loop
        begin
            perform headwater.reap(queue_name);
        exception
            -- Deleted meanwhile, or locked by another session.
            when sqlstate 'HW011' or lock_not_available then null;
        end;
    end loop;
    -- Each kind has its own limit, so that slow queues do not delay fast ones, nor the reverse.
    foreach selective in array array[false, true] loop
        looked_at := 0;
        for queue_name in select * from headwater_internal.queues_to_skip(selective) loop
            -- The next round continues.
            exit when looked_at >= 100000;
            begin
                looked_at := looked_at + headwater_internal.skip_unbound_events(queue_name);
            exception
                when sqlstate 'HW011' or lock_not_available then null;
            end;
        end loop;
    end loop;
end;
$$;
