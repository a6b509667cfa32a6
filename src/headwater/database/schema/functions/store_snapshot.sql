-- Snapshots of an event store: saved states of decisions, each with the position of its last event.

-- The saved state of a query; no row if there is none of this version.
create or replace function headwater_internal.load_snapshot(
    topic text,
    name text,
    query_hash text,
    version integer,
    out "position" bigint,
    out state bytea
)
returns setof record
language sql
stable
begin atomic
    select s.position, s.state
    from headwater_internal.store_snapshot s
    where
        s.topic_id = (headwater_internal.find_event_store(topic)).id
        and s.name = load_snapshot.name
        and s.query_hash = load_snapshot.query_hash
        and s.version = load_snapshot.version;
end;

-- Save a state with the position of its last event. Of two states the later one is kept. Those of earlier versions are
-- deleted. With the epoch of the position, HW021 if the log is in another one.
create or replace function headwater_internal.save_snapshot(
    topic text,
    name text,
    query_hash text,
    version integer,
    at_position bigint,
    state bytea,
    epoch integer default null
)
returns void
language plpgsql
volatile
as $$
declare
    store constant headwater_internal.topic := headwater_internal.find_event_store(topic);
begin
    if epoch is not null then
        perform headwater_internal.refuse_other_epoch(epoch, at_position);
    end if;
    insert into headwater_internal.store_snapshot as s (topic_id, name, query_hash, version, position, state)
    values (
        store.id, save_snapshot.name, save_snapshot.query_hash, save_snapshot.version, at_position, save_snapshot.state
    )
    on conflict on constraint store_snapshot_pkey do update
        set position = excluded.position, state = excluded.state, saved_at = excluded.saved_at
        where s.position < excluded.position;
    delete from headwater_internal.store_snapshot s
    where
        s.topic_id = store.id and s.name = save_snapshot.name and s.query_hash = save_snapshot.query_hash
        and s.version < save_snapshot.version;
end;
$$;

-- Delete the snapshots of a name, in all versions. Returns their number.
create or replace function headwater_internal.forget_snapshots(topic text, name text)
returns bigint
language plpgsql
volatile
as $$
declare
    store constant headwater_internal.topic := headwater_internal.find_event_store(topic);
    forgotten bigint;
begin
    delete from headwater_internal.store_snapshot s where s.topic_id = store.id and s.name = forget_snapshots.name;
    get diagnostics forgotten = row_count;
    return forgotten;
end;
$$;
