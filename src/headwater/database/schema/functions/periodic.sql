-- Periodic events: published at the times of a cron expression, once each, by whichever process is alive.

-- Declare a periodic event, or change it. Its next time stays as it is unless the cron expression or zone changed.
create or replace function headwater.set_periodic(
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
returns headwater.periodic
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    destination constant headwater.topic := headwater.topic_to_publish(topic);
    declared headwater.periodic;
begin
    perform headwater.refuse_too_large(destination, octet_length(payload), octet_length(headers::text));
    insert into headwater.periodic as p
        (name, cron, time_zone, topic_id, key, type, routing_key, headers, content_type, payload, next_at)
    values (
        set_periodic.name, set_periodic.cron, set_periodic.time_zone, destination.id, set_periodic.key,
        set_periodic.type, set_periodic.routing_key, set_periodic.headers, set_periodic.content_type,
        set_periodic.payload, set_periodic.next_at
    )
    on conflict on constraint periodic_pkey do update
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

-- The periodic events whose time has come.
create or replace function headwater.due_periodics()
returns table (name text, cron text, time_zone text, due_at timestamptz)
language sql
volatile
security definer
set search_path = pg_catalog, pg_temp
begin atomic
    select p.name, p.cron, p.time_zone, p.next_at
    from headwater.periodic p
    where p.next_at <= clock_timestamp() and not p.paused
    order by p.next_at
    limit 100;
end;

-- Publish a periodic event for the time it was due, and set its next one. False if another process has done it:
-- the due time is what only one of them can take. Times missed while nobody was alive come as one.
create or replace function headwater.fire_periodic(name text, due_at timestamptz, next_at timestamptz)
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    fired headwater.periodic;
begin
    update headwater.periodic p
    set next_at = fire_periodic.next_at, last_at = due_at
    where p.name = fire_periodic.name and p.next_at = due_at and not p.paused and fire_periodic.next_at > due_at
    returning * into fired;
    if not found then
        return false;
    end if;
    perform headwater.publish_bytes(
        t.name, fired.payload, fired.key, fired.type, fired.routing_key,
        coalesce(fired.headers, '{}') || jsonb_build_object('periodic', fired.name, 'due_at', due_at),
        fired.content_type
    )
    from headwater.topic t
    where t.id = fired.topic_id and t.deleted_at is null;
    return true;
end;
$$;

-- Stop a periodic event from being published, or let it go on. False if there is none of that name.
create or replace function headwater.pause_periodic(name text, paused boolean)
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    update headwater.periodic p set paused = pause_periodic.paused where p.name = pause_periodic.name;
    return found;
end;
$$;

-- Forget a periodic event. False if there is none of that name.
create or replace function headwater.delete_periodic(name text)
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    delete from headwater.periodic p where p.name = delete_periodic.name;
    return found;
end;
$$;
