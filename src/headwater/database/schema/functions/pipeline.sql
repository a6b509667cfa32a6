-- Pipelines: reading the log by ranges of positions and writing to it in batches, as Spark does both.

-- The ranges of assigned positions after `after` and up to `up_to`, in order: rotation leaves gaps of millions, which a
-- reader should not divide among its tasks.
create or replace function headwater_internal.assigned_ranges(after bigint, up_to bigint)
returns table (range_after bigint, range_up_to bigint)
language sql
stable
begin atomic
    select r.range_after, r.range_up_to
    from (
        select
            greatest(s.lo - 1, assigned_ranges.after) as range_after,
            least(coalesce(s.last_position, s.hi - 1), assigned_ranges.up_to) as range_up_to
        from headwater_internal.segment s
        where s.lo <= assigned_ranges.up_to and s.hi > assigned_ranges.after
    ) as r
    where r.range_after < r.range_up_to
    order by r.range_after;
end;

-- The end of a batch that starts after a position and may go up to `up_to`, which the caller knows to be stable: the
-- position of its last event; null if there is no event. Without topics, for the whole log, `max_events` counts
-- positions. The result is always the position of an event: it is stored outside of this database, and unlike the
-- stable position it is on disk, so a crash does not assign it again.
create or replace function headwater_internal.batch_end(topics text[], after bigint, up_to bigint, max_events bigint default null)
returns bigint
language plpgsql
stable
as $$
declare
    ids constant integer[] := headwater_internal.topic_ids(topics);
    bound bigint := up_to;
    last_position bigint;
begin
    if max_events is not null and topics is null then
        select r.range_after + max_events - r.assigned_before into last_position
        from (
            select
                d.*,
                coalesce(
                    sum(d.range_up_to - d.range_after) over (order by d.range_after rows between unbounded preceding and 1 preceding),
                    0
                )::bigint as assigned_before
            from headwater_internal.assigned_ranges(batch_end.after, batch_end.up_to) as d
        ) as r
        where r.assigned_before < max_events and r.assigned_before + r.range_up_to - r.range_after >= max_events;
        bound := coalesce(last_position, up_to);
    elsif max_events is not null then
        select f.position into last_position
        from unnest(ids) as i (id)
        cross join lateral (
            select e.position from headwater_internal.event e
            where e.topic_id = i.id and e.position > batch_end.after and e.position <= batch_end.up_to
            order by e.position
            limit max_events
        ) as f
        order by f.position
        offset max_events - 1
        limit 1;
        if last_position is not null then
            return last_position;
        end if;
    end if;
    select max(f.position) into last_position
    from unnest(ids) as i (id)
    cross join lateral (
        select e.position from headwater_internal.event e
        where e.topic_id = i.id and e.position > batch_end.after and e.position <= bound
        order by e.position desc
        limit 1
    ) as f;
    if last_position is null and bound < up_to then
        -- No event at that many positions: continue to the next event.
        select min(f.position) into last_position
        from unnest(ids) as i (id)
        cross join lateral (
            select e.position from headwater_internal.event e
            where e.topic_id = i.id and e.position > bound and e.position <= batch_end.up_to
            order by e.position
            limit 1
        ) as f;
    end if;
    return last_position;
end;
$$;

-- The position of the last event of these topics at or below a stable position: reading after either gives the same
-- events. If retention has passed the position, the position itself.
create or replace function headwater_internal.last_event_position(topics text[], up_to bigint)
returns bigint
language sql
stable
begin atomic
    select case when max(t.expired_to) > up_to then up_to else coalesce(max(greatest(t.expired_to, f.position)), 0) end
    from headwater_internal.topic t
    left join lateral (
        select e.position from headwater_internal.event e
        where e.topic_id = t.id and e.position <= last_event_position.up_to
        order by e.position desc
        limit 1
    ) as f on true
    where t.id = any (headwater_internal.topic_ids(last_event_position.topics));
end;

-- The position of an event of these topics that was read in an epoch, or that of the last event below it that the log
-- still has. Below means that the log has lost events, at positions that were assigned again
-- (headwater.common_position()) or never will be, since Postgres logs a sequence ahead of its values.
create or replace function headwater_internal.last_common_event(topics text[], epoch integer, at_position bigint)
returns bigint
language plpgsql
volatile
as $$
begin
    if last_common_event.epoch is null or last_common_event.epoch = headwater.current_epoch() then
        return at_position;
    end if;
    return headwater_internal.last_event_position(topics, headwater.common_position(last_common_event.epoch, at_position));
end;
$$;

-- The events of one topic after a position and up to one that the caller knows to be stable, in order, without those
-- that an argument excludes. A single query, so that Postgres inlines it and sends events in index order. It does not
-- detect events removed by retention: call refuse_expired() afterwards.
create or replace function headwater_internal.scan_topic(
    topic text,
    after bigint,
    up_to bigint,
    types text[] default null,
    keys bytea[] default null,
    published_from timestamptz default null,
    published_before timestamptz default null
)
returns setof headwater.stored_event
language sql
stable
begin atomic
    with single as materialized (
        select t.id, t.name, greatest(scan_topic.after, t.expired_to) as start_after
        from headwater_internal.find_topic(scan_topic.topic) as t
    )
    select
        e.position, (select single.name from single), e.partition, e.topic_offset, e.key, e.type, e.routing_key,
        e.headers, e.content_type, e.payload, e.event_id, e.published_at
    from headwater_internal.event e
    where
        e.topic_id = (select single.id from single)
        and e.position > (select single.start_after from single)
        and e.position <= scan_topic.up_to
        and (types is null or e.type = any (types))
        and (keys is null or e.key = any (keys))
        and (published_from is null or e.published_at >= published_from)
        and (published_before is null or e.published_at < published_before)
    order by e.position;
end;

-- The same for several topics; null: for the whole log. The events are sorted, so use short ranges.
create or replace function headwater_internal.scan(
    topics text[],
    after bigint,
    up_to bigint,
    types text[] default null,
    keys bytea[] default null,
    published_from timestamptz default null,
    published_before timestamptz default null
)
returns setof headwater.stored_event
language sql
stable
begin atomic
    select
        e.position, t.name, e.partition, e.topic_offset, e.key, e.type, e.routing_key,
        e.headers, e.content_type, e.payload, e.event_id, e.published_at
    from headwater_internal.event e
    join headwater_internal.topic t on t.id = e.topic_id
    where
        e.topic_id = any (headwater_internal.topic_ids(topics))
        and e.position > scan.after
        and e.position <= scan.up_to
        and e.position > t.expired_to
        and (types is null or e.type = any (types))
        and (keys is null or e.key = any (keys))
        and (published_from is null or e.published_at >= published_from)
        and (published_before is null or e.published_at < published_before)
    order by e.position;
end;

-- HW007 if events of these topics after that position were removed by retention.
create or replace function headwater_internal.refuse_expired(topics text[], after bigint)
returns void
language sql
begin atomic
    select headwater_internal.refuse_expired(headwater_internal.topic_ids(refuse_expired.topics), refuse_expired.after);
end;

-- Publish the staged events of these attempts, attempt by attempt in the order given, atomically and exactly once.
-- Returns the number of events; null if this epoch of the writer, or a later one, was published before. An event whose
-- id is already in the log is counted but not added. The rows that the writer staged for this epoch are deleted. HW016
-- if staged events are missing.
create or replace function headwater_internal.publish_epoch(
    writer text,
    epoch bigint,
    attempts text[],
    expected_events bigint,
    replayable boolean default true
)
returns bigint
language plpgsql
as $$
declare
    destination headwater_internal.topic;
    part headwater_internal.staged;
    found_events bigint;
begin
    -- Of two callers, the second waits here for the first and then finds the epoch published.
    insert into headwater_internal.writer_epoch as w (writer, epoch, replayable)
    values (publish_epoch.writer, publish_epoch.epoch, publish_epoch.replayable)
    on conflict on constraint writer_epoch_pkey do update
        set epoch = excluded.epoch, replayable = excluded.replayable, published_at = clock_timestamp()
        where w.epoch < excluded.epoch;
    if not found then
        delete from headwater_internal.staged s where s.writer = publish_epoch.writer and s.epoch = publish_epoch.epoch;
        return null;
    end if;

    select coalesce(sum(cardinality(s.payloads)), 0) into found_events
    from headwater_internal.staged s
    where s.writer = publish_epoch.writer and s.epoch = publish_epoch.epoch and s.attempt = any (attempts);
    if found_events <> expected_events then
        raise exception '% events were staged, but only % are left', expected_events, found_events
            using errcode = 'HW016',
                  detail = json_build_object('expected', expected_events, 'found', found_events)::text,
                  hint = 'Postgres has restarted since, or the batch took longer than a day. Run the batch again.';
    end if;

    -- Lock all partitions first and in one order: publishing batch after batch would lock them in any order.
    for destination in
        select t.*
        from headwater_internal.topic t
        where
            t.kind = 'sequenced'
            and t.deleted_at is null
            and t.name in (
                select s.topic from headwater_internal.staged s
                where s.writer = publish_epoch.writer and s.epoch = publish_epoch.epoch and s.attempt = any (attempts)
            )
        order by t.id
    loop
        perform headwater_internal.lock_partitions(
            destination.id, array(select l from generate_series(0, destination.partitions - 1) as l)
        );
    end loop;
    for part in
        select s.*
        from headwater_internal.staged s
        where s.writer = publish_epoch.writer and s.epoch = publish_epoch.epoch and s.attempt = any (attempts)
        order by array_position(attempts, s.attempt), s.chunk_number
    loop
        perform headwater.publish_batch(
            part.topic, part.payloads, part.keys, part.types, part.routing_keys, part.headers, part.content_types,
            part.event_ids
        );
    end loop;
    delete from headwater_internal.staged s where s.writer = publish_epoch.writer and s.epoch <= publish_epoch.epoch;
    return found_events;
end;
$$;

-- Delete the staged rows of these attempts. Published events stay.
create or replace function headwater_internal.discard_staged(writer text, epoch bigint, attempts text[])
returns void
language sql
begin atomic
    delete from headwater_internal.staged s
    where
        s.writer = discard_staged.writer
        and s.epoch = discard_staged.epoch
        and s.attempt = any (discard_staged.attempts);
end;

-- Delete what crashed tasks have staged, some rows at a time, and the epochs of writers that wrote only one batch.
create or replace function headwater_internal.clear_staged(older_than interval default '1 day', sweep_size integer default 1000)
returns void
language sql
begin atomic
    delete from headwater_internal.staged s
    where (s.writer, s.epoch, s.attempt, s.chunk_number) in (
        select o.writer, o.epoch, o.attempt, o.chunk_number
        from headwater_internal.staged o
        where o.staged_at < clock_timestamp() - older_than
        order by o.staged_at
        limit sweep_size
    );
    delete from headwater_internal.writer_epoch w
    where w.writer in (
        select o.writer from headwater_internal.writer_epoch o
        where not o.replayable and o.published_at < clock_timestamp() - older_than
        limit sweep_size
    );
end;
