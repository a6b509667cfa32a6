-- Audit: what administrators did, as events of the log itself, each in the transaction of what it tells.

-- Note that somebody did something to something. Called beside the act, in its transaction: neither is there without
-- the other. The topic is made when it is first needed. Nothing secret may be in `detail`.
create or replace function headwater.audit(actor text, action text, subject text, detail jsonb default '{}')
returns bigint
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    topic headwater.topic;
    noted bigint;
begin
    if not exists (select from headwater.topic t where t.name = 'headwater.audit' and t.deleted_at is null) then
        perform headwater.create_topic('headwater.audit', if_missing => true);
    end if;
    topic := headwater.find_topic('headwater.audit');
    perform headwater.advertise_publisher(topic.name);
    insert into headwater.event (position, topic_id, key, type, content_type, payload)
    values (
        nextval('headwater.position'), topic.id, convert_to(left(subject, 16000), 'UTF8'), action, 'application/json',
        convert_to(
            jsonb_build_object('actor', actor, 'action', action, 'subject', subject, 'detail', detail)::text, 'UTF8'
        )
    )
    returning position into noted;
    return noted;
end;
$$;
