-- Pipelines: the log read by ranges of positions and written in batches, as Spark does both.

-- The ranges of positions after `after` and up to `up_to` that were drawn at all, in order: rotation leaves gaps of
-- millions, which no reader should divide among its tasks.
create or replace function headwater.drawn_ranges(after bigint, up_to bigint)
returns table (range_after bigint, range_up_to bigint)
language sql
stable
begin atomic
    select r.range_after, r.range_up_to
    from (
        select
            greatest(s.lo - 1, drawn_ranges.after) as range_after,
            least(coalesce(s.last_position, s.hi - 1), drawn_ranges.up_to) as range_up_to
        from headwater.segment s
        where s.lo <= drawn_ranges.up_to and s.hi > drawn_ranges.after
    ) as r
    where r.range_after < r.range_up_to
    order by r.range_after;
end;

-- How far a batch reaches that starts after a position and may go up to `up_to`, which the caller knows to be stable: to
-- its last event. Null: there is no event. Without topics, of the whole log, `max_events` counts positions. The answer is
-- always the position of an event: it is kept outside of this database, and unlike the stable position it is on disk, so
-- a crash does not issue it again.
create or replace function headwater.batch_end(topics text[], after bigint, up_to bigint, max_events bigint default null)
returns bigint
language plpgsql
stable
as $$
declare
    ids constant integer[] := headwater.topic_ids(topics);
    bound bigint := up_to;
    last_position bigint;
begin
    if max_events is not null and topics is null then
        select r.range_after + max_events - r.drawn_before into last_position
        from (
            select
                d.*,
                coalesce(
                    sum(d.range_up_to - d.range_after) over (order by d.range_after rows between unbounded preceding and 1 preceding),
                    0
                )::bigint as drawn_before
            from headwater.drawn_ranges(batch_end.after, batch_end.up_to) as d
        ) as r
        where r.drawn_before < max_events and r.drawn_before + r.range_up_to - r.range_after >= max_events;
        bound := coalesce(last_position, up_to);
    elsif max_events is not null then
        select f.position into last_position
        from unnest(ids) as i (id)
        cross join lateral (
            select e.position from headwater.event e
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
        select e.position from headwater.event e
        where e.topic_id = i.id and e.position > batch_end.after and e.position <= bound
        order by e.position desc
        limit 1
    ) as f;
    if last_position is null and bound < up_to then
        -- No event at as many positions: as far as the next one.
        select min(f.position) into last_position
        from unnest(ids) as i (id)
        cross join lateral (
            select e.position from headwater.event e
            where e.topic_id = i.id and e.position > bound and e.position <= batch_end.up_to
            order by e.position
            limit 1
        ) as f;
    end if;
    return last_position;
end;
$$;

-- The position of the last event of these topics at or below a stable position: to read after either is the same. Where
-- retention has passed the position, the position itself.
create or replace function headwater.last_event_position(topics text[], up_to bigint)
returns bigint
language sql
stable
begin atomic
    select case when max(t.expired_to) > up_to then up_to else coalesce(max(greatest(t.expired_to, f.position)), 0) end
    from headwater.topic t
    left join lateral (
        select e.position from headwater.event e
        where e.topic_id = t.id and e.position <= last_event_position.up_to
        order by e.position desc
        limit 1
    ) as f on true
    where t.id = any (headwater.topic_ids(last_event_position.topics));
end;

-- The position of an event of these topics that was read in an epoch, or that of the last one below it which the log still
-- has. Below: the log has lost events, at positions that were issued again (headwater.common_position()) or that never will
-- be, since Postgres logs a sequence ahead of what it issues.
create or replace function headwater.last_common_event(topics text[], epoch integer, at_position bigint)
returns bigint
language plpgsql
volatile
as $$
begin
    if last_common_event.epoch is null or last_common_event.epoch = headwater.current_epoch() then
        return at_position;
    end if;
    return headwater.last_event_position(topics, headwater.common_position(last_common_event.epoch, at_position));
end;
$$;

-- The events of one topic after a position and up to one that the caller knows to be settled, in order, less those
-- that a condition leaves out. One plain query, so that Postgres puts it in the place of its call and sends events as
-- the index has them. It does not say what retention took: ask refuse_expired afterwards.
create or replace function headwater.scan_topic(
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
        from headwater.find_topic(scan_topic.topic) as t
    )
    select
        e.position, (select single.name from single), e.partition, e.topic_offset, e.key, e.type, e.routing_key,
        e.headers, e.content_type, e.payload, e.event_id, e.published_at
    from headwater.event e
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

-- The same of several topics; null: of the whole log. These have to be sorted: ask for short ranges.
create or replace function headwater.scan(
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
    from headwater.event e
    join headwater.topic t on t.id = e.topic_id
    where
        e.topic_id = any (headwater.topic_ids(topics))
        and e.position > scan.after
        and e.position <= scan.up_to
        and e.position > t.expired_to
        and (types is null or e.type = any (types))
        and (keys is null or e.key = any (keys))
        and (published_from is null or e.published_at >= published_from)
        and (published_before is null or e.published_at < published_before)
    order by e.position;
end;

-- HW007 if retention took events of these topics after that position.
create or replace function headwater.refuse_expired(topics text[], after bigint)
returns void
language sql
begin atomic
    select headwater.refuse_expired(headwater.topic_ids(refuse_expired.topics), refuse_expired.after);
end;

-- Publish what the named attempts have staged, attempt by attempt in the order given: all of it and once. Returns
-- how many events that were; null if this epoch of the writer, or a later one, was published before. An event
-- whose id is in the log already counts and is not added. What the writer staged for this epoch is gone afterwards.
create or replace function headwater.publish_epoch(
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
    destination headwater.topic;
    part headwater.staged;
    found_events bigint;
begin
    -- Whoever comes second waits here for the first, and then finds it done.
    insert into headwater.writer_epoch as w (writer, epoch, replayable)
    values (publish_epoch.writer, publish_epoch.epoch, publish_epoch.replayable)
    on conflict on constraint writer_epoch_pkey do update
        set epoch = excluded.epoch, replayable = excluded.replayable, published_at = clock_timestamp()
        where w.epoch < excluded.epoch;
    if not found then
        delete from headwater.staged s where s.writer = publish_epoch.writer and s.epoch = publish_epoch.epoch;
        return null;
    end if;

    select coalesce(sum(cardinality(s.payloads)), 0) into found_events
    from headwater.staged s
    where s.writer = publish_epoch.writer and s.epoch = publish_epoch.epoch and s.attempt = any (attempts);
    if found_events <> expected_events then
        raise exception 'of % staged events % are left', expected_events, found_events
            using errcode = 'HW016',
                  detail = json_build_object('expected', expected_events, 'found', found_events)::text,
                  hint = 'The server has restarted since, or the batch took longer than a day. Run it again.';
    end if;

    -- All lanes first and in one order, since one batch after the other would take them in any.
    for destination in
        select t.*
        from headwater.topic t
        where
            t.kind = 'sequenced'
            and t.deleted_at is null
            and t.name in (
                select s.topic from headwater.staged s
                where s.writer = publish_epoch.writer and s.epoch = publish_epoch.epoch and s.attempt = any (attempts)
            )
        order by t.id
    loop
        perform headwater.lock_lanes(
            destination.id, array(select l from generate_series(0, destination.partitions - 1) as l)
        );
    end loop;
    for part in
        select s.*
        from headwater.staged s
        where s.writer = publish_epoch.writer and s.epoch = publish_epoch.epoch and s.attempt = any (attempts)
        order by array_position(attempts, s.attempt), s.place
    loop
        perform headwater.publish_batch(
            part.topic, part.payloads, part.keys, part.types, part.routing_keys, part.headers, part.content_types,
            part.event_ids
        );
    end loop;
    delete from headwater.staged s where s.writer = publish_epoch.writer and s.epoch <= publish_epoch.epoch;
    return found_events;
end;
$$;

-- Forget what these attempts have staged. What was published stays.
create or replace function headwater.discard_staged(writer text, epoch bigint, attempts text[])
returns void
language sql
begin atomic
    delete from headwater.staged s
    where
        s.writer = discard_staged.writer
        and s.epoch = discard_staged.epoch
        and s.attempt = any (discard_staged.attempts);
end;

-- Clear away what dead tasks left behind, some at a time, and the marks of writers that had one batch only.
create or replace function headwater.clear_staged(older_than interval default '1 day', sweep_size integer default 1000)
returns void
language sql
begin atomic
    delete from headwater.staged s
    where (s.writer, s.epoch, s.attempt, s.place) in (
        select o.writer, o.epoch, o.attempt, o.place
        from headwater.staged o
        where o.staged_at < clock_timestamp() - older_than
        order by o.staged_at
        limit sweep_size
    );
    delete from headwater.writer_epoch w
    where w.writer in (
        select o.writer from headwater.writer_epoch o
        where not o.replayable and o.published_at < clock_timestamp() - older_than
        limit sweep_size
    );
end;
