-- Archives and replays: copies of events outside of the log, and delivering them again from there.

-- Register an archive that gets all events of these topics (null: of the whole log) after a position; earlier ones are
-- already in it, or not wanted. From now on retention waits for it. An archive that is already registered is not
-- changed, but topics may be added, which begin at its current position. HW002 if its location differs or topics are
-- missing.
create or replace function headwater_internal.register_archive(
    name text,
    location text,
    topics text[] default null,
    start_after bigint default 0
)
returns headwater_internal.archive
language plpgsql
set lock_timeout = '60s'
as $$
declare
    registered headwater_internal.archive;
    begin_after bigint := start_after;
    known_topics text[] := '{}';
begin
    -- Retention must not run between reading what exists and registering the hold. Lock tag: see locks.sql.
    perform pg_advisory_xact_lock(29288::bigint << 48);
    perform headwater_internal.topic_ids(register_archive.topics);
    select * into registered from headwater_internal.archive a where a.name = register_archive.name;
    if found then
        if registered.location <> register_archive.location then
            raise exception 'archive "%" is located at %, not at %', name, registered.location, register_archive.location
                using errcode = 'HW002',
                      detail = json_build_object('archive', name, 'location', registered.location)::text,
                      hint = 'Use another pipeline name, or unregister the archive: headwater archive forget.';
        end if;
        if registered.topics is not distinct from register_archive.topics then
            return registered;
        end if;
        if registered.topics is null or not coalesce(registered.topics <@ register_archive.topics, true) then
            raise exception 'archive "%" has topics that are not in the new list', name
                using errcode = 'HW002',
                      detail = json_build_object('archive', name, 'topics', registered.topics)::text,
                      hint = 'List all of its topics, or create an archive under another name.';
        end if;
        begin_after := registered.archived_to;
        known_topics := registered.topics;
        update headwater_internal.archive a
        set topics = register_archive.topics, updated_at = clock_timestamp()
        where a.name = register_archive.name
        returning a.* into registered;
    else
        insert into headwater_internal.archive (name, location, topics, archived_to)
        values (register_archive.name, register_archive.location, register_archive.topics, begin_after)
        returning * into registered;
    end if;
    insert into headwater_internal.archive_start (archive, topic_id, missing_to)
    select register_archive.name, m.id, m.missing_to
    from (
        select
            t.id,
            greatest(
                t.expired_to,
                (
                    select e.position from headwater_internal.event e
                    where e.topic_id = t.id and e.position <= begin_after
                    order by e.position desc
                    limit 1
                )
            ) as missing_to
        from headwater_internal.topic t
        where
            t.deleted_at is null
            and (register_archive.topics is null or t.name = any (register_archive.topics))
            and t.name <> all (known_topics)
    ) as m
    where m.missing_to > 0
    on conflict do nothing;
    return registered;
end;
$$;

-- Record that an archive durably has everything up to a position. It never goes back. With the epoch of the position,
-- HW021 if the log has lost events there: retention must not remove the events that have these positions now.
create or replace function headwater_internal.note_archived(name text, to_position bigint, epoch integer default null)
returns void
language plpgsql
as $$
begin
    perform headwater_internal.refuse_lost_position(note_archived.epoch, to_position);
    update headwater_internal.archive a
    set archived_to = greatest(a.archived_to, to_position), updated_at = clock_timestamp()
    where a.name = note_archived.name;
    if not found then
        raise exception 'archive "%" does not exist any more', name
            using errcode = 'HW002',
                  detail = json_build_object('archive', name)::text,
                  hint = 'It was unregistered while its pipeline ran. Restart the pipeline to register it again.';
    end if;
end;
$$;

-- Unregister an archive: retention does not wait for it, and readers do not use it. Its files stay. Returns true if it
-- existed.
create or replace function headwater_internal.forget_archive(name text)
returns boolean
language plpgsql
as $$
begin
    delete from headwater_internal.archive a where a.name = forget_archive.name;
    return found;
end;
$$;

-- The position up to which all archives of a topic have its events: retention must not go further.
create or replace function headwater_internal.archived_to(of_topic headwater_internal.topic)
returns bigint
language sql
stable
return coalesce(
    (
        select min(a.archived_to) from headwater_internal.archive a
        where a.topics is null or (of_topic).name = any (a.topics)
    ),
    9223372036854775807
);

-- For each of these topics: the position after which it was created, the position up to which retention removed events,
-- the last event that exists nowhere any more, and the archive that has those in between.
create or replace function headwater_internal.kept_topics(topics text[])
returns table (topic text, created_after bigint, expired_to bigint, lost_to bigint, location text)
language sql
stable
begin atomic
    select
        t.name, t.created_after, t.expired_to,
        case when a.location is null then t.expired_to else a.missing_to end,
        a.location
    from headwater_internal.topic t
    left join lateral (
        select o.location, coalesce(s.missing_to, 0) as missing_to
        from headwater_internal.archive o
        left join headwater_internal.archive_start s on s.archive = o.name and s.topic_id = t.id
        where (o.topics is null or t.name = any (o.topics)) and coalesce(s.missing_to, 0) < t.expired_to
        order by coalesce(s.missing_to, 0), o.name
        limit 1
    ) as a on true
    where t.id = any (headwater_internal.topic_ids(kept_topics.topics));
end;

-- Every archive with its lag, and the topics whose retention waits for it.
create or replace view headwater.archive_overview as
select
    a.name,
    a.location,
    a.topics,
    a.archived_to,
    a.registered_at,
    a.updated_at,
    l.events as lag_events,
    l.is_more as lag_is_more,
    o.oldest_unarchived_age,
    o.held_topics
from headwater_internal.archive a
cross join lateral headwater_internal.lag_of(headwater_internal.topics_behind(a.topics, a.archived_to), a.archived_to) as l
cross join lateral (
    select
        max(clock_timestamp() - f.published_at) as oldest_unarchived_age,
        coalesce(
            array_agg(t.name order by t.name) filter (where clock_timestamp() - f.published_at > t.retention),
            '{}'
        ) as held_topics
    from headwater_internal.topic t
    cross join lateral (
        select e.published_at from headwater_internal.event e
        where e.topic_id = t.id and e.position > a.archived_to
        order by e.position
        limit 1
    ) as f
    where t.deleted_at is null and (a.topics is null or t.name = any (a.topics))
) as o;

-- The average size in bytes of the next events of these topics, from a sample of the first `sample_size` of each.
create or replace function headwater_internal.average_bytes(
    topics text[],
    after bigint,
    up_to bigint,
    sample_size integer default 500
)
returns bigint
language sql
stable
begin atomic
    select coalesce(ceil(avg(coalesce(octet_length(f.payload), 0) + coalesce(octet_length(f.key), 0))), 0)::bigint
    from unnest(headwater_internal.topic_ids(topics)) as i (id)
    cross join lateral (
        select e.payload, e.key from headwater_internal.event e
        where e.topic_id = i.id and e.position > average_bytes.after and e.position <= average_bytes.up_to
        order by e.position
        limit sample_size
    ) as f;
end;

-- Start a replay, or return the one of that name. HW002 if that was started with another request.
create or replace function headwater_internal.start_replay(
    name text,
    request jsonb,
    start_after bigint,
    up_to bigint,
    plan jsonb default '{}'
)
returns headwater_internal.replay
language plpgsql
as $$
declare
    started headwater_internal.replay;
begin
    insert into headwater_internal.replay as r (name, request, plan, start_after, up_to, done_to)
    values (
        start_replay.name, start_replay.request, start_replay.plan, start_replay.start_after,
        greatest(start_replay.up_to, start_replay.start_after), start_replay.start_after
    )
    on conflict on constraint replay_pkey do nothing;
    -- Locked, so that of two concurrent starts one sees the other.
    select * into started from headwater_internal.replay r where r.name = start_replay.name for update;
    if started.request <> start_replay.request then
        raise exception 'replay "%" was started with another request', name
            using errcode = 'HW002',
                  detail = json_build_object('replay', name, 'request', started.request)::text,
                  hint = 'Repeat the original request, or use another name.';
    end if;
    return started;
end;
$$;

-- Record that a replay has advanced from one position to another, in the transaction that writes the events, so that
-- each is replayed once. HW010 if the replay is at another position.
create or replace function headwater_internal.advance_replay(
    name text,
    from_position bigint,
    to_position bigint,
    more_events bigint
)
returns void
language plpgsql
as $$
declare
    stored bigint;
begin
    update headwater_internal.replay r
    set
        done_to = to_position,
        events = r.events + more_events,
        updated_at = clock_timestamp(),
        finished_at = case when to_position >= r.up_to then clock_timestamp() end
    where r.name = advance_replay.name and r.done_to = from_position and to_position >= from_position;
    if not found then
        select r.done_to into stored from headwater_internal.replay r where r.name = advance_replay.name;
        raise exception 'replay "%" is at %, not at %', name, coalesce(stored::text, 'no position'), from_position
            using errcode = 'HW010',
                  detail = json_build_object('replay', name, 'actual_position', stored)::text,
                  hint = 'Another process runs this replay. Wait until it ends, then repeat it if necessary.';
    end if;
end;
$$;

-- Delete a replay. The events that it has copied stay. Returns true if it existed.
create or replace function headwater_internal.forget_replay(name text)
returns boolean
language plpgsql
as $$
begin
    delete from headwater_internal.replay r where r.name = forget_replay.name;
    return found;
end;
$$;
