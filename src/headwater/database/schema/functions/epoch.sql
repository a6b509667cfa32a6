-- Epochs: which history of the log a position belongs to.
--
-- A position leaves the database with its readers: in memory, as an SSE id, as a Kafka offset, in a checkpoint. A crash
-- can take back positions that were issued and not yet on disk, and so can the promotion of a standby that lags, or a
-- restore; the sequence then issues the same positions to other events. A reader that goes on from its own position
-- would skip those. So every position outside of this database is kept with the number of its epoch, and a reader that
-- finds another epoch goes back to the last position that both share: headwater.common_position().
--
-- How an epoch begins: the unlogged sequence `epoch_register` is empty exactly when Postgres has recovered from a crash,
-- was promoted or was restored. The first transaction that publishes or reads then notes the head of the log, which no
-- one has moved yet: publishers call this before they draw a position. What must stay true:
--   * the head is noted before the first position of the epoch is issued;
--   * the row in `epoch` is on disk before the first event of the epoch is, or with it: publishers write it in their own
--     transaction until they see a committed one;
--   * numbers only grow, also across a failover to a standby that never saw the last one: hence seconds of the clock.
--
-- The register holds (identity of the sequence << 32) | (number << 1) | recorded. A dump that is restored brings the
-- value along, but the sequence is another one: its identity does not fit, and an epoch begins.

-- What stands for this sequence in its own value.
create or replace function headwater.epoch_identity()
returns bigint
language sql
stable
return 'headwater.epoch_register'::regclass::oid::bigint & 2147483647;

-- Begin the epoch if that has not been done, see to it that its row is written, and return its number.
create or replace function headwater.begin_epoch()
returns integer
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    epoch_lock constant bigint := 29293::bigint << 48;
    identity constant bigint := headwater.epoch_identity();
    register bigint;
    present integer;
begin
    if pg_is_in_recovery() then
        raise exception 'the log is read at READ COMMITTED and on a primary only'
            using errcode = 'HW012', hint = 'Connect to the primary.';
    end if;
    -- Of the session, since it must not be held to the end of a transaction that may stay open.
    perform pg_advisory_lock(epoch_lock);
    begin
        register := pg_sequence_last_value('headwater.epoch_register');
        if register is null or register >> 32 <> identity then
            perform setval('headwater.epoch_start', headwater.head());
            -- What was stable in another history says nothing of this one.
            perform setval('headwater.settled_register', 0);
            register := (identity << 32) | (greatest(
                (select coalesce(max(e.number), 0) + 1 from headwater.epoch e),
                extract(epoch from clock_timestamp() - timestamptz '2026-01-01 00:00:00+00')::bigint
            ) << 1);
            perform setval('headwater.epoch_register', register);
        end if;
    exception
        when others then
            perform pg_advisory_unlock(epoch_lock);
            raise;
    end;
    perform pg_advisory_unlock(epoch_lock);
    present := (register >> 1) & 2147483647;
    if current_setting('transaction_read_only')::boolean then
        return present;
    end if;
    if exists (
        select from headwater.epoch e
        where e.number = present and e.xmin is distinct from pg_current_xact_id_if_assigned()::xid
    ) then
        perform setval('headwater.epoch_register', register | 1);
    elsif not exists (select from headwater.epoch e where e.number = present) then
        insert into headwater.epoch (number, began_after)
        values (present, pg_sequence_last_value('headwater.epoch_start'));
        -- The number leaves with the answer, so it has to be on disk by then.
        perform set_config('synchronous_commit', 'on', true) where current_setting('synchronous_commit') in ('off', 'local');
    end if;
    return present;
end;
$$;

-- The number of the present epoch. Cheap: it reads no row.
create or replace function headwater.current_epoch()
returns integer
language plpgsql
volatile
as $$
declare
    register constant bigint := pg_sequence_last_value('headwater.epoch_register');
begin
    if register & 1 = 1 and register >> 32 = headwater.epoch_identity() then
        return (register >> 1) & 2147483647;
    end if;
    return headwater.begin_epoch();
end;
$$;

-- Where a reader from an epoch goes on: its own position, or the last one that is the same event in that epoch and in
-- the present one. Null stands for the present epoch.
create or replace function headwater.common_position(epoch integer, at_position bigint)
returns bigint
language plpgsql
volatile
as $$
declare
    present constant integer := headwater.current_epoch();
begin
    if common_position.epoch is null or common_position.epoch = present then
        return at_position;
    end if;
    return least(
        at_position,
        (select min(e.began_after) from headwater.epoch e where e.number > common_position.epoch),
        pg_sequence_last_value('headwater.epoch_start')
    );
end;
$$;

-- Refuse a position that is not of the present history: one of another epoch, or one that was never issued.
create or replace function headwater.refuse_other_epoch(epoch integer, at_position bigint)
returns void
language plpgsql
volatile
as $$
declare
    present constant integer := headwater.current_epoch();
    common bigint;
begin
    if refuse_other_epoch.epoch is distinct from present and refuse_other_epoch.epoch is not null then
        common := headwater.common_position(refuse_other_epoch.epoch, at_position);
        raise exception 'position % is of epoch %, and the log is in epoch %: positions after % may have been issued again',
            at_position, refuse_other_epoch.epoch, present, common
            using errcode = 'HW021',
                  detail = json_build_object(
                      'epoch', present, 'requested_epoch', refuse_other_epoch.epoch, 'common_position', common
                  )::text,
                  hint = 'Postgres crashed, failed over or was restored. Read again from the common position.';
    end if;
    if at_position > headwater.head() then
        raise exception 'position % was never issued in epoch %: the head of the log is %',
            at_position, present, headwater.head()
            using errcode = 'HW021',
                  detail = json_build_object(
                      'epoch', present, 'requested_epoch', refuse_other_epoch.epoch,
                      -- Of which epoch it is is not known: what the present one shares with the one before it.
                      'common_position', pg_sequence_last_value('headwater.epoch_start')
                  )::text,
                  hint = 'It is of another log, or of a history that was lost. Read from a position of this log.';
    end if;
end;
$$;

-- The epoch in which an event at a position was published.
create or replace function headwater.epoch_of(at_position bigint)
returns integer
language plpgsql
volatile
as $$
declare
    present constant integer := headwater.current_epoch();
begin
    if at_position > pg_sequence_last_value('headwater.epoch_start') then
        return present;
    end if;
    return coalesce(
        (select max(e.number) from headwater.epoch e where e.began_after < at_position),
        (select min(e.number) from headwater.epoch e),
        present
    );
end;
$$;

-- Every epoch once, with where it began.
create or replace view headwater.epoch_overview as
select e.number, min(e.began_after) as began_after, min(e.began_at) as began_at
from headwater.epoch e
group by e.number;
