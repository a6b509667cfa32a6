-- Cursors: the saved positions of readers.

-- Open a cursor and return it. The first call creates it at `start_after` (null or 0: at the first event that exists).
create or replace function headwater.open_cursor(
    name text,
    topics text[] default null,
    start_after bigint default null,
    holds_retention boolean default null
)
returns headwater_internal.cursor
language plpgsql
as $$
declare
    opened headwater_internal.cursor;
begin
    select * into opened from headwater_internal.cursor c where c.name = open_cursor.name;
    if not found then
        insert into headwater_internal.cursor (name, position, gone_to, topics, holds_retention, epoch)
        values (
            open_cursor.name,
            coalesce(start_after, 0),
            case when coalesce(start_after, 0) = 0 then headwater_internal.expired_to(open_cursor.topics) else 0 end,
            open_cursor.topics,
            coalesce(open_cursor.holds_retention, false),
            headwater.current_epoch()
        )
        on conflict on constraint cursor_pkey do nothing;
        select * into opened from headwater_internal.cursor c where c.name = open_cursor.name;
    end if;
    return opened;
end;
$$;

-- Move a cursor from the position at which the caller started to read to the one it has reached. HW010 if the cursor is
-- not at `from_position`, so that an effect and the position commit together, in the caller's transaction, or not at
-- all. With the epoch in which the caller read, HW021 if the log is in another one: the events may be lost.
create or replace function headwater.advance_cursor(
    name text, from_position bigint, to_position bigint, epoch integer default null
)
returns void
language plpgsql
as $$
declare
    present constant integer := headwater.current_epoch();
    stored bigint;
begin
    if advance_cursor.epoch <> present or to_position > headwater.head() then
        perform headwater_internal.refuse_other_epoch(advance_cursor.epoch, to_position);
    end if;
    update headwater_internal.cursor c
    set position = to_position, updated_at = clock_timestamp(), epoch = present
    where c.name = advance_cursor.name and c.position = from_position and to_position >= from_position;
    if not found then
        select c.position into stored from headwater_internal.cursor c where c.name = advance_cursor.name;
        raise exception 'cursor "%" is at %, not at %', name, coalesce(stored::text, 'no position'), from_position
            using errcode = 'HW010',
                  detail = json_build_object('cursor', name, 'actual_position', stored)::text,
                  hint = 'The cursor was set, or another reader uses it. Open it again and read from its position.';
    end if;
end;
$$;

-- Set a cursor to any position, back or forth, creating it if it is missing. Null leaves topics and holds_retention
-- unchanged. A position of an earlier epoch is reduced to the last common one.
create or replace function headwater.set_cursor(
    name text,
    to_position bigint,
    topics text[] default null,
    holds_retention boolean default null,
    epoch integer default null
)
returns void
language plpgsql
as $$
declare
    common constant bigint := headwater.common_position(set_cursor.epoch, to_position);
begin
    insert into headwater_internal.cursor as c (name, position, gone_to, topics, holds_retention, epoch)
    values (
        set_cursor.name,
        common,
        case when common = 0 then headwater_internal.expired_to(set_cursor.topics) else 0 end,
        set_cursor.topics,
        coalesce(set_cursor.holds_retention, false),
        headwater.current_epoch()
    )
    on conflict on constraint cursor_pkey do update
        set position = excluded.position,
            epoch = excluded.epoch,
            gone_to = excluded.gone_to,
            topics = coalesce(set_cursor.topics, c.topics),
            holds_retention = coalesce(set_cursor.holds_retention, c.holds_retention),
            updated_at = clock_timestamp();
end;
$$;

-- Delete a cursor. Returns true if it existed.
create or replace function headwater.delete_cursor(name text)
returns boolean
language plpgsql
as $$
begin
    delete from headwater_internal.cursor c where c.name = delete_cursor.name;
    return found;
end;
$$;

-- Every cursor with its lag: events of its own topics, counted up to 1000, and the age of the first of them.
create or replace view headwater.cursor_lag as
select
    c.name,
    c.position,
    c.topics,
    c.holds_retention,
    c.updated_at,
    l.lag_events,
    l.lag_is_more,
    make_interval(secs => l.lag_seconds) as oldest_unread_age
from headwater_internal.cursor_lags() as l
join headwater_internal.cursor c on c.name = l.name;
