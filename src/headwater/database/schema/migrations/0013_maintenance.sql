-- What maintenance and upgrades note of themselves.

create table headwater_internal.maintenance_state (
    only_row          boolean     primary key default true check (only_row),
    maintained_at     timestamptz,
    -- Positions that were assigned in segments that are dropped.
    dropped_positions bigint      not null default 0 check (dropped_positions >= 0)
) with (fillfactor = 20);
insert into headwater_internal.maintenance_state default values;

-- Functions that the installed version no longer has. Programs of the version before may still call them.
create table headwater_internal.retired_function (
    signature  text primary key,
    -- The version whose upgrade found that it has no use for it. The upgrade to another drops it.
    retired_by text not null
);

-- Steps of the database clock that maintenance has seen, the newest 100.
create table headwater_internal.clock_step (
    id       bigint           generated always as identity primary key,
    -- By the clock after the step.
    seen_at  timestamptz      not null default clock_timestamp(),
    -- The head of the log when it was seen.
    position bigint           not null,
    -- Below zero: the clock went back by at least that much.
    seconds  double precision not null
);
