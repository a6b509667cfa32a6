-- Who may do what. Run at every upgrade, so that a new function is closed until it is opened here.

revoke all on all functions in schema headwater from public;

do $$
declare
    missing text;
begin
    -- Installing does not need the right to create roles; `headwater doctor` says which are missing.
    foreach missing in array array['headwater_publisher', 'headwater_consumer', 'headwater_admin'] loop
        if not exists (select from pg_roles r where r.rolname = missing) then
            begin
                execute format('create role %I nologin', missing);
            exception
                when insufficient_privilege or duplicate_object or unique_violation then null;
            end;
        end if;
    end loop;

    if exists (select from pg_roles r where r.rolname = 'headwater_publisher') then
        grant usage on schema headwater to headwater_publisher;
        grant select on headwater.topic, headwater.setting, headwater.segment, headwater.lane, headwater.migration,
            headwater.installed
            to headwater_publisher;
        grant usage, select on sequence headwater.position to headwater_publisher;
        grant
            insert (position, topic_id, partition, topic_offset, key, type, routing_key, headers, content_type,
                    payload, event_id),
            select (position, topic_id, partition, topic_offset)
            on headwater.event to headwater_publisher;
        grant select, insert, delete on headwater.event_identity, headwater.scheduled to headwater_publisher;
        grant update (due_at) on headwater.scheduled to headwater_publisher;
        grant execute on function
            headwater.advertise_publisher(),
            headwater.advertise_on_insert(),
            headwater.head(),
            headwater.raise_topic_not_found(text),
            headwater.find_topic(text),
            headwater.create_missing_topic(text),
            headwater.topic_to_publish(text),
            headwater.key_hash(bytea),
            headwater.lane_of(bytea, integer, integer),
            headwater.refuse_too_large(headwater.topic, integer, integer),
            headwater.lock_lanes(integer, integer[]),
            headwater.next_offset(integer, integer),
            headwater.publish_batch(text, bytea[], bytea[], text[], text[], text[], text[], text[], integer[]),
            headwater.publish_bytes(text, bytea, bytea, text, text, jsonb, text, text, timestamptz),
            headwater.publish(text, jsonb, text, text, text, jsonb, text, timestamptz, interval),
            headwater.schedule_bytes(text, bytea, timestamptz, bytea, text, text, jsonb, text, text),
            headwater.release_due(integer),
            headwater.cancel_scheduled(bigint),
            headwater.move_scheduled(bigint, timestamptz),
            headwater.maintain()
            to headwater_publisher;
    end if;

    if exists (select from pg_roles r where r.rolname = 'headwater_consumer') then
        grant usage on schema headwater to headwater_consumer;
        grant select on headwater.topic, headwater.event, headwater.setting, headwater.segment, headwater.migration,
            headwater.installed,            headwater.topic_overview, headwater.cursor_lag, headwater.publisher_in_flight
            to headwater_consumer;
        grant select, insert, update, delete on headwater.cursor to headwater_consumer;
        grant select on sequence headwater.position to headwater_consumer;
        grant execute on function
            headwater.head(),
            headwater.settled(),
            headwater.positions_between(bigint, bigint),
            headwater.raise_topic_not_found(text),
            headwater.find_topic(text),
            headwater.topic_ids(text[]),
            headwater.refuse_expired(integer[], bigint),
            headwater.log_state(),
            headwater.expired_to(text[]),
            headwater.read_settled(text[], bigint, bigint, integer, bigint, bigint),
            headwater.read(text[], bigint, integer, bigint, bigint, boolean),
            headwater.read_backwards(text[], bigint, integer, bigint),
            headwater.position_before(text[], timestamptz),
            headwater.open_cursor(text, text[], bigint, boolean),
            headwater.advance_cursor(text, bigint, bigint),
            headwater.set_cursor(text, bigint, text[], boolean),
            headwater.delete_cursor(text),
            headwater.release_due(integer),
            headwater.maintain()
            to headwater_consumer;
    end if;

    if exists (select from pg_roles r where r.rolname = 'headwater_admin') then
        begin
            grant headwater_publisher, headwater_consumer to headwater_admin;
        exception
            when insufficient_privilege or undefined_object then null;
        end;
        grant usage on schema headwater to headwater_admin;
        grant select on all tables in schema headwater to headwater_admin;
        grant insert, update on headwater.topic to headwater_admin;
        grant update on headwater.setting to headwater_admin;
        grant delete on headwater.scheduled to headwater_admin;
        grant execute on all functions in schema headwater to headwater_admin;
    end if;
end;
$$;
