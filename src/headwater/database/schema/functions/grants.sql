-- The privileges of each role. Runs at every upgrade, after all functions.
--
-- A function that runs as its caller (SECURITY INVOKER) can do no more to the tables than its caller, so every role may
-- execute all of them: the table privileges below decide. A function that runs as its owner (SECURITY DEFINER) may be
-- executed only by the roles that a list here names.

revoke all on all functions in schema headwater, headwater_internal from public;

do $$
declare
    -- SECURITY DEFINER functions, by role. The administrator may execute all of them.
    publishing constant text[] := array[
        'publish_batch', 'publish_bytes', 'create_missing_topic', 'append_ahead', 'append_group', 'index_fields',
        'schedule_bytes', 'release_due', 'cancel_scheduled', 'move_scheduled', 'maintain',
        'set_cron_schedule', 'due_cron_schedules', 'fire_cron_schedule', 'pause_cron_schedule', 'delete_cron_schedule'
    ];
    consuming constant text[] := array[
        'begin_epoch', 'refresh_stable', 'release_due', 'maintain', 'due_cron_schedules', 'fire_cron_schedule',
        'metrics', 'log_health', 'log_faults', 'install', 'match'
    ];
    -- They make readers wait, so only publishing functions, which run as their owner, may call them.
    closed constant text[] := array['advertise_publisher', 'assign_position'];
    missing text;
    opened record;
begin
    -- Installing does not require the privilege to create roles; `headwater doctor` lists the missing ones.
    foreach missing in array array['headwater_publisher', 'headwater_consumer', 'headwater_admin'] loop
        if not exists (select from pg_roles r where r.rolname = missing) then
            begin
                execute format('create role %I nologin', missing);
            exception
                when insufficient_privilege or duplicate_object or unique_violation then null;
            end;
        end if;
    end loop;
    for opened in
        select p.oid::regprocedure as name, r.rolname
        from (values ('headwater_publisher', publishing), ('headwater_consumer', consuming)) as g (role_name, functions)
        join pg_roles r on r.rolname = g.role_name
        join pg_proc p on p.proname = any (g.functions) or (not p.prosecdef and p.proname <> all (closed))
        join pg_namespace n
            on n.oid = p.pronamespace
            and (n.nspname in ('headwater', 'headwater_internal') or n.nspname = 'headwater_filter' and p.prosecdef)
    loop
        execute format('grant execute on function %s to %I', opened.name, opened.rolname);
    end loop;

    if exists (select from pg_roles r where r.rolname = 'headwater_publisher') then
        grant usage on schema headwater, headwater_internal to headwater_publisher;
        grant select on
            headwater_internal.topic, headwater_internal.setting, headwater_internal.segment,
            headwater_internal.migration, headwater_internal.installed, headwater_internal.scheduled,
            headwater_internal.cron_schedule
            to headwater_publisher;
        grant select on sequence headwater_internal.position, headwater_internal.epoch_register to headwater_publisher;
        -- An INSERT or COPY goes to the view, which publishes row by row: only functions of Headwater choose positions,
        -- offsets and topics.
        grant insert on headwater.new_event to headwater_publisher;
        grant select, insert, delete on headwater_internal.staged to headwater_publisher;
        grant select, insert, update, delete on headwater_internal.writer_epoch to headwater_publisher;
    end if;

    if exists (select from pg_roles r where r.rolname = 'headwater_consumer') then
        grant usage on schema headwater, headwater_internal to headwater_consumer;
        grant select on
            headwater_internal.topic, headwater_internal.event, headwater_internal.event_index_term,
            headwater_internal.field_index, headwater_internal.setting, headwater_internal.segment,
            headwater_internal.migration, headwater_internal.installed, headwater_internal.epoch,
            headwater_internal.clock_step, headwater_internal.publisher_lock,
            headwater.field_index_overview, headwater.topic_overview, headwater.cursor_lag,
            headwater.publisher_in_flight, headwater.delivery, headwater.queue_overview, headwater.queue_lag,
            headwater.pipeline_status, headwater.archive_overview, headwater.epoch_overview, headwater.stopped_filter
            to headwater_consumer;
        grant select, insert, update, delete on
            headwater_internal.cursor, headwater_internal.queue, headwater_internal.binding,
            headwater_internal.ledger, headwater_internal.queue_progress, headwater_internal.queue_activity,
            headwater_internal.redelivery, headwater_internal.dead_letter,
            headwater_internal.filter, headwater_internal.filter_stop, headwater_internal.subscription,
            headwater_internal.reading, headwater_internal.subscription_retry,
            headwater_internal.projection, headwater_internal.pipeline, headwater_internal.pipeline_snapshot,
            headwater_internal.pipeline_batch, headwater_internal.archive, headwater_internal.archive_start,
            headwater_internal.replay, headwater_internal.store_snapshot
            to headwater_consumer;
        grant select on sequence
            headwater_internal.position, headwater_internal.stable_register, headwater_internal.epoch_register,
            headwater_internal.epoch_start
            to headwater_consumer;
        grant usage on sequence
            headwater_internal.lease_token, headwater_internal.checkpoint_epoch
            to headwater_consumer;
        if to_regnamespace('headwater_filter') is not null then
            grant usage on schema headwater_filter to headwater_consumer;
        end if;
    end if;

    if exists (select from pg_roles r where r.rolname = 'headwater_admin') then
        begin
            grant headwater_publisher, headwater_consumer to headwater_admin;
        exception
            when insufficient_privilege or undefined_object then null;
        end;
        grant usage on schema headwater, headwater_internal to headwater_admin;
        grant select on all tables in schema headwater, headwater_internal to headwater_admin;
        grant execute on all functions in schema headwater, headwater_internal to headwater_admin;
        grant insert, update on headwater_internal.topic, headwater_internal.field_index to headwater_admin;
        grant update on headwater_internal.setting to headwater_admin;
        grant delete on headwater_internal.scheduled to headwater_admin;
        -- The Kafka server runs as an administrator: it creates topics for its clients.
        grant usage on sequence
            headwater_internal.kafka_incarnation, headwater_internal.kafka_producer_id
            to headwater_admin;
        -- Webhooks send data elsewhere and store secrets in clear text: administrators only.
        grant insert, update, delete on
            headwater_internal.kafka_topic, headwater_internal.kafka_partition, headwater_internal.kafka_broker,
            headwater_internal.kafka_producer_partition, headwater_internal.kafka_group,
            headwater_internal.kafka_offset, headwater_internal.kafka_transactional_producer, headwater_internal.kafka_staged,
            headwater_internal.kafka_staged_offset,
            headwater_internal.account, headwater_internal.permission, headwater_internal.api_key,
            headwater_internal.kept_answer, headwater_internal.webhook, headwater_internal.webhook_pace,
            headwater_internal.schema_registry, headwater_internal.registered_schema,
            headwater_internal.schema_subject, headwater_internal.schema_version,
            headwater_internal.schema_reference, headwater_internal.topic_schema
            to headwater_admin;
    end if;
end;
$$;
