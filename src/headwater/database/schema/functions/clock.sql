-- The database clock: what happens when it is set back.
--
-- Leases and waits are stored as the time when they end. If the clock goes back by an hour, all of them end an hour
-- too late. Each therefore has the time when it began beside it. A beginning later than the clock proves a step back,
-- and the whole length is then counted from now on. reap() does so for the leases and retries of a queue, each second
-- where a worker runs; redate() for all else, with each maintain(). Times that a user gave (scheduled events, cron
-- schedules, retention) are times of the clock and stay as they are.

-- Steps smaller than this are not worth a write.
create or replace function headwater.clock_tolerance()
returns interval
language sql
immutable
return interval '1 second';

-- Compare the clock with the one that upkeep saw last and note a step back. Only a holder of the log's upkeep may.
create or replace function headwater.note_clock()
returns void
language plpgsql
as $$
declare
    now_at constant timestamptz := clock_timestamp();
    last_at timestamptz;
begin
    select u.maintained_at into last_at from headwater.upkeep u;
    if last_at > now_at + headwater.clock_tolerance() then
        insert into headwater.clock_step (seen_at, position, seconds)
        values (now_at, headwater.head(), extract(epoch from now_at - last_at));
        delete from headwater.clock_step c
        where c.id <= (select o.id from headwater.clock_step o order by o.id desc offset 100 limit 1);
        raise warning 'the database clock went back by % or more', last_at - now_at;
    end if;
    update headwater.upkeep u set maintained_at = now_at;
end;
$$;

-- Count leases and waits that began later than now from now on. Only a holder of the log's upkeep may.
create or replace function headwater.redate()
returns void
language plpgsql
as $$
declare
    now_at constant timestamptz := clock_timestamp();
    latest constant timestamptz := now_at + headwater.clock_tolerance();
begin
    update headwater.reading d
    set leased_until = now_at + (d.leased_until - d.leased_at), leased_at = now_at
    where d.leased_at > latest;
    update headwater.subscription_retry r
    set due_at = now_at + (r.due_at - r.dated_at), dated_at = now_at
    where r.dated_at > latest and r.due_at is not null;
    update headwater.pipeline p
    set leased_until = now_at + (p.leased_until - p.leased_at), leased_at = now_at
    where p.leased_at > latest;
    update headwater.kafka_broker b
    set expires_at = now_at + (b.expires_at - b.leased_at), leased_at = now_at
    where b.leased_at > latest;
    update headwater.kafka_transaction t set began_at = now_at where t.began_at > latest;
    -- Retention counts from when a segment was closed: at the latest now.
    update headwater.segment s
    set opened_at = least(s.opened_at, now_at), closed_at = least(s.closed_at, now_at)
    where s.opened_at > latest or s.closed_at > latest;
end;
$$;
