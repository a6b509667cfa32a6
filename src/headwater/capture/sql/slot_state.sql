-- A slot, how far the server's log is ahead of it, and which history that log is. No row if there is no such slot.
select
    slot.plugin,
    slot.database,
    slot.active,
    coalesce(slot.wal_status, '') as wal_status,
    coalesce(slot.confirmed_flush_lsn - '0/0'::pg_lsn, 0)::bigint as confirmed_lsn,
    coalesce(slot.restart_lsn - '0/0'::pg_lsn, 0)::bigint as restart_lsn,
    (pg_current_wal_flush_lsn() - '0/0'::pg_lsn)::bigint as flushed_lsn,
    current_database() as this_database,
    (pg_control_system()).system_identifier as system_identifier,
    -- The file's name begins with it. pg_control_checkpoint() has the old one until the first checkpoint after a promotion.
    ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::integer as timeline,
    -- A failover slot waits for these standbys before it gives a change, so a batch must not end beyond them. Postgres
    -- before 17 has neither the column nor the setting.
    coalesce((
        select min(standby.restart_lsn - '0/0'::pg_lsn)
        from pg_replication_slots as standby
        where (to_jsonb(slot) ->> 'failover')::boolean
            and standby.slot_name::text = any (string_to_array(
                lower(translate(current_setting('synchronized_standby_slots', true), ' "', '')), ','
            ))
    ), pg_current_wal_flush_lsn() - '0/0'::pg_lsn)::bigint as on_standbys_lsn
from pg_replication_slots as slot
where slot.slot_name = %(slot)s;
