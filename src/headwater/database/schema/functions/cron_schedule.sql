-- Cron schedules: events published at the times of a cron expression, once for each time, by any running process.

-- Create or change a cron schedule and return it. Its next time is kept unless the cron expression or the time zone
-- changed. HW004 if the topic does not exist, HW003 if the event is too large.
create or replace function headwater.set_cron_schedule(
    name text,
    cron text,
    time_zone text,
    topic text,
    next_at timestamptz,
    payload bytea default null,
    key bytea default null,
    type text default null,
    routing_key text default null,
    headers jsonb default null,
    content_type text default null
)
returns headwater_internal.cron_schedule
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    destination constant headwater_internal.topic := headwater_internal.topic_to_publish(topic);
    declared headwater_internal.cron_schedule;
begin
    perform headwater_internal.refuse_too_large(destination, octet_length(payload), octet_length(headers::text));
    insert into headwater_internal.cron_schedule as p
        (name, cron, time_zone, topic_id, key, type, routing_key, headers, content_type, payload, next_at)
    values (
        set_cron_schedule.name, set_cron_schedule.cron, set_cron_schedule.time_zone, destination.id, set_cron_schedule.key,
        set_cron_schedule.type, set_cron_schedule.routing_key, set_cron_schedule.headers, set_cron_schedule.content_type,
        set_cron_schedule.payload, set_cron_schedule.next_at
    )
    on conflict on constraint cron_schedule_pkey do update
        set cron = excluded.cron,
            time_zone = excluded.time_zone,
            topic_id = excluded.topic_id,
            key = excluded.key,
            type = excluded.type,
            routing_key = excluded.routing_key,
            headers = excluded.headers,
            content_type = excluded.content_type,
            payload = excluded.payload,
            next_at = case
                when p.cron = excluded.cron and p.time_zone = excluded.time_zone then p.next_at
                else excluded.next_at
            end
    returning * into declared;
    return declared;
end;
$$;

-- The cron schedules that are due.
create or replace function headwater_internal.due_cron_schedules()
returns table (name text, cron text, time_zone text, due_at timestamptz)
language sql
volatile
security definer
set search_path = pg_catalog, pg_temp
begin atomic
    select p.name, p.cron, p.time_zone, p.next_at
    from headwater_internal.cron_schedule p
    where p.next_at <= clock_timestamp() and not p.paused
    order by p.next_at
    limit 100;
end;

-- Publish the event of a cron schedule for the time at which it was due, and set its next time. Returns false if
-- another process has done so: only one of them can update the row for a due time. Times that passed while no process
-- was running are published as one event.
create or replace function headwater_internal.fire_cron_schedule(name text, due_at timestamptz, next_at timestamptz)
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    fired headwater_internal.cron_schedule;
begin
    update headwater_internal.cron_schedule p
    set next_at = fire_cron_schedule.next_at, last_at = due_at
    where p.name = fire_cron_schedule.name and p.next_at = due_at and not p.paused and fire_cron_schedule.next_at > due_at
    returning * into fired;
    if not found then
        return false;
    end if;
    perform headwater.publish_bytes(
        t.name, fired.payload, fired.key, fired.type, fired.routing_key,
        coalesce(fired.headers, '{}') || jsonb_build_object('cron', fired.name, 'due_at', due_at),
        fired.content_type
    )
    from headwater_internal.topic t
    where t.id = fired.topic_id and t.deleted_at is null;
    return true;
end;
$$;

-- Pause a cron schedule, or resume it. Returns false if it does not exist.
create or replace function headwater.pause_cron_schedule(name text, paused boolean)
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    update headwater_internal.cron_schedule p set paused = pause_cron_schedule.paused where p.name = pause_cron_schedule.name;
    return found;
end;
$$;

-- Delete a cron schedule. Returns false if it does not exist.
create or replace function headwater.delete_cron_schedule(name text)
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    delete from headwater_internal.cron_schedule p where p.name = delete_cron_schedule.name;
    return found;
end;
$$;
