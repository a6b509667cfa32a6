-- Names of subscribers: one session at a time has a name, and it is free again when the session ends, however it ends.

-- The key of the advisory lock of a name.
create or replace function headwater.subscriber_key(topic_id integer, name text)
returns bigint
language sql
immutable
return (29295::bigint << 48) | (hashtextextended(name, topic_id) & ((1::bigint << 48) - 1));

-- Take a name for this session. False: another session has it. Whoever takes it twice has to give it back twice.
create or replace function headwater.take_subscriber_name(topic text, name text)
returns boolean
language sql
volatile
return pg_try_advisory_lock(headwater.subscriber_key((headwater.find_event_store(topic)).id, name));

-- Give a name back. False: this session did not have it.
create or replace function headwater.give_subscriber_name(topic text, name text)
returns boolean
language sql
volatile
return pg_advisory_unlock(headwater.subscriber_key((headwater.find_event_store(topic)).id, name));
