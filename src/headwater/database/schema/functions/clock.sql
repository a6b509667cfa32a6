-- The database clock: what happens when it is set back.
--
-- Leases and waits are stored with the time at which they end. If the clock goes back by an hour, all of them end an
-- hour too late. Each therefore also stores the time at which it began. A start later than the clock proves a step
-- back, and the full duration is then counted from now on. reap() corrects the leases and retries of a queue, every
-- second where a worker runs; redate() corrects everything else, with each maintain(). Times given by users (scheduled
-- events, cron schedules, retention) are times of the clock and are not changed.

-- Smaller steps are ignored.
create or replace function headwater_internal.clock_tolerance()
returns interval
language sql
immutable
return interval '1 second';

-- Compare the clock with the time of the last maintenance run and record a step back. The caller must hold the
-- maintenance lock.
create or replace function headwater_internal.note_clock()
returns void
language plpgsql
as $$
declare
    now_at constant timestamptz := clock_timestamp();
    last_at timestamptz;
begin
    select u.maintained_at into last_at from headwater_internal.maintenance_state u;
    if last_at > now_at + headwater_internal.clock_tolerance() then
        insert into headwater_internal.clock_step (seen_at, position, seconds)
        values (now_at, headwater.head(), extract(epoch from now_at - last_at));
        delete from headwater_internal.clock_step c
        where c.id <= (select o.id from headwater_internal.clock_step o order by o.id desc offset 100 limit 1);
        raise warning 'the database clock went back by % or more', last_at - now_at;
    end if;
    update headwater_internal.maintenance_state u set maintained_at = now_at;
end;
$$;

-- Restart leases and waits that began later than now. The caller must hold the maintenance lock.
create or replace function headwater_internal.redate()
returns void
language plpgsql
as $$
declare
    now_at constant timestamptz := clock_timestamp();
    latest constant timestamptz := now_at + headwater_internal.clock_tolerance();
begin
    update headwater_internal.reading d
    set leased_until = now_at + (d.leased_until - d.leased_at), leased_at = now_at
    where d.leased_at > latest;
    update headwater_internal.subscription_retry r
    set due_at = now_at + (r.due_at - r.dated_at), dated_at = now_at
    where r.dated_at > latest and r.due_at is not null;
    update headwater_internal.pipeline p
    set leased_until = now_at + (p.leased_until - p.leased_at), leased_at = now_at
    where p.leased_at > latest;
    update headwater_internal.kafka_broker b
    set expires_at = now_at + (b.expires_at - b.leased_at), leased_at = now_at
    where b.leased_at > latest;
    update headwater_internal.kafka_transactional_producer t set began_at = now_at where t.began_at > latest;
    -- Retention counts from the time at which a segment was closed, which is now at the latest.
    update headwater_internal.segment s
    set opened_at = least(s.opened_at, now_at), closed_at = least(s.closed_at, now_at)
    where s.opened_at > latest or s.closed_at > latest;
end;
$$;
