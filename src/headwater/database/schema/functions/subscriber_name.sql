-- Subscriber names: a name is held by one session at a time, and released when the session ends, for whatever reason.

-- The key of the advisory lock of a name.
create or replace function headwater_internal.subscriber_key(topic_id integer, name text)
returns bigint
language sql
immutable
return (29295::bigint << 48) | (hashtextextended(name, topic_id) & ((1::bigint << 48) - 1));

-- Acquire a name for this session. Returns false if another session holds it. A name acquired twice must be released
-- twice.
create or replace function headwater_internal.take_subscriber_name(topic text, name text)
returns boolean
language sql
volatile
return pg_try_advisory_lock(headwater_internal.subscriber_key((headwater_internal.find_event_store(topic)).id, name));

-- Release a name. Returns false if this session did not hold it.
create or replace function headwater_internal.give_subscriber_name(topic text, name text)
returns boolean
language sql
volatile
return pg_advisory_unlock(headwater_internal.subscriber_key((headwater_internal.find_event_store(topic)).id, name));
