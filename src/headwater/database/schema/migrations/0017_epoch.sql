-- Epochs: which history of the log a position belongs to. See functions/epoch.sql.

-- The epochs of this log, oldest first. Several rows of one epoch are equal and stand for one: transactions that find
-- no committed row each write their own, so that none waits for another.
create table headwater.epoch (
    number      integer     not null check (number >= 1),
    -- The last position that this epoch shares with the one before it: what came after it there may be gone here, and
    -- its positions may be issued again.
    began_after bigint      not null check (began_after >= 0),
    began_at    timestamptz not null default clock_timestamp()
);
create index epoch_number on headwater.epoch (number);

-- What is known of the present epoch without reading a row. Unlogged: Postgres empties both when it recovers from a
-- crash, when a standby is promoted and when a backup is restored, and keeps them over a clean restart. That is the
-- definition of an epoch.
create unlogged sequence headwater.epoch_register as bigint minvalue 0 start 0 cache 1;
create unlogged sequence headwater.epoch_start as bigint minvalue 0 start 0 cache 1;

alter table headwater.cursor add column epoch integer;
comment on column headwater.cursor.epoch is 'the epoch in which the position was saved; null: before there were epochs';

alter table headwater.setting add column max_publisher_seconds float8
    constraint "a publisher may stay open for 1 second to 30 days" check (max_publisher_seconds between 1 and 2592000);
comment on column headwater.setting.max_publisher_seconds is
    'ends a publishing transaction that stays open longer; null: never';

-- Topics that only Headwater itself writes to, as that of the audit.
alter table headwater.topic add column reserved boolean not null generated always as (name = 'headwater.audit') stored;

-- Functions whose parameters have changed.
drop function if exists headwater.advertise_publisher();
drop function if exists headwater.log_state();
drop function if exists headwater.advance_cursor(text, bigint, bigint);
drop function if exists headwater.set_cursor(text, bigint, text[], boolean);
drop function if exists headwater.read_topic(text, bigint, bigint, integer, bigint, bigint);
drop function if exists headwater.page_of_topic(text, bigint, bigint, integer, bigint, bigint);
drop function if exists headwater.read_settled(text[], bigint, bigint, integer, bigint, bigint);
drop function if exists headwater.read(text[], bigint, integer, bigint, bigint, boolean);
drop function if exists headwater.refresh_settled();
drop view if exists headwater.publisher_in_flight;
-- What our own functions insert is advertised by them: the trigger is made again, for the others, with the functions.
drop trigger if exists advertise on headwater.event;
