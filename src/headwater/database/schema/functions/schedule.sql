-- Scheduled events: they wait in a table, however far ahead, and enter the log when due.

-- Schedule one event. Returns its schedule id; with an event id that waits already,
-- the id of that one; with one that is in the log, null.
create or replace function headwater.schedule_bytes(
    topic text,
    payload bytea,
    deliver_at timestamptz,
    key bytea default null,
    type text default null,
    routing_key text default null,
    headers jsonb default null,
    content_type text default null,
    event_id text default null
)
returns bigint
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    destination constant headwater.topic := headwater.topic_to_publish(topic);
    schedule_id bigint;
begin
    perform headwater.refuse_too_large(destination, octet_length(payload), octet_length(headers::text));
    if event_id is not null then
        insert into headwater.event_identity (topic_id, event_id)
        values (destination.id, schedule_bytes.event_id)
        on conflict do nothing;
        if not found then
            select s.id into schedule_id
            from headwater.scheduled s
            where s.topic_id = destination.id and s.event_id = schedule_bytes.event_id;
            return schedule_id;
        end if;
    end if;
    insert into headwater.scheduled
        (due_at, topic_id, key, type, routing_key, headers, content_type, payload, event_id)
    values
        (deliver_at, destination.id, key, type, routing_key, headers, content_type, payload, event_id)
    returning id into schedule_id;
    return schedule_id;
end;
$$;

-- Move the events that are due into the log, at most `batch_size` of them, and say when the next is due.
-- Any process may call it at any time; each event enters once. One that cannot enter now stays and holds up no other:
-- those of a topic whose lane somebody holds are tried again soon, one that its topic no longer takes in a minute.
create or replace function headwater.release_due(
    batch_size integer default 1000,
    out released integer,
    out next_due_seconds float8
)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '100ms'
as $$
declare
    due record;
    held integer[] := '{}';
begin
    released := 0;
    for due in
        select s.*, t.name as topic
        from headwater.scheduled s
        join headwater.topic t on t.id = s.topic_id and t.deleted_at is null
        where s.due_at <= clock_timestamp()
        order by s.due_at, s.id
        limit batch_size
        for update of s skip locked
    loop
        continue when due.topic_id = any (held);
        begin
            delete from headwater.scheduled s where s.id = due.id;
            -- The id was taken when the event was scheduled; give it back for the moment of publishing.
            delete from headwater.event_identity i
            where due.event_id is not null and i.topic_id = due.topic_id and i.event_id = due.event_id;
            perform headwater.publish_bytes(
                due.topic, due.payload, due.key, due.type, due.routing_key, due.headers, due.content_type, due.event_id
            );
            released := released + 1;
        exception
            when lock_not_available then
                held := held || due.topic_id;
            when sqlstate 'HW003' then
                update headwater.scheduled s set due_at = clock_timestamp() + interval '1 minute' where s.id = due.id;
        end;
    end loop;
    select extract(epoch from min(s.due_at) - clock_timestamp())
    into next_due_seconds
    from headwater.scheduled s
    join headwater.topic t on t.id = s.topic_id and t.deleted_at is null;
    if held <> '{}' then
        next_due_seconds := greatest(next_due_seconds, 1);
    end if;
end;
$$;

-- Take back a scheduled event. True if it was still waiting.
create or replace function headwater.cancel_scheduled(schedule_id bigint)
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    cancelled headwater.scheduled;
begin
    delete from headwater.scheduled s where s.id = schedule_id returning * into cancelled;
    delete from headwater.event_identity i
    where i.topic_id = cancelled.topic_id and i.event_id = cancelled.event_id and i.position is null;
    return cancelled.id is not null;
end;
$$;

-- Give a scheduled event another time. True if it was still waiting.
create or replace function headwater.move_scheduled(schedule_id bigint, deliver_at timestamptz)
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    update headwater.scheduled s set due_at = deliver_at where s.id = schedule_id;
    return found;
end;
$$;
