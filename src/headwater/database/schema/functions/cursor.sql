-- Cursors: a reader's saved position.

-- A cursor, made on the first call at `start_after`; null or 0: at the first event that is kept.
create or replace function headwater.open_cursor(
    name text,
    topics text[] default null,
    start_after bigint default null,
    must_not_lose boolean default null
)
returns headwater.cursor
language plpgsql
as $$
declare
    opened headwater.cursor;
begin
    select * into opened from headwater.cursor c where c.name = open_cursor.name;
    if not found then
        insert into headwater.cursor (name, position, gone_to, topics, must_not_lose, epoch)
        values (
            open_cursor.name,
            coalesce(start_after, 0),
            case when coalesce(start_after, 0) = 0 then headwater.expired_to(open_cursor.topics) else 0 end,
            open_cursor.topics,
            coalesce(open_cursor.must_not_lose, false),
            headwater.current_epoch()
        )
        on conflict on constraint cursor_pkey do nothing;
        select * into opened from headwater.cursor c where c.name = open_cursor.name;
    end if;
    return opened;
end;
$$;

-- Move a cursor from where the caller read to where it read to. A cursor that somebody moved meanwhile is
-- HW010, so that inside the caller's transaction an effect and its position commit together or not at all. With the
-- epoch in which the caller read, HW021 if the log is in another: what was read may not be in it.
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
        perform headwater.refuse_other_epoch(advance_cursor.epoch, to_position);
    end if;
    update headwater.cursor c
    set position = to_position, updated_at = clock_timestamp(), epoch = present
    where c.name = advance_cursor.name and c.position = from_position and to_position >= from_position;
    if not found then
        select c.position into stored from headwater.cursor c where c.name = advance_cursor.name;
        raise exception 'cursor "%" is at %, not at %', name, coalesce(stored::text, 'no position'), from_position
            using errcode = 'HW010',
                  detail = json_build_object('cursor', name, 'actual_position', stored)::text,
                  hint = 'Somebody set it, or another reader uses it. Open it again and read from there.';
    end if;
end;
$$;

-- Set a cursor to any position, back or forth, making it if need be: rewind, skip, replay into a new one.
-- Null leaves topics and must_not_lose as they are. A position of an older epoch is taken back to the last common one.
create or replace function headwater.set_cursor(
    name text,
    to_position bigint,
    topics text[] default null,
    must_not_lose boolean default null,
    epoch integer default null
)
returns void
language plpgsql
as $$
declare
    common constant bigint := headwater.common_position(set_cursor.epoch, to_position);
begin
    insert into headwater.cursor as c (name, position, gone_to, topics, must_not_lose, epoch)
    values (
        set_cursor.name,
        common,
        case when common = 0 then headwater.expired_to(set_cursor.topics) else 0 end,
        set_cursor.topics,
        coalesce(set_cursor.must_not_lose, false),
        headwater.current_epoch()
    )
    on conflict on constraint cursor_pkey do update
        set position = excluded.position,
            epoch = excluded.epoch,
            gone_to = excluded.gone_to,
            topics = coalesce(set_cursor.topics, c.topics),
            must_not_lose = coalesce(set_cursor.must_not_lose, c.must_not_lose),
            updated_at = clock_timestamp();
end;
$$;

-- Forget a cursor. True if it was there.
create or replace function headwater.delete_cursor(name text)
returns boolean
language plpgsql
as $$
begin
    delete from headwater.cursor c where c.name = delete_cursor.name;
    return found;
end;
$$;

-- Every cursor with what it has yet to read: events of its own topics, counted up to 1000, and the age of the first.
create or replace view headwater.cursor_lag as
select
    c.name,
    c.position,
    c.topics,
    c.must_not_lose,
    c.updated_at,
    l.lag_events,
    l.lag_is_more,
    make_interval(secs => l.lag_seconds) as oldest_unread_age
from headwater.cursor_lags() as l
join headwater.cursor c on c.name = l.name;
