-- Running pipelines: one runner at a time, how far it is, and stopping it from anywhere.

-- The right to run a pipeline, for a while. `token` is null if another runner has it, or if it is stopped and
-- `start` does not say to start it again.
create or replace function headwater.claim_pipeline(
    name text,
    runner text,
    lease interval,
    source text,
    definition jsonb,
    start boolean default false,
    out token bigint,
    out place bigint,
    out generation bigint,
    out held_by text,
    out stopped boolean,
    out rewound_in integer
)
language plpgsql
as $$
declare
    found_pipeline headwater.pipeline;
begin
    insert into headwater.pipeline (name, source, definition)
    values (claim_pipeline.name, claim_pipeline.source, claim_pipeline.definition)
    on conflict on constraint pipeline_pkey do nothing;
    select * into found_pipeline from headwater.pipeline p where p.name = claim_pipeline.name for update;
    if found_pipeline.source <> claim_pipeline.source and found_pipeline.place is not null then
        raise exception 'pipeline "%" read from % before, and its place means nothing to %',
            name, found_pipeline.source, claim_pipeline.source
            using errcode = 'HW002',
                  detail = json_build_object('pipeline', name)::text,
                  hint = 'Give it another name, or run `headwater pipeline reset` first.';
    end if;
    place := found_pipeline.place;
    generation := found_pipeline.generation;
    rewound_in := found_pipeline.rewound_in;
    if start and found_pipeline.stopped then
        update headwater.pipeline p set stopped = false where p.name = claim_pipeline.name;
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
    update headwater.pipeline p
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

-- The right to run a pipeline, taken from whoever has it: for the moment in which a rebuilt table takes its place.
create or replace function headwater.take_pipeline(name text, runner text, lease interval)
returns bigint
language plpgsql
as $$
declare
    taken bigint;
begin
    perform headwater.find_pipeline(name);
    update headwater.pipeline p
    set runner = take_pipeline.runner, token = p.token + 1, leased_until = clock_timestamp() + lease,
        leased_at = clock_timestamp()
    where p.name = take_pipeline.name
    returning p.token into taken;
    return taken;
end;
$$;

-- HW006: another runner has the pipeline now.
create or replace function headwater.refuse_lost_pipeline(name text)
returns void
language plpgsql
as $$
begin
    raise exception 'pipeline "%" is run by another, or was reset', name
        using errcode = 'HW006',
              detail = json_build_object('pipeline', name)::text,
              hint = 'The lease ran out. What this runner has not recorded, the other one does again.';
end;
$$;

-- Keep the right to run it. Says whether somebody asked for it to stop.
create or replace function headwater.renew_pipeline(name text, token bigint, lease interval)
returns boolean
language plpgsql
as $$
declare
    stop_wanted boolean;
begin
    update headwater.pipeline p
    set leased_until = clock_timestamp() + lease, leased_at = clock_timestamp()
    where p.name = renew_pipeline.name and p.token = renew_pipeline.token and p.runner is not null
    returning p.stopped into stop_wanted;
    if not found then
        perform headwater.refuse_lost_pipeline(name);
    end if;
    return stop_wanted;
end;
$$;

-- Keep what is told of a batch, or of a try that failed, and the last 20 of the pipeline.
create or replace function headwater.note_batch(name text, row_count bigint, details jsonb, error text)
returns void
language sql
begin atomic
    insert into headwater.pipeline_batch (pipeline, rows, details, error)
    values (note_batch.name, row_count, note_batch.details, note_batch.error);
    delete from headwater.pipeline_batch b
    where
        b.pipeline = note_batch.name
        and b.number <= (
            select o.number
            from headwater.pipeline_batch o
            where o.pipeline = note_batch.name
            order by o.number desc
            offset 20
            limit 1
        );
end;

-- HW021 unless everything up to a position of an epoch is in the present history of the log. Null: it has no epoch.
create or replace function headwater.refuse_lost_position(epoch integer, at_position bigint)
returns void
language plpgsql
volatile
as $$
begin
    if headwater.common_position(refuse_lost_position.epoch, at_position) < at_position then
        perform headwater.refuse_other_epoch(refuse_lost_position.epoch, at_position);
    end if;
end;
$$;

-- A batch is durable in all sinks. The place never goes back. With the epoch in which the batch was read, HW021 if the
-- log has lost what was in it: the place would stand beyond the head.
create or replace function headwater.record_batch(
    name text, token bigint, place bigint, row_count bigint, details jsonb, epoch integer default null
)
returns void
language plpgsql
as $$
begin
    perform headwater.refuse_lost_position(record_batch.epoch, record_batch.place);
    update headwater.pipeline p
    set place = greatest(p.place, record_batch.place),
        batches = p.batches + 1,
        rows = p.rows + row_count,
        last_batch = details,
        last_batch_at = clock_timestamp(),
        failures = 0
    where p.name = record_batch.name and p.token = record_batch.token and p.runner is not null;
    if not found then
        perform headwater.refuse_lost_pipeline(name);
    end if;
    perform headwater.note_batch(name, row_count, details, null);
end;
$$;

-- Begin with a new checkpoint, since the old one is of a time before another machine took over, or of a history that the
-- log has lost: then `rewound_in` is the epoch in which that was found out.
create or replace function headwater.renew_generation(name text, token bigint, rewound_in integer default null)
returns bigint
language plpgsql
as $$
declare
    drawn bigint;
begin
    update headwater.pipeline p
    set generation = nextval('headwater.pipeline_generation'),
        rewound_in = coalesce(renew_generation.rewound_in, p.rewound_in)
    where p.name = renew_generation.name and p.token = renew_generation.token and p.runner is not null
    returning p.generation into drawn;
    if not found then
        perform headwater.refuse_lost_pipeline(name);
    end if;
    return drawn;
end;
$$;

-- The run of a pipeline failed, and is tried again. Says how often in a row.
create or replace function headwater.record_failure(name text, token bigint, error text)
returns integer
language plpgsql
as $$
declare
    in_a_row integer;
begin
    update headwater.pipeline p
    set failures = p.failures + 1, last_error = left(error, 4000), last_error_at = clock_timestamp()
    where p.name = record_failure.name and p.token = record_failure.token
    returning p.failures into in_a_row;
    if found then
        perform headwater.note_batch(name, 0, null, left(error, 4000));
    end if;
    return in_a_row;
end;
$$;

-- Give the right back, so that another can have it at once. Too late is no harm.
create or replace function headwater.release_pipeline(name text, token bigint)
returns void
language sql
begin atomic
    update headwater.pipeline p
    set runner = null, leased_until = null
    where p.name = release_pipeline.name and p.token = release_pipeline.token;
end;

create or replace function headwater.find_pipeline(name text)
returns headwater.pipeline
language plpgsql
stable
as $$
declare
    found_pipeline headwater.pipeline;
begin
    select * into found_pipeline from headwater.pipeline p where p.name = find_pipeline.name;
    if not found then
        raise exception 'pipeline "%" was never run on this database', name
            using errcode = 'HW017', detail = json_build_object('pipeline', name)::text,
                  hint = 'See `headwater pipeline status`.';
    end if;
    return found_pipeline;
end;
$$;

-- Ask whoever runs it to stop after its batch, and others not to take over. True if somebody runs it now.
create or replace function headwater.stop_pipeline(name text)
returns boolean
language plpgsql
as $$
begin
    perform headwater.find_pipeline(name);
    update headwater.pipeline p set stopped = true where p.name = stop_pipeline.name;
    return (
        select coalesce(p.leased_until > clock_timestamp(), false)
        from headwater.pipeline p where p.name = stop_pipeline.name
    );
end;
$$;

-- Let a pipeline begin again at a place; null: where a new one would. Only while nobody runs it: HW018. With
-- `forget_written` its writes to topics count as never made, and are made again.
create or replace function headwater.reset_pipeline(name text, place bigint default null, forget_written boolean default false)
returns void
language plpgsql
as $$
declare
    found_pipeline headwater.pipeline;
begin
    perform headwater.find_pipeline(name);
    select * into found_pipeline from headwater.pipeline p where p.name = reset_pipeline.name for update;
    if found_pipeline.leased_until > clock_timestamp() then
        raise exception 'pipeline "%" is run by % now', name, found_pipeline.runner
            using errcode = 'HW018',
                  detail = json_build_object('pipeline', name, 'runner', found_pipeline.runner)::text,
                  hint = 'Stop it first: headwater pipeline stop.';
    end if;
    -- A new token: whoever ran it before can record nothing any more.
    update headwater.pipeline p
    set place = reset_pipeline.place, generation = nextval('headwater.pipeline_generation'),
        token = p.token + 1, runner = null, leased_until = null,
        batches = 0, rows = 0, last_batch = null, last_batch_at = null,
        failures = 0, last_error = null, last_error_at = null
    where p.name = reset_pipeline.name;
    delete from headwater.pipeline_snapshot s where s.pipeline = reset_pipeline.name;
    delete from headwater.pipeline_batch b where b.pipeline = reset_pipeline.name;
    if forget_written then
        delete from headwater.writer_epoch w where starts_with(w.writer, 'pipeline-' || reset_pipeline.name || '/');
    end if;
end;
$$;

-- Forget a pipeline altogether. True if it was there.
create or replace function headwater.delete_pipeline(name text)
returns boolean
language plpgsql
as $$
begin
    perform headwater.reset_pipeline(name, null, true);
    perform headwater.forget_projections(name);
    delete from headwater.pipeline p where p.name = delete_pipeline.name;
    return found;
end;
$$;

-- The name under which a sink of a pipeline writes to topics.
create or replace function headwater.pipeline_writer(name text, sink_number integer)
returns text
language sql
immutable
return 'pipeline-' || name || '/' || sink_number;

-- Note that a table was loaded whole, as it was at a snapshot.
create or replace function headwater.record_snapshot(
    name text, token bigint, table_name text, visible text, lsn bigint, row_count bigint
)
returns void
language plpgsql
as $$
begin
    perform from headwater.pipeline p
    where p.name = record_snapshot.name and p.token = record_snapshot.token and p.runner is not null
    for update;
    if not found then
        perform headwater.refuse_lost_pipeline(name);
    end if;
    insert into headwater.pipeline_snapshot as s (pipeline, table_name, visible, lsn, rows)
    values (record_snapshot.name, record_snapshot.table_name, record_snapshot.visible, record_snapshot.lsn, row_count)
    on conflict on constraint pipeline_snapshot_pkey do update
        set visible = excluded.visible, lsn = excluded.lsn, rows = excluded.rows, taken_at = excluded.taken_at;
end;
$$;

-- Every pipeline that was ever run here, as people and metrics ask for it. `behind` counts events of its own topics after
-- its place, up to 1000 (`behind_is_more`: there are more), or bytes of the server's log; null: its place is not known yet.
--   running, failing, stopping  a runner holds it; failing: its last try failed
--   failed   its last run ended with an error, and nobody runs it
--   lost     its runner is gone without a word
--   stopped  until somebody starts it again
--   idle     its last run ended well, or it was reset
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
    p.place,
    case
        when p.source = 'log' then l.events
        when not pg_is_in_recovery() then pg_wal_lsn_diff(pg_current_wal_flush_lsn(), '0/0')::bigint - p.place
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
from headwater.pipeline p
left join lateral headwater.lag_of(
    headwater.topics_behind(
        case jsonb_typeof(p.definition #> '{from,log,topics}')
            when 'string' then array[p.definition #>> '{from,log,topics}']
            when 'array' then array(select jsonb_array_elements_text(p.definition #> '{from,log,topics}'))
        end,
        p.place
    ),
    p.place
) as l on p.source = 'log' and p.place is not null;
