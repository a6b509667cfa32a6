-- Running pipelines: one runner at a time, its progress, and stopping it from anywhere. A checkpoint is a
-- position of the log, or an LSN.

-- Acquire the lease to run a pipeline. `token` is null if another runner holds it, or if the pipeline is stopped and
-- `start` is false. HW002 if the pipeline had another source before.
create or replace function headwater_internal.claim_pipeline(
    name text,
    runner text,
    lease interval,
    source text,
    definition jsonb,
    start boolean default false,
    out token bigint,
    out checkpoint bigint,
    out checkpoint_epoch bigint,
    out held_by text,
    out stopped boolean,
    out rewound_in integer
)
language plpgsql
as $$
declare
    found_pipeline headwater_internal.pipeline;
begin
    insert into headwater_internal.pipeline (name, source, definition)
    values (claim_pipeline.name, claim_pipeline.source, claim_pipeline.definition)
    on conflict on constraint pipeline_pkey do nothing;
    select * into found_pipeline from headwater_internal.pipeline p where p.name = claim_pipeline.name for update;
    if found_pipeline.source <> claim_pipeline.source and found_pipeline.checkpoint is not null then
        raise exception 'pipeline "%" read from % before: its checkpoint is not valid for %',
            name, found_pipeline.source, claim_pipeline.source
            using errcode = 'HW002',
                  detail = json_build_object('pipeline', name)::text,
                  hint = 'Use another name, or run `headwater pipeline reset` first.';
    end if;
    checkpoint := found_pipeline.checkpoint;
    checkpoint_epoch := found_pipeline.checkpoint_epoch;
    rewound_in := found_pipeline.rewound_in;
    if start and found_pipeline.stopped then
        update headwater_internal.pipeline p set stopped = false where p.name = claim_pipeline.name;
        found_pipeline.stopped := false;
    end if;
    stopped := found_pipeline.stopped;
    if found_pipeline.leased_until > clock_timestamp() then
        held_by := found_pipeline.runner;
        return;
    end if;
    if stopped then
        return;
    end if;
    update headwater_internal.pipeline p
    set source = claim_pipeline.source,
        definition = claim_pipeline.definition,
        runner = claim_pipeline.runner,
        token = p.token + 1,
        leased_until = clock_timestamp() + lease,
        leased_at = clock_timestamp(),
        started_at = clock_timestamp()
    where p.name = claim_pipeline.name
    returning p.token into claim_pipeline.token;
end;
$$;

-- Take over the lease of a pipeline from its current runner, while a rebuilt table replaces the live one.
create or replace function headwater_internal.take_pipeline(name text, runner text, lease interval)
returns bigint
language plpgsql
as $$
declare
    taken bigint;
begin
    perform headwater_internal.find_pipeline(name);
    update headwater_internal.pipeline p
    set runner = take_pipeline.runner, token = p.token + 1, leased_until = clock_timestamp() + lease,
        leased_at = clock_timestamp()
    where p.name = take_pipeline.name
    returning p.token into taken;
    return taken;
end;
$$;

-- Raise HW006: another runner holds the pipeline.
create or replace function headwater_internal.refuse_lost_pipeline(name text)
returns void
language plpgsql
as $$
begin
    raise exception 'pipeline "%" has another runner, or was reset', name
        using errcode = 'HW006',
              detail = json_build_object('pipeline', name)::text,
              hint = 'The lease has expired. The new runner repeats every batch that this one has not recorded.';
end;
$$;

-- Extend the lease of a pipeline. Returns true if the pipeline was requested to stop. HW006 if the lease is lost.
create or replace function headwater_internal.renew_pipeline(name text, token bigint, lease interval)
returns boolean
language plpgsql
as $$
declare
    stop_wanted boolean;
begin
    update headwater_internal.pipeline p
    set leased_until = clock_timestamp() + lease, leased_at = clock_timestamp()
    where p.name = renew_pipeline.name and p.token = renew_pipeline.token and p.runner is not null
    returning p.stopped into stop_wanted;
    if not found then
        perform headwater_internal.refuse_lost_pipeline(name);
    end if;
    return stop_wanted;
end;
$$;

-- Record the details of a batch, or of a failed attempt; the last 20 of a pipeline are kept.
create or replace function headwater_internal.note_batch(name text, row_count bigint, details jsonb, error text)
returns void
language sql
begin atomic
    insert into headwater_internal.pipeline_batch (pipeline, rows, details, error)
    values (note_batch.name, row_count, note_batch.details, note_batch.error);
    delete from headwater_internal.pipeline_batch b
    where
        b.pipeline = note_batch.name
        and b.number <= (
            select o.number
            from headwater_internal.pipeline_batch o
            where o.pipeline = note_batch.name
            order by o.number desc
            offset 20
            limit 1
        );
end;

-- HW021 unless everything up to a position of an epoch belongs to the current history of the log. Null: the position
-- has no epoch.
create or replace function headwater_internal.refuse_lost_position(epoch integer, at_position bigint)
returns void
language plpgsql
volatile
as $$
begin
    if headwater.common_position(refuse_lost_position.epoch, at_position) < at_position then
        perform headwater_internal.refuse_other_epoch(refuse_lost_position.epoch, at_position);
    end if;
end;
$$;

-- Record that a batch is durable in all sinks. The checkpoint never goes back. With the epoch in which the batch was
-- read, HW021 if the log has lost events of it: the checkpoint would be beyond the head. HW006 if the lease is lost.
create or replace function headwater_internal.record_batch(
    name text, token bigint, checkpoint bigint, row_count bigint, details jsonb, epoch integer default null
)
returns void
language plpgsql
as $$
begin
    perform headwater_internal.refuse_lost_position(record_batch.epoch, record_batch.checkpoint);
    update headwater_internal.pipeline p
    set checkpoint = greatest(p.checkpoint, record_batch.checkpoint),
        batches = p.batches + 1,
        rows = p.rows + row_count,
        last_batch = details,
        last_batch_at = clock_timestamp(),
        failures = 0
    where p.name = record_batch.name and p.token = record_batch.token and p.runner is not null;
    if not found then
        perform headwater_internal.refuse_lost_pipeline(name);
    end if;
    perform headwater_internal.note_batch(name, row_count, details, null);
end;
$$;

-- Start with a new checkpoint epoch, because the old checkpoint predates a takeover by another machine, or belongs to a
-- history that the log has lost: then `rewound_in` is the epoch in which that was detected.
create or replace function headwater_internal.renew_checkpoint_epoch(name text, token bigint, rewound_in integer default null)
returns bigint
language plpgsql
as $$
declare
    new_epoch bigint;
begin
    update headwater_internal.pipeline p
    set checkpoint_epoch = nextval('headwater_internal.checkpoint_epoch'),
        rewound_in = coalesce(renew_checkpoint_epoch.rewound_in, p.rewound_in)
    where p.name = renew_checkpoint_epoch.name and p.token = renew_checkpoint_epoch.token and p.runner is not null
    returning p.checkpoint_epoch into new_epoch;
    if not found then
        perform headwater_internal.refuse_lost_pipeline(name);
    end if;
    return new_epoch;
end;
$$;

-- Record that a run of a pipeline failed and will be retried. Returns the number of consecutive failures.
create or replace function headwater_internal.record_failure(name text, token bigint, error text)
returns integer
language plpgsql
as $$
declare
    in_a_row integer;
begin
    update headwater_internal.pipeline p
    set failures = p.failures + 1, last_error = left(error, 4000), last_error_at = clock_timestamp()
    where p.name = record_failure.name and p.token = record_failure.token
    returning p.failures into in_a_row;
    if found then
        perform headwater_internal.note_batch(name, 0, null, left(error, 4000));
    end if;
    return in_a_row;
end;
$$;

-- Release the lease, so that another runner can acquire it at once. Does nothing if it is already lost.
create or replace function headwater_internal.release_pipeline(name text, token bigint)
returns void
language sql
begin atomic
    update headwater_internal.pipeline p
    set runner = null, leased_until = null
    where p.name = release_pipeline.name and p.token = release_pipeline.token;
end;

-- The pipeline of that name; HW017 if it does not exist.
create or replace function headwater_internal.find_pipeline(name text)
returns headwater_internal.pipeline
language plpgsql
stable
as $$
declare
    found_pipeline headwater_internal.pipeline;
begin
    select * into found_pipeline from headwater_internal.pipeline p where p.name = find_pipeline.name;
    if not found then
        raise exception 'pipeline "%" does not exist: it was never run on this database', name
            using errcode = 'HW017', detail = json_build_object('pipeline', name)::text,
                  hint = 'List pipelines: `headwater pipeline status`.';
    end if;
    return found_pipeline;
end;
$$;

-- Request that the runner of a pipeline stops after its batch, and that no other runner takes over. Returns true if it
-- is running now. HW017 if it does not exist.
create or replace function headwater_internal.stop_pipeline(name text)
returns boolean
language plpgsql
as $$
begin
    perform headwater_internal.find_pipeline(name);
    update headwater_internal.pipeline p set stopped = true where p.name = stop_pipeline.name;
    return (
        select coalesce(p.leased_until > clock_timestamp(), false)
        from headwater_internal.pipeline p where p.name = stop_pipeline.name
    );
end;
$$;

-- Move a pipeline to another checkpoint; null: where a new pipeline would start. With `forget_written`, its writes to
-- topics count as never made and are made again. HW018 if it is running, HW017 if it does not exist.
create or replace function headwater_internal.reset_pipeline(name text, checkpoint bigint default null, forget_written boolean default false)
returns void
language plpgsql
as $$
declare
    found_pipeline headwater_internal.pipeline;
begin
    perform headwater_internal.find_pipeline(name);
    select * into found_pipeline from headwater_internal.pipeline p where p.name = reset_pipeline.name for update;
    if found_pipeline.leased_until > clock_timestamp() then
        raise exception 'pipeline "%" is running on %', name, found_pipeline.runner
            using errcode = 'HW018',
                  detail = json_build_object('pipeline', name, 'runner', found_pipeline.runner)::text,
                  hint = 'Stop it first: headwater pipeline stop.';
    end if;
    -- A new token: a previous runner can no longer record anything.
    update headwater_internal.pipeline p
    set checkpoint = reset_pipeline.checkpoint, checkpoint_epoch = nextval('headwater_internal.checkpoint_epoch'),
        token = p.token + 1, runner = null, leased_until = null,
        batches = 0, rows = 0, last_batch = null, last_batch_at = null,
        failures = 0, last_error = null, last_error_at = null
    where p.name = reset_pipeline.name;
    delete from headwater_internal.pipeline_snapshot s where s.pipeline = reset_pipeline.name;
    delete from headwater_internal.pipeline_batch b where b.pipeline = reset_pipeline.name;
    if forget_written then
        delete from headwater_internal.writer_epoch w where starts_with(w.writer, 'pipeline-' || reset_pipeline.name || '/');
    end if;
end;
$$;

-- Delete a pipeline. Returns true if it existed.
create or replace function headwater_internal.delete_pipeline(name text)
returns boolean
language plpgsql
as $$
begin
    perform headwater_internal.reset_pipeline(name, null, true);
    perform headwater_internal.forget_projections(name);
    delete from headwater_internal.pipeline p where p.name = delete_pipeline.name;
    return found;
end;
$$;

-- The writer name under which a sink of a pipeline writes to topics.
create or replace function headwater_internal.pipeline_writer(name text, sink_number integer)
returns text
language sql
immutable
return 'pipeline-' || name || '/' || sink_number;

-- Record that a table was loaded completely, as of a snapshot.
create or replace function headwater_internal.record_snapshot(
    name text, token bigint, table_name text, visible text, lsn bigint, row_count bigint
)
returns void
language plpgsql
as $$
begin
    perform from headwater_internal.pipeline p
    where p.name = record_snapshot.name and p.token = record_snapshot.token and p.runner is not null
    for update;
    if not found then
        perform headwater_internal.refuse_lost_pipeline(name);
    end if;
    insert into headwater_internal.pipeline_snapshot as s (pipeline, table_name, visible, lsn, rows)
    values (record_snapshot.name, record_snapshot.table_name, record_snapshot.visible, record_snapshot.lsn, row_count)
    on conflict on constraint pipeline_snapshot_pkey do update
        set visible = excluded.visible, lsn = excluded.lsn, rows = excluded.rows, taken_at = excluded.taken_at;
end;
$$;

-- One row for each pipeline that was ever run, with its state and lag. `checkpoint` is a position of the log, or an LSN. `behind` counts
-- events of its own topics after the checkpoint, up to 1000 (`behind_is_more`: there are more), or bytes of WAL; null:
-- there is no checkpoint yet. States:
--   running, failing, stopping: a runner holds it; failing: its last attempt failed;
--   failed: its last run ended with an error, and it has no runner;
--   lost: its runner disappeared without releasing the lease;
--   stopped: until it is started again;
--   idle: its last run ended without an error, or it was reset.
create or replace view headwater.pipeline_status as
select
    p.name,
    p.source,
    case
        when p.leased_until > clock_timestamp() and p.failures > 0 then 'failing'
        when p.leased_until > clock_timestamp() and p.stopped then 'stopping'
        when p.leased_until > clock_timestamp() then 'running'
        when p.leased_until is not null then 'lost'
        when p.stopped then 'stopped'
        when p.failures > 0 then 'failed'
        else 'idle'
    end as state,
    p.runner,
    p.leased_until,
    p.started_at,
    p.checkpoint,
    case
        when p.source = 'log' then l.events
        when not pg_is_in_recovery() then pg_wal_lsn_diff(pg_current_wal_flush_lsn(), '0/0')::bigint - p.checkpoint
    end as behind,
    coalesce(l.is_more, false) as behind_is_more,
    p.batches,
    p.rows,
    p.last_batch,
    p.last_batch_at,
    p.failures,
    p.last_error,
    p.last_error_at,
    p.definition
from headwater_internal.pipeline p
left join lateral headwater_internal.lag_of(
    headwater_internal.topics_behind(
        case jsonb_typeof(p.definition #> '{from,log,topics}')
            when 'string' then array[p.definition #>> '{from,log,topics}']
            when 'array' then array(select jsonb_array_elements_text(p.definition #> '{from,log,topics}'))
        end,
        p.checkpoint
    ),
    p.checkpoint
) as l on p.source = 'log' and p.checkpoint is not null;
