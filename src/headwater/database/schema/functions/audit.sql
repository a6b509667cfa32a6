-- Audit: what administrators did, as events of the log itself, each in the transaction of the action.

-- Record an action of an actor on a subject; returns the position of the event. Called in the transaction of the
-- action, so that both are committed or neither. The topic is created on first use. `detail` must not contain secrets.
create or replace function headwater_internal.audit(actor text, action text, subject text, detail jsonb default '{}')
returns bigint
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    topic headwater_internal.topic;
    noted bigint;
begin
    if not exists (select from headwater_internal.topic t where t.name = 'headwater.audit' and t.deleted_at is null) then
        perform headwater.create_topic('headwater.audit', if_missing => true);
    end if;
    topic := headwater_internal.find_topic('headwater.audit');
    perform headwater_internal.advertise_publisher(topic.name);
    insert into headwater_internal.event (position, topic_id, key, type, content_type, payload)
    values (
        nextval('headwater_internal.position'), topic.id, convert_to(left(subject, 16000), 'UTF8'), action, 'application/json',
        convert_to(
            jsonb_build_object('actor', actor, 'action', action, 'subject', subject, 'detail', detail)::text, 'UTF8'
        )
    )
    returning position into noted;
    return noted;
end;
$$;
