-- Epochs: which history of the log a position belongs to. See functions/epoch.sql.

-- The epochs of this log, oldest first. Several rows of one epoch are equal and stand for one: transactions that find
-- no committed row each write their own, so that none waits for another.
create table headwater_internal.epoch (
    number      integer     not null check (number >= 1),
    -- The last position that this epoch shares with the one before it: what came after it there may be gone here, and
    -- its positions may be issued again.
    began_after bigint      not null check (began_after >= 0),
    began_at    timestamptz not null default clock_timestamp()
);
create index epoch_number on headwater_internal.epoch (number);

-- What is known of the present epoch without reading a row. Unlogged: Postgres empties both when it recovers from a
-- crash, when a standby is promoted and when a backup is restored, and keeps them over a clean restart. That is the
-- definition of an epoch.
create unlogged sequence headwater_internal.epoch_register as bigint minvalue 0 start 0 cache 1;
create unlogged sequence headwater_internal.epoch_start as bigint minvalue 0 start 0 cache 1;
