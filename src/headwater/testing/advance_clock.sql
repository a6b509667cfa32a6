-- Everything that waits for a time comes closer by a step, as if the clock of the database had moved forward by it.
do $do$
declare
    step constant interval := current_setting('headwater_testing.advance_by');
begin
    update headwater_internal.ledger l
    set expires_at = l.expires_at - step, due_after = l.due_after - step, dated_at = l.dated_at - step;
    update headwater_internal.redelivery r set visible_at = r.visible_at - step, dated_at = r.dated_at - step;
    update headwater_internal.scheduled s set due_at = s.due_at - step;
    update headwater_internal.cron_schedule c set next_at = c.next_at - step, last_at = c.last_at - step;
    update headwater_internal.subscription s set last_active_at = s.last_active_at - step;
    update headwater_internal.subscription_retry r set due_at = r.due_at - step, dated_at = r.dated_at - step;
    update headwater_internal.reading r set leased_until = r.leased_until - step, leased_at = r.leased_at - step;
end;
$do$;
