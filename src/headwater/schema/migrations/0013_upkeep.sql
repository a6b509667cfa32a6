-- What upkeep notes of itself: when it ran last, and how much of the log it took away.

create table headwater.upkeep (
    only_row          boolean     primary key default true check (only_row),
    maintained_at     timestamptz,
    -- Positions that were drawn in segments that are dropped.
    dropped_positions bigint      not null default 0 check (dropped_positions >= 0)
) with (fillfactor = 20);
insert into headwater.upkeep default values;
