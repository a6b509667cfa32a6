-- What upkeep and upgrades note of themselves.

create table headwater.upkeep (
    only_row          boolean     primary key default true check (only_row),
    maintained_at     timestamptz,
    -- Positions that were drawn in segments that are dropped.
    dropped_positions bigint      not null default 0 check (dropped_positions >= 0)
) with (fillfactor = 20);
insert into headwater.upkeep default values;

-- Functions that the installed version no longer has. Programs of the version before may still call them.
create table headwater.retired_function (
    signature  text primary key,
    -- The version whose upgrade found that it has no use for it. The upgrade to another drops it.
    retired_by text not null
);
