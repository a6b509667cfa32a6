-- Archives and replays: what is kept outside of the log, and what is brought back from there.

-- Note that a place will get all events of these topics (null: of the whole log) after a position, the ones before it
-- being in it already or not wanted. From now on retention waits for it. Noted before, it stays as it is; more topics
-- may be added, and begin where the archive stands.
create or replace function headwater.register_archive(
    name text,
    location text,
    topics text[] default null,
    start_after bigint default 0
)
returns headwater.archive
language plpgsql
set lock_timeout = '60s'
as $$
declare
    registered headwater.archive;
    begin_after bigint := start_after;
    known_topics text[] := '{}';
begin
    -- Retention must not come between the look at what is there and the note that keeps it.
    perform pg_advisory_xact_lock(29288::bigint << 48);
    perform headwater.topic_ids(register_archive.topics);
    select * into registered from headwater.archive a where a.name = register_archive.name;
    if found then
        if registered.location <> register_archive.location then
            raise exception 'archive "%" is at %, not at %', name, registered.location, register_archive.location
                using errcode = 'HW002',
                      detail = json_build_object('archive', name, 'location', registered.location)::text,
                      hint = 'Name the pipeline otherwise, or give the archive up: headwater archive forget.';
        end if;
        if registered.topics is not distinct from register_archive.topics then
            return registered;
        end if;
        if registered.topics is null or not coalesce(registered.topics <@ register_archive.topics, true) then
            raise exception 'archive "%" has topics that it is to get no more', name
                using errcode = 'HW002',
                      detail = json_build_object('archive', name, 'topics', registered.topics)::text,
                      hint = 'Keep its topics, or make another archive under another name.';
        end if;
        begin_after := registered.archived_to;
        known_topics := registered.topics;
        update headwater.archive a
        set topics = register_archive.topics, updated_at = clock_timestamp()
        where a.name = register_archive.name
        returning a.* into registered;
    else
        insert into headwater.archive (name, location, topics, archived_to)
        values (register_archive.name, register_archive.location, register_archive.topics, begin_after)
        returning * into registered;
    end if;
    insert into headwater.archive_start (archive, topic_id, missing_to)
    select register_archive.name, m.id, m.missing_to
    from (
        select
            t.id,
            greatest(
                t.expired_to,
                (
                    select e.position from headwater.event e
                    where e.topic_id = t.id and e.position <= begin_after
                    order by e.position desc
                    limit 1
                )
            ) as missing_to
        from headwater.topic t
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

-- Note that an archive durably has everything up to a position. It never goes back. With the epoch of the position, HW021
-- if the log has lost what was there: retention must not take the events that get these positions now.
create or replace function headwater.note_archived(name text, to_position bigint, epoch integer default null)
returns void
language plpgsql
as $$
begin
    perform headwater.refuse_lost_position(note_archived.epoch, to_position);
    update headwater.archive a
    set archived_to = greatest(a.archived_to, to_position), updated_at = clock_timestamp()
    where a.name = note_archived.name;
    if not found then
        raise exception 'there is no archive "%" any more', name
            using errcode = 'HW002',
                  detail = json_build_object('archive', name)::text,
                  hint = 'It was given up while its pipeline ran. Started again, the pipeline registers it anew.';
    end if;
end;
$$;

-- Give an archive up: retention does not wait for it, readers do not look there. Its files stay. True if it was there.
create or replace function headwater.forget_archive(name text)
returns boolean
language plpgsql
as $$
begin
    delete from headwater.archive a where a.name = forget_archive.name;
    return found;
end;
$$;

-- Up to where all archives of a topic have its events: further, retention must not go.
create or replace function headwater.archived_to(of_topic headwater.topic)
returns bigint
language sql
stable
return coalesce(
    (
        select min(a.archived_to) from headwater.archive a
        where a.topics is null or (of_topic).name = any (a.topics)
    ),
    9223372036854775807
);

-- Of each of these topics: after which position its events come, up to where retention took them, the last event that
-- is nowhere any more, and the archive that has those between both.
create or replace function headwater.kept_topics(topics text[])
returns table (topic text, created_after bigint, expired_to bigint, lost_to bigint, location text)
language sql
stable
begin atomic
    select
        t.name, t.created_after, t.expired_to,
        case when a.location is null then t.expired_to else a.missing_to end,
        a.location
    from headwater.topic t
    left join lateral (
        select o.location, coalesce(s.missing_to, 0) as missing_to
        from headwater.archive o
        left join headwater.archive_start s on s.archive = o.name and s.topic_id = t.id
        where (o.topics is null or t.name = any (o.topics)) and coalesce(s.missing_to, 0) < t.expired_to
        order by coalesce(s.missing_to, 0), o.name
        limit 1
    ) as a on true
    where t.id = any (headwater.topic_ids(kept_topics.topics));
end;

-- Every archive with what it has yet to get, and the topics whose retention waits for it.
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
from headwater.archive a
cross join lateral headwater.lag_of(headwater.topics_behind(a.topics, a.archived_to), a.archived_to) as l
cross join lateral (
    select
        max(clock_timestamp() - f.published_at) as oldest_unarchived_age,
        coalesce(
            array_agg(t.name order by t.name) filter (where clock_timestamp() - f.published_at > t.retention),
            '{}'
        ) as held_topics
    from headwater.topic t
    cross join lateral (
        select e.published_at from headwater.event e
        where e.topic_id = t.id and e.position > a.archived_to
        order by e.position
        limit 1
    ) as f
    where t.deleted_at is null and (a.topics is null or t.name = any (a.topics))
) as o;

-- How many bytes the next events of these topics have on average: those of the first of each, up to `sample_size`.
create or replace function headwater.average_bytes(
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
    from unnest(headwater.topic_ids(topics)) as i (id)
    cross join lateral (
        select e.payload, e.key from headwater.event e
        where e.topic_id = i.id and e.position > average_bytes.after and e.position <= average_bytes.up_to
        order by e.position
        limit sample_size
    ) as f;
end;

-- Begin a replay, or find the one of that name. The same name with another request is HW002.
create or replace function headwater.start_replay(
    name text,
    request jsonb,
    start_after bigint,
    up_to bigint,
    plan jsonb default '{}'
)
returns headwater.replay
language plpgsql
as $$
declare
    started headwater.replay;
begin
    insert into headwater.replay as r (name, request, plan, start_after, up_to, done_to)
    values (
        start_replay.name, start_replay.request, start_replay.plan, start_replay.start_after,
        greatest(start_replay.up_to, start_replay.start_after), start_replay.start_after
    )
    on conflict on constraint replay_pkey do nothing;
    -- Locked, so that of two that start it at once one sees what the other did.
    select * into started from headwater.replay r where r.name = start_replay.name for update;
    if started.request <> start_replay.request then
        raise exception 'replay "%" was started with another request', name
            using errcode = 'HW002',
                  detail = json_build_object('replay', name, 'request', started.request)::text,
                  hint = 'Repeat it as it was, or take another name.';
    end if;
    return started;
end;
$$;

-- A replay has come from one position to another. One that stands elsewhere is HW010, so that inside the transaction
-- that writes the events both happen, and once.
create or replace function headwater.advance_replay(
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
    update headwater.replay r
    set
        done_to = to_position,
        events = r.events + more_events,
        updated_at = clock_timestamp(),
        finished_at = case when to_position >= r.up_to then clock_timestamp() end
    where r.name = advance_replay.name and r.done_to = from_position and to_position >= from_position;
    if not found then
        select r.done_to into stored from headwater.replay r where r.name = advance_replay.name;
        raise exception 'replay "%" is at %, not at %', name, coalesce(stored::text, 'no position'), from_position
            using errcode = 'HW010',
                  detail = json_build_object('replay', name, 'actual_position', stored)::text,
                  hint = 'Another process runs it. Let it end, then repeat if need be.';
    end if;
end;
$$;

-- Forget a replay. True if it was there. What it has copied stays.
create or replace function headwater.forget_replay(name text)
returns boolean
language plpgsql
as $$
begin
    delete from headwater.replay r where r.name = forget_replay.name;
    return found;
end;
$$;
