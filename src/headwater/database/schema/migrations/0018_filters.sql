-- SQL subscriptions: found by one index whatever the statistics say; a filter that stopped, and where.

alter table headwater.condition
    -- What failed last is kept in last_error; this is when, and how often it happened.
    add column last_error_at timestamptz,
    add column errors bigint not null default 0,
    drop column broken_at;

-- Params under the id of their group: one key of the index names both. Must be immutable for a generated column.
create function headwater.filter_probe(group_id integer, params jsonb)
returns jsonb
language plpgsql
immutable
as $$
begin
    return jsonb_build_object(group_id::text, params);
end;
$$;

alter table headwater.subscription
    add column probe jsonb generated always as (headwater.filter_probe(group_id, params)) stored,
    -- Every reader of the group has them in memory. What was there before stays.
    add constraint "params are at most 1 MiB" check (octet_length(params::text) <= 1048576) not valid;
drop index headwater.subscription_params;
create index subscription_probe on headwater.subscription using gin (probe jsonb_path_ops) with (fastupdate = off);

alter table headwater.reading
    -- Look at this many events at most, after matching more ran out of time. 0: one event, filter by filter.
    add column max_events integer check (max_events >= 0),
    -- While filters that were resumed catch up: up to here the other filters have had their events.
    add column others_done_to bigint check (others_done_to >= 0);

-- Filters that are behind their group: one event took them too long. Nothing is passed over: when a filter is resumed,
-- the group goes back to `position` and reads up to where it was for this filter alone.
create table headwater.filter_stop (
    group_id     integer     not null references headwater.consumer_group (id) on delete cascade,
    condition_id integer     not null references headwater.condition (id) on delete cascade,
    -- The filter has had every event up to here.
    position     bigint      not null check (position >= 0),
    -- Events up to here are never matched again, also not while others catch up.
    done_to      bigint      not null default 0 check (done_to >= 0),
    -- Null: it was resumed, and waits for its turn to catch up or does so.
    stopped_at   timestamptz,
    catching_up  boolean     not null default false,
    error        text        check (length(error) <= 10000),
    primary key (group_id, condition_id),
    constraint "a filter that catches up is not stopped" check (not catching_up or stopped_at is null)
);
create index filter_stop_condition on headwater.filter_stop (condition_id);
