-- Metrics: the log in figures, as rows of name, labels and value. `observability/metrics.py` describes each of them.
--
-- All queries are bounded: at most `most` objects of a kind are listed, and at most some thousand events of a topic or
-- queue are counted. Frequent calls by many clients are therefore safe.

-- The log as a whole: its head, its publishers, its size.
create or replace function headwater_internal.metrics_of_log()
returns table (name text, labels text[], value float8)
language sql
volatile
begin atomic
    with
    state as (select s.head, s.stable from headwater.log_state() as s),
    publishers as (
        select p.pid, coalesce(extract(epoch from p.age), 0) as age, row_number() over (order by p.age desc nulls last) as rank
        from headwater.publisher_in_flight p
    ),
    segments as (
        select
            count(*) filter (where s.closed_at is not null) as closed,
            count(*) filter (where s.lo > state.head) as ahead,
            count(*) filter (where s.closed_at is null and s.lo <= state.head) as open,
            min(s.opened_at) as oldest,
            max(s.hi - state.head - 1) filter (where state.head + 1 >= s.lo and state.head + 1 < s.hi) as free
        from headwater_internal.segment s
        cross join state
    )
    select 'headwater_log_head_position', '{}'::text[], head::float8 from state
    union all select 'headwater_log_stable_position', '{}', stable from state
    union all
    select 'headwater_log_positions_total', '{}', headwater_internal.positions_between(0, state.head) + u.dropped_positions
    from state cross join headwater_internal.maintenance_state u
    union all select 'headwater_publishers_in_flight', '{}', count(*) from publishers
    union all select 'headwater_oldest_publisher_age_seconds', '{}', coalesce(max(age), 0) from publishers
    union all select 'headwater_oldest_publisher_pid', '{}', coalesce(max(pid) filter (where rank = 1), 0) from publishers
    union all select 'headwater_segments', '{closed}', closed from segments
    union all select 'headwater_segments', '{open}', open from segments
    union all select 'headwater_segments', '{ahead}', ahead from segments
    union all select 'headwater_open_segment_free_positions', '{}', coalesce(free, 0) from segments
    union all
    select 'headwater_oldest_segment_age_seconds', '{}', coalesce(extract(epoch from clock_timestamp() - oldest), 0)
    from segments
    union all
    select 'headwater_log_bytes', '{}', coalesce(sum(pg_total_relation_size(i.inhrelid)), 0)
    from pg_inherits i
    where i.inhparent = 'headwater_internal.event'::regclass
    union all
    select 'headwater_retention_held_positions', '{}', headwater_internal.positions_between(headwater_internal.releasable(), state.stable)
    from state
    union all
    select 'headwater_maintenance_age_seconds', '{}',
        greatest(extract(epoch from clock_timestamp() - u.maintained_at), 0)
    from headwater_internal.maintenance_state u
    where u.maintained_at is not null
    union all select 'headwater_clock_steps_total', '{}', coalesce(max(c.id), 0) from headwater_internal.clock_step c
    union all
    select
        'headwater_scheduled_overdue_seconds', '{}',
        coalesce(greatest(extract(epoch from clock_timestamp() - min(s.due_at)), 0), 0)
    from headwater_internal.scheduled s;
end;

-- Topics: the last position of each and its publish rate, from the last 50 events or the last minute.
create or replace function headwater_internal.metrics_of_topics(most integer)
returns table (name text, labels text[], value float8)
language sql
volatile
begin atomic
    with shown as (
        select t.name, l.last_position, l.last_published, l.recent, l.since
        from (
            select o.id, o.name from headwater_internal.topic o where o.deleted_at is null order by o.name limit most
        ) as t
        cross join lateral (
            select
                max(e.position) as last_position,
                max(e.published_at) as last_published,
                count(*) filter (where e.published_at > clock_timestamp() - interval '1 minute') as recent,
                min(e.published_at) filter (where e.published_at > clock_timestamp() - interval '1 minute') as since
            from (
                select o.position, o.published_at
                from headwater_internal.event o
                where o.topic_id = t.id
                order by o.position desc
                limit 50
            ) as e
        ) as l
    )
    select 'headwater_topics', '{}'::text[], count(*)::float8 from headwater_internal.topic t where t.deleted_at is null
    union all select 'headwater_topic_last_position', array[s.name], coalesce(s.last_position, 0) from shown s
    union all
    select 'headwater_topic_silent_seconds', array[s.name], greatest(extract(epoch from clock_timestamp() - s.last_published), 0)
    from shown s
    where s.last_published is not null
    union all
    select
        'headwater_topic_events_per_second', array[s.name],
        case
            when s.recent < 50 then s.recent / 60.0
            else s.recent / greatest(extract(epoch from clock_timestamp() - s.since), 0.001)
        end
    from shown s;
end;

-- Queues and queues of SQL subscriptions: lag, leased events, retries, dead letters.
create or replace function headwater_internal.metrics_of_queues(most integer)
returns table (name text, labels text[], value float8)
language sql
volatile
begin atomic
    select 'headwater_queues', '{}'::text[], count(*)::float8 from headwater_internal.queue
    union all
    select m.name, array[o.name], m.value
    from headwater_internal.queue_overviews(max_queues => most) as o
    cross join lateral (
        values
            ('headwater_queue_lag_events', o.lag_events::float8),
            ('headwater_queue_lag_is_more', o.lag_is_more::integer::float8),
            ('headwater_queue_lag_seconds', coalesce(o.lag_seconds, 0)),
            ('headwater_queue_unfinished_seconds', coalesce(o.unfinished_seconds, 0)),
            ('headwater_queue_leased_events', o.processing::float8),
            ('headwater_queue_open_leases', o.open_leases::float8),
            ('headwater_queue_redeliveries', o.redeliveries::float8),
            ('headwater_queue_dead_letters', o.dead::float8),
            ('headwater_queue_claimed_events_total', o.claimed::float8),
            ('headwater_queue_paused', o.paused::integer::float8),
            ('headwater_queue_has_workers', (o.state not in ('no_workers', 'no_reader'))::integer::float8),
            ('headwater_queue_stalled', (o.state = 'stalled')::integer::float8)
    ) as m (name, value);
end;

-- Cursors: the lag of each.
create or replace function headwater_internal.metrics_of_cursors(most integer)
returns table (name text, labels text[], value float8)
language sql
volatile
begin atomic
    select 'headwater_cursors', '{}'::text[], count(*)::float8 from headwater_internal.cursor
    union all
    select m.name, array[c.name], m.value
    from headwater_internal.cursor_lags(array(select o.name from headwater_internal.cursor o order by o.name limit most)) as c
    cross join lateral (
        values
            ('headwater_cursor_lag_events', c.lag_events::float8),
            ('headwater_cursor_lag_is_more', c.lag_is_more::integer::float8),
            ('headwater_cursor_lag_seconds', coalesce(c.lag_seconds, 0))
    ) as m (name, value);
end;

-- Pipelines, replication slots and Kafka consumer groups: the consumers outside of the log.
create or replace function headwater_internal.metrics_of_servers(most integer)
returns table (name text, labels text[], value float8)
language sql
volatile
begin atomic
    with
    pipelines as (select p.* from headwater.pipeline_status p order by p.name limit most),
    kafka as (
        select o.group_name, t.name as topic_name, o.lag
        from (
            select
                k.group_name, k.topic_id,
                sum((headwater_internal.kafka_lag(k.topic_id, k.partition, k.committed_offset)).events) as lag
            from headwater_internal.kafka_offset k
            join headwater_internal.topic l on l.id = k.topic_id and l.deleted_at is null
            group by k.group_name, k.topic_id
            order by k.group_name, k.topic_id
            limit most
        ) as o
        join headwater_internal.topic t on t.id = o.topic_id
    )
    select 'headwater_pipeline_running', array[p.name], (p.state in ('running', 'failing', 'stopping'))::integer::float8
    from pipelines p
    union all select 'headwater_pipeline_failed', array[p.name], (p.state in ('failed', 'lost'))::integer::float8 from pipelines p
    union all
    select 'headwater_pipeline_behind', array[p.name, p.source], greatest(p.behind, 0)
    from pipelines p
    where p.behind is not null
    union all
    select 'headwater_pipeline_behind_is_more', array[p.name, p.source], p.behind_is_more::integer::float8 from pipelines p
    union all select 'headwater_pipeline_rows_total', array[p.name], p.rows from pipelines p
    union all select 'headwater_pipeline_batches_total', array[p.name], p.batches from pipelines p
    union all select 'headwater_pipeline_failures', array[p.name], p.failures from pipelines p
    union all
    select 'headwater_pipeline_silent_seconds', array[p.name], extract(epoch from clock_timestamp() - p.last_batch_at)
    from pipelines p
    where p.last_batch_at is not null
    union all
    select
        'headwater_slot_lag_bytes', array[s.slot_name::text],
        pg_wal_lsn_diff(pg_current_wal_lsn(), coalesce(s.confirmed_flush_lsn, s.restart_lsn))
    from pg_replication_slots s
    where coalesce(s.confirmed_flush_lsn, s.restart_lsn) is not null
    union all
    select 'headwater_slot_active', array[s.slot_name::text], s.active::integer from pg_replication_slots s
    union all select 'headwater_kafka_group_lag_events', array[k.group_name, k.topic_name], k.lag from kafka k;
end;

-- All metrics, for at most `most` topics, queues, cursors, pipelines and pairs of a Kafka consumer group and a topic.
create or replace function headwater.metrics(most integer default 200)
returns table (name text, labels text[], value float8)
language sql
volatile
security definer
set search_path = pg_catalog, pg_temp
begin atomic
    select m.name, m.labels, m.value from headwater_internal.metrics_of_log() as m
    union all
    select m.name, m.labels, m.value from headwater_internal.metrics_of_topics(most) as m
    union all
    select m.name, m.labels, m.value from headwater_internal.metrics_of_queues(most) as m
    union all
    select m.name, m.labels, m.value from headwater_internal.metrics_of_cursors(most) as m
    union all
    select m.name, m.labels, m.value from headwater_internal.metrics_of_servers(most) as m;
end;

-- The health of the log: whether this is a primary that accepts writes, how long ago maintenance ran, how many
-- positions can be assigned before publishing fails, and since when the oldest publisher is open.
create or replace function headwater_internal.log_health(
    out primary_server boolean,
    out writable boolean,
    out maintained_seconds_ago float8,
    out positions_left bigint,
    out oldest_publisher_pid integer,
    out oldest_publisher_seconds float8,
    out unstable bigint
)
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    primary_server := not pg_is_in_recovery();
    writable := primary_server and current_setting('default_transaction_read_only') = 'off';
    select extract(epoch from clock_timestamp() - u.maintained_at) into maintained_seconds_ago from headwater_internal.maintenance_state u;
    if not primary_server then
        return;
    end if;
    select coalesce(max(s.hi), 0) - headwater.head() - 1 into positions_left from headwater_internal.segment s;
    select p.pid, extract(epoch from p.age)
    into oldest_publisher_pid, oldest_publisher_seconds
    from headwater.publisher_in_flight p
    order by p.age desc nulls last
    limit 1;
    select s.head - s.stable into unstable from headwater.log_state() as s;
end;
$$;
