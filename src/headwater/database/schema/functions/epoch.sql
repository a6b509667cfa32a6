-- Epochs: which history of the log a position belongs to.
--
-- Positions leave the database: readers keep them in memory, as SSE ids, as Kafka offsets and in checkpoints. A crash,
-- the promotion of a lagging standby or a restore can undo positions that were assigned but not yet on disk; the
-- sequence then assigns the same positions to other events, and a reader that continued from its own position would
-- skip them. Every position outside of this database is therefore stored with its epoch number. A reader that finds
-- another epoch goes back to the last position that both epochs share: headwater.common_position().
--
-- How an epoch begins: the unlogged sequence `epoch_register` is empty exactly when Postgres has recovered from a
-- crash, was promoted or was restored. The first transaction that then publishes or reads records the head of the log.
-- The head has not moved by then, because publishers call begin_epoch() before they assign a position. Invariants:
--   * The head is recorded before the first position of the epoch is assigned.
--   * The row in `epoch` is on disk no later than the first event of the epoch: publishers write it in their own
--     transaction until they see a committed one.
--   * Epoch numbers only grow, also across a failover to a standby that never received the last one. They are therefore
--     derived from the clock, in seconds.
--
-- The register holds (identity of the sequence << 32) | (number << 1) | recorded. A restored dump contains the value,
-- but the sequence is a new one: its identity does not match, and a new epoch begins.

-- The identity of this sequence, as stored in its own value.
create or replace function headwater_internal.epoch_identity()
returns bigint
language sql
stable
return 'headwater_internal.epoch_register'::regclass::oid::bigint & 2147483647;

-- Begin a new epoch if the register is empty, make sure that the row of the epoch is written, and return its number.
-- HW012 on a standby.
create or replace function headwater_internal.begin_epoch()
returns integer
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    epoch_lock constant bigint := 29293::bigint << 48;
    identity constant bigint := headwater_internal.epoch_identity();
    register bigint;
    present integer;
begin
    if pg_is_in_recovery() then
        raise exception 'the log can be read only at READ COMMITTED and on a primary'
            using errcode = 'HW012', hint = 'Connect to the primary.';
    end if;
    -- A session-level lock: the transaction may stay open for long, and the lock must not.
    perform pg_advisory_lock(epoch_lock);
    begin
        register := pg_sequence_last_value('headwater_internal.epoch_register');
        if register is null or register >> 32 <> identity then
            perform setval('headwater_internal.epoch_start', headwater.head());
            -- The stable position of another history is not valid in this one.
            perform setval('headwater_internal.stable_register', 0);
            register := (identity << 32) | (greatest(
                (select coalesce(max(e.number), 0) + 1 from headwater_internal.epoch e),
                extract(epoch from clock_timestamp() - timestamptz '2026-01-01 00:00:00+00')::bigint
            ) << 1);
            perform setval('headwater_internal.epoch_register', register);
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
        select from headwater_internal.epoch e
        where e.number = present and e.xmin is distinct from pg_current_xact_id_if_assigned()::xid
    ) then
        perform setval('headwater_internal.epoch_register', register | 1);
    elsif not exists (select from headwater_internal.epoch e where e.number = present) then
        insert into headwater_internal.epoch (number, began_after)
        values (present, pg_sequence_last_value('headwater_internal.epoch_start'));
        -- The number leaves the database with the result, so it must be on disk at commit.
        perform set_config('synchronous_commit', 'on', true) where current_setting('synchronous_commit') in ('off', 'local');
    end if;
    return present;
end;
$$;

-- The number of the current epoch. Reads no row, so it is cheap. HW012 on a standby.
create or replace function headwater.current_epoch()
returns integer
language plpgsql
volatile
as $$
declare
    register constant bigint := pg_sequence_last_value('headwater_internal.epoch_register');
begin
    if register & 1 = 1 and register >> 32 = headwater_internal.epoch_identity() then
        return (register >> 1) & 2147483647;
    end if;
    return headwater_internal.begin_epoch();
end;
$$;

-- The position from which a reader of an epoch continues: its own position, or the last one that is the same event in
-- that epoch and in the current one. A null epoch means the current one.
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
        (select min(e.began_after) from headwater_internal.epoch e where e.number > common_position.epoch),
        pg_sequence_last_value('headwater_internal.epoch_start')
    );
end;
$$;

-- HW021 unless a position belongs to the current history: it must not be of another epoch, nor above the head.
create or replace function headwater_internal.refuse_other_epoch(epoch integer, at_position bigint)
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
        raise exception 'position % belongs to epoch %, but the log is in epoch %: positions after % may have been assigned again',
            at_position, refuse_other_epoch.epoch, present, common
            using errcode = 'HW021',
                  detail = json_build_object(
                      'epoch', present, 'requested_epoch', refuse_other_epoch.epoch, 'common_position', common
                  )::text,
                  hint = 'Postgres crashed, failed over or was restored. Read again from the common position.';
    end if;
    if at_position > headwater.head() then
        raise exception 'position % was never assigned in epoch %: the head of the log is %',
            at_position, present, headwater.head()
            using errcode = 'HW021',
                  detail = json_build_object(
                      'epoch', present, 'requested_epoch', refuse_other_epoch.epoch,
                      -- The epoch of the position is unknown. This is what the current epoch shares with the one before
                      -- it.
                      'common_position', pg_sequence_last_value('headwater_internal.epoch_start')
                  )::text,
                  hint = 'The position belongs to another log, or to a history that was lost. Read from a position of this log.';
    end if;
end;
$$;

-- The epoch in which an event at a position was published.
create or replace function headwater_internal.epoch_of(at_position bigint)
returns integer
language plpgsql
volatile
as $$
declare
    present constant integer := headwater.current_epoch();
begin
    if at_position > pg_sequence_last_value('headwater_internal.epoch_start') then
        return present;
    end if;
    return coalesce(
        (select max(e.number) from headwater_internal.epoch e where e.began_after < at_position),
        (select min(e.number) from headwater_internal.epoch e),
        present
    );
end;
$$;

-- Every epoch with the position after which it began.
create or replace view headwater.epoch_overview as
select e.number, min(e.began_after) as began_after, min(e.began_at) as began_at
from headwater_internal.epoch e
group by e.number;
