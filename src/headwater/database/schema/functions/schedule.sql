-- Scheduled events: they wait in a table, for any length of time, and enter the log when due.

-- Schedule one event for `deliver_at`. Returns its schedule id; if an event with the same event id is already
-- scheduled, the schedule id of that one; if it is already in the log, null. Errors as for publish_bytes().
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
    destination constant headwater_internal.topic := headwater_internal.topic_to_publish(topic);
    schedule_id bigint;
begin
    perform headwater_internal.refuse_too_large(destination, octet_length(payload), octet_length(headers::text));
    if event_id is not null then
        insert into headwater_internal.event_identity (topic_id, event_id)
        values (destination.id, schedule_bytes.event_id)
        on conflict do nothing;
        if not found then
            select s.id into schedule_id
            from headwater_internal.scheduled s
            where s.topic_id = destination.id and s.event_id = schedule_bytes.event_id;
            return schedule_id;
        end if;
    end if;
    insert into headwater_internal.scheduled
        (due_at, topic_id, key, type, routing_key, headers, content_type, payload, event_id)
    values
        (deliver_at, destination.id, key, type, routing_key, headers, content_type, payload, event_id)
    returning id into schedule_id;
    return schedule_id;
end;
$$;

-- Publish the scheduled events that are due, at most `batch_size`, and return their number and the seconds until the
-- next one is due. Any process may call it at any time; each event is published once. An event that cannot be published
-- now does not delay the others: if a partition of its topic is locked it is retried soon; if its topic no longer
-- accepts it, in a minute.
create or replace function headwater_internal.release_due(
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
        from headwater_internal.scheduled s
        join headwater_internal.topic t on t.id = s.topic_id and t.deleted_at is null
        where s.due_at <= clock_timestamp()
        order by s.due_at, s.id
        limit batch_size
        for update of s skip locked
    loop
        continue when due.topic_id = any (held);
        begin
            delete from headwater_internal.scheduled s where s.id = due.id;
            -- The event id was reserved when the event was scheduled; release it for publishing.
            delete from headwater_internal.event_identity i
            where due.event_id is not null and i.topic_id = due.topic_id and i.event_id = due.event_id;
            perform headwater.publish_bytes(
                due.topic, due.payload, due.key, due.type, due.routing_key, due.headers, due.content_type, due.event_id
            );
            released := released + 1;
        exception
            when lock_not_available then
                held := held || due.topic_id;
            when sqlstate 'HW003' then
                update headwater_internal.scheduled s set due_at = clock_timestamp() + interval '1 minute' where s.id = due.id;
        end;
    end loop;
    select extract(epoch from min(s.due_at) - clock_timestamp())
    into next_due_seconds
    from headwater_internal.scheduled s
    join headwater_internal.topic t on t.id = s.topic_id and t.deleted_at is null;
    if held <> '{}' then
        next_due_seconds := greatest(next_due_seconds, 1);
    end if;
end;
$$;

-- Cancel a scheduled event. Returns true if it was still waiting.
create or replace function headwater.cancel_scheduled(schedule_id bigint)
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    cancelled headwater_internal.scheduled;
begin
    delete from headwater_internal.scheduled s where s.id = schedule_id returning * into cancelled;
    delete from headwater_internal.event_identity i
    where i.topic_id = cancelled.topic_id and i.event_id = cancelled.event_id and i.position is null;
    return cancelled.id is not null;
end;
$$;

-- Move a scheduled event to another time. Returns true if it was still waiting.
create or replace function headwater.move_scheduled(schedule_id bigint, deliver_at timestamptz)
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    update headwater_internal.scheduled s set due_at = deliver_at where s.id = schedule_id;
    return found;
end;
$$;
