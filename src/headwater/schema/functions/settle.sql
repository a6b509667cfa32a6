-- Order: how a position settles. Read this before changing anything that draws or reads positions.
--
-- A sequence hands out positions at insert, transactions commit in another order, so a reader that
-- has seen 7 could later find a 6. Every publishing transaction therefore advertises, before it draws
-- its first position, a lower bound of what it will draw: a shared advisory lock whose key is our tag
-- and the sequence's last value. The rules that bite, each of which lost events when broken:
--   * the lock comes before the first nextval;
--   * a reader takes the sequence's last value first and looks at the locks second;
--   * it reads the events in a later snapshot than both.

-- Advertise the transaction as a publisher. The lock goes with a savepoint that is rolled back, and so does the
-- setting that says that it is held. A transaction without an id has written nothing yet, and most write once, so
-- the first time notes nothing; the second takes another lock, whose bound is no lower, and notes it.
-- (Assignments, since plpgsql evaluates them in a tenth of the time of a perform.)
create or replace function headwater.advertise_publisher()
returns void
language plpgsql
as $$
declare
    publisher constant text := pg_current_xact_id_if_assigned()::text;
    nothing text;
begin
    if publisher is null or current_setting('headwater.publisher', true) is distinct from publisher then
        nothing := pg_advisory_xact_lock_shared(
            (29286::bigint << 48) | coalesce(pg_sequence_last_value('headwater.position'), 0)
        );
        if publisher is not null then
            nothing := set_config('headwater.publisher', publisher, true);
        end if;
    end if;
end;
$$;

create or replace function headwater.advertise_on_insert()
returns trigger
language plpgsql
as $$
declare
    nothing text;
begin
    nothing := headwater.advertise_publisher();
    return null;
end;
$$;

-- The highest position that any transaction has drawn. Takes no snapshot: cheap enough to poll.
create or replace function headwater.head()
returns bigint
language sql
return coalesce(pg_sequence_last_value('headwater.position'), 0);

-- Who is publishing right now, and from which position on: the lowest bound of each transaction.
create or replace view headwater.publisher_in_flight as
select
    l.pid,
    l.pid is null as prepared,
    l.position_bound,
    a.usename as user_name,
    a.application_name,
    a.state,
    a.xact_start as began_at,
    clock_timestamp() - a.xact_start as age
from (
    select k.pid, min(((k.classid::bigint & 65535) << 32) | k.objid::bigint) as position_bound
    from pg_locks k
    where
        k.locktype = 'advisory'
        and k.objsubid = 1
        and k.classid::bigint >> 16 = 29286
        and k.database = (select d.oid from pg_database d where d.datname = current_database())
    group by k.pid, k.virtualtransaction
) as l
left join pg_stat_activity a using (pid);

-- The position at or below which nothing can still appear. Read events in a later statement than this.
create or replace function headwater.settled()
returns bigint
language plpgsql
volatile
as $$
declare
    drawn bigint;
    lowest_bound bigint;
begin
    if current_setting('transaction_isolation') <> 'read committed' or pg_is_in_recovery() then
        raise exception 'the log is read at READ COMMITTED and on a primary only'
            using errcode = 'HW012',
                  hint = 'Use a READ COMMITTED transaction (the default) on the primary.';
    end if;
    drawn := coalesce(pg_sequence_last_value('headwater.position'), 0);
    select min(((l.classid::bigint & 65535) << 32) | l.objid::bigint)
    into lowest_bound
    from pg_locks l
    where
        l.locktype = 'advisory'
        and l.objsubid = 1
        and l.classid::bigint >> 16 = 29286
        and l.database = (select d.oid from pg_database d where d.datname = current_database());
    return least(drawn, lowest_bound);
end;
$$;

-- Both at once, for a reader that wants to know whether it may rest.
create or replace function headwater.log_state(out drawn bigint, out settled bigint)
language plpgsql
volatile
as $$
begin
    drawn := headwater.head();
    settled := headwater.settled();
end;
$$;

-- INSERT, COPY and plain SQL all come by here.
do $$
begin
    if not exists (
        select from pg_trigger t where t.tgrelid = 'headwater.event'::regclass and t.tgname = 'advertise'
    ) then
        create trigger advertise before insert on headwater.event
            for each statement execute function headwater.advertise_on_insert();
    end if;
end;
$$;
