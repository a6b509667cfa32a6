-- Whether the disk of the database has room.

-- Write half a megabyte to new pages and give them back. Fails with disk_full (53100) where there is no room.
-- Readiness calls it only after a write found the disk full.
create or replace function headwater.probe_storage() returns void
language plpgsql volatile
as $$
begin
    create temp table headwater_storage_probe (filler bytea) on commit drop;
    alter table pg_temp.headwater_storage_probe alter column filler set storage external;
    insert into pg_temp.headwater_storage_probe
    select convert_to(repeat('x', 8192), 'UTF8') from generate_series(1, 64);
    drop table pg_temp.headwater_storage_probe;
end;
$$;
