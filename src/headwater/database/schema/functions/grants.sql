-- Who may do what. Run at every upgrade, so that a new function is closed until it is opened here.

revoke all on all functions in schema headwater from public;

do $$
declare
    -- What a function needs of others, it needs as its caller: each list is complete.
    publishing constant text[] := array[
        'head', 'raise_topic_not_found', 'find_topic', 'create_missing_topic', 'topic_to_publish', 'lane_key', 'lock_lanes',
        'begin_copy', 'end_copy', 'publish_batch', 'publish_bytes', 'publish', 'schedule_bytes', 'release_due',
        'cancel_scheduled', 'move_scheduled', 'maintain', 'set_periodic', 'due_periodics', 'fire_periodic',
        'pause_periodic', 'delete_periodic', 'publish_epoch', 'discard_staged',
        'append_ahead', 'append_group', 'append', 'refuse_bad_query', 'mark_fields'
    ];
    consuming constant text[] := array[
        'begin_epoch', 'epoch_identity', 'current_epoch', 'common_position', 'refuse_other_epoch', 'epoch_of',
        'publisher_hash', 'stable_positions', 'stable_position', 'await_stable',
        'head', 'settled', 'refresh_settled', 'log_state', 'log_state_by_topic', 'positions_between', 'raise_topic_not_found',
        'find_topic', 'topic_ids', 'expired_to', 'refuse_expired', 'page_of_topic', 'read_topic',
        'read_settled', 'read', 'read_backwards',
        'position_before', 'open_cursor', 'advance_cursor', 'set_cursor', 'delete_cursor', 'release_due', 'maintain',
        'find_group', 'find_queue', 'lock_group', 'try_lock_group', 'frontier', 'create_group', 'alter_group', 'pause_group',
        'resume_group', 'delete_group', 'rewind_group', 'pattern_regex', 'bind', 'unbind', 'bound_topics',
        'bound_events', 'bound_events_without', 'as_multirange', 'next_token', 'key_order_hash', 'backoff', 'in_flight', 'with_try', 'open_claims',
        'waiting_keys', 'first_of_key', 'leased_keys', 'is_next_of_key', 'free_next_of_keys', 'reap', 'claim_suspect',
        'claim_due', 'claim_selected', 'claim', 'bury', 'settle', 'refuse_lost_lease', 'settle_and_claim', 'extend_lease', 'dead_letters',
        'redrive', 'discard', 'group_low_water', 'due_periodics', 'fire_periodic',
        'as_json', 'subscribe', 'unsubscribe', 'keep_subscriptions', 'hold_reading', 'match', 'read_next',
        'set_reading', 'retry_later', 'finish_retry', 'install',
        'drawn_ranges', 'batch_end', 'average_bytes', 'scan_topic', 'scan', 'kept_topics', 'register_archive', 'note_archived',
        'forget_archive', 'start_replay', 'advance_replay', 'forget_replay',
        'claim_pipeline', 'take_pipeline', 'refuse_lost_pipeline', 'renew_pipeline', 'renew_generation', 'note_batch', 'record_batch', 'record_failure',
        'release_pipeline', 'find_pipeline', 'stop_pipeline', 'reset_pipeline', 'delete_pipeline',
        'pipeline_writer', 'record_snapshot',
        'beside', 'table_named', 'refuse_rebuilt', 'create_projection_table', 'write_projection_rows',
        'prepare_projection', 'refuse_foreign_table', 'merge_projection', 'empty_staging', 'projection_generation',
        'begin_rebuild', 'abandon_rebuild', 'drop_projection_tables', 'switch_rebuilt', 'reshape_projection',
        'forget_projections',
        'find_event_store', 'refuse_bad_query', 'fields_match', 'is_of_kind', 'value_compares', 'field_value', 'field_mark', 'item_matches', 'read_matching', 'read_at', 'count_matching',
        'latest_matching', 'event_store_head', 'load_snapshot', 'save_snapshot', 'forget_snapshots',
        'events_at', 'read_bound', 'leases', 'topic_contents', 'bound_contents', 'undone_contents', 'dead_letter_count',
        'metrics', 'log_health',
        'leased_events', 'topic_ends', 'lag_of', 'seconds_behind', 'topics_behind', 'cursor_lags', 'group_overviews',
        'kafka_lag', 'log_faults', 'binding_selects', 'segment_size', 'read_topic_by_segment',
        'clock_tolerance', 'retention_holds', 'releasable_of', 'retention_held',
        'filter_probe', 'as_condition_events', 'filters_of_group', 'match_filters', 'is_out_of_time', 'merge_matches', 'catch_up', 'resume_filter',
        'settle_matched', 'keep_alive', 'directed_matches', 'undirected', 'release_reading', 'stopped_subscriptions',
        'last_event_position', 'last_common_event', 'refuse_lost_position',
        'skip_stride', 'skip_unbound_events'
    ];
    missing text;
    opened record;
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
    for opened in
        select p.oid::regprocedure as name, r.rolname
        from (values ('headwater_publisher', publishing), ('headwater_consumer', consuming)) as g (role_name, functions)
        join pg_roles r on r.rolname = g.role_name
        join pg_proc p on p.proname = any (g.functions)
        join pg_namespace n on n.oid = p.pronamespace and n.nspname in ('headwater', 'headwater_condition')
    loop
        execute format('grant execute on function %s to %I', opened.name, opened.rolname);
    end loop;

    if exists (select from pg_roles r where r.rolname = 'headwater_publisher') then
        grant usage on schema headwater to headwater_publisher;
        grant select on
            headwater.topic, headwater.setting, headwater.segment, headwater.migration, headwater.installed,
            headwater.scheduled, headwater.periodic
            to headwater_publisher;
        grant select on sequence headwater.position, headwater.epoch_register to headwater_publisher;
        -- A plain INSERT and a COPY go to the view, which publishes row by row: nothing but our functions may choose
        -- positions, offsets or topics.
        grant insert on headwater.new_event to headwater_publisher;
        grant select, insert, delete on headwater.staged to headwater_publisher;
        grant select, insert, update, delete on headwater.writer_epoch to headwater_publisher;
    end if;

    if exists (select from pg_roles r where r.rolname = 'headwater_consumer') then
        grant usage on schema headwater to headwater_consumer;
        grant select on
            headwater.topic, headwater.event, headwater.event_mark, headwater.field_index, headwater.field_index_overview, headwater.setting, headwater.segment, headwater.migration,
            headwater.installed, headwater.topic_overview, headwater.cursor_lag, headwater.publisher_in_flight, headwater.publisher_lock,
            headwater.delivery, headwater.group_overview, headwater.group_lag, headwater.pipeline_status, headwater.archive_overview
            to headwater_consumer;
        grant select, insert, update, delete on
            headwater.cursor, headwater.consumer_group, headwater.binding, headwater.ledger, headwater.group_progress,
            headwater.redelivery, headwater.dead_letter,
            headwater.condition, headwater.subscription, headwater.reading, headwater.subscription_retry,
            headwater.projection, headwater.pipeline, headwater.pipeline_snapshot, headwater.pipeline_batch, headwater.archive, headwater.archive_start, headwater.replay,
            headwater.store_snapshot,
            headwater.queue_activity, headwater.filter_stop
            to headwater_consumer;
        grant select on sequence
            headwater.position, headwater.settled_register, headwater.epoch_register, headwater.epoch_start
            to headwater_consumer;
        grant select on headwater.epoch, headwater.epoch_overview to headwater_consumer;
        grant select on headwater.clock_step to headwater_consumer;
        grant select on headwater.stopped_filter to headwater_consumer;
        grant usage on sequence headwater.lease_token, headwater.pipeline_generation to headwater_consumer;
        if to_regnamespace('headwater_condition') is not null then
            grant usage on schema headwater_condition to headwater_consumer;
        end if;
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
        grant insert, update on headwater.field_index to headwater_admin;
        grant update on headwater.setting to headwater_admin;
        grant delete on headwater.scheduled to headwater_admin;
        grant execute on all functions in schema headwater to headwater_admin;
        -- A broker of the Kafka door runs as an administrator: it makes topics for its clients.
        grant usage on sequence headwater.kafka_incarnation, headwater.kafka_producer_id to headwater_admin;
        grant insert, update, delete on
            headwater.kafka_topic, headwater.kafka_lane, headwater.kafka_broker, headwater.kafka_producer_lane, headwater.kafka_group,
            headwater.kafka_offset, headwater.kafka_transaction, headwater.kafka_staged, headwater.kafka_staged_offset,
            headwater.account, headwater.permission, headwater.api_key, headwater.kept_answer
            to headwater_admin;
        -- What a webhook sends leaves the house, and its secrets are kept as they are: administrators only.
        grant insert, update, delete on headwater.webhook, headwater.webhook_pace to headwater_admin;
        grant insert, update, delete on
            headwater.schema_registry, headwater.registered_schema, headwater.schema_subject, headwater.schema_version,
            headwater.schema_reference, headwater.topic_schema
            to headwater_admin;
    end if;
end;
$$;
