-- The state of a slot, its lag behind the WAL, and the identity of that WAL. No row if the slot does not exist.
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
    -- The name of a WAL file begins with its timeline. pg_control_checkpoint() shows the old timeline until the first
    -- checkpoint after a promotion.
    ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::integer as timeline,
    -- A failover slot waits for these standbys before it returns a change, so a batch must not end beyond them. Before
    -- Postgres 17 neither the column nor the setting exists.
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
