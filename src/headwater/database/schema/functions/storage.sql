-- Whether the disk of the database has free space.

-- Write half a megabyte to new pages and release them. 53100 (disk_full) if there is no space. The readiness check
-- calls it only after a write has failed with disk_full.
create or replace function headwater_internal.probe_storage() returns void
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
