-- Snapshots of an event store: states that decisions were made on, and the last event in each.

-- The state that was saved for a query; no row if there is none of this version.
create or replace function headwater.load_snapshot(
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
    from headwater.store_snapshot s
    where
        s.topic_id = (headwater.find_event_store(topic)).id
        and s.name = load_snapshot.name
        and s.query_hash = load_snapshot.query_hash
        and s.version = load_snapshot.version;
end;

-- Save a state with the position of the last event in it. It never goes back: of two the later one stays. Those of
-- earlier versions go. With the epoch that the position is of, HW021 if the log is in another.
create or replace function headwater.save_snapshot(
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
    store constant headwater.topic := headwater.find_event_store(topic);
begin
    if epoch is not null then
        perform headwater.refuse_other_epoch(epoch, at_position);
    end if;
    insert into headwater.store_snapshot as s (topic_id, name, query_hash, version, position, state)
    values (
        store.id, save_snapshot.name, save_snapshot.query_hash, save_snapshot.version, at_position, save_snapshot.state
    )
    on conflict on constraint store_snapshot_pkey do update
        set position = excluded.position, state = excluded.state, saved_at = excluded.saved_at
        where s.position < excluded.position;
    delete from headwater.store_snapshot s
    where
        s.topic_id = store.id and s.name = save_snapshot.name and s.query_hash = save_snapshot.query_hash
        and s.version < save_snapshot.version;
end;
$$;

-- Forget the snapshots of a name, all versions of them. Returns how many there were.
create or replace function headwater.forget_snapshots(topic text, name text)
returns bigint
language plpgsql
volatile
as $$
declare
    store constant headwater.topic := headwater.find_event_store(topic);
    forgotten bigint;
begin
    delete from headwater.store_snapshot s where s.topic_id = store.id and s.name = forget_snapshots.name;
    get diagnostics forgotten = row_count;
    return forgotten;
end;
$$;
