-- Dead letters of subscribers, in one table with those of queues.

-- Retries of subscribers know their topic and every try that they had.
alter table headwater.subscription_retry
    add column topic_id integer,
    add column history jsonb not null default '[]',
    drop constraint subscription_retry_attempt_check,
    -- 0: redriven, or put off before the first try.
    add constraint subscription_retry_attempt_check check (attempt >= 0);
update headwater.subscription_retry r
set topic_id = e.topic_id
from headwater.event e
where e.position = r.position;

-- A dead letter of a subscriber names the subscription and the handler that gave up; one of a queue names neither.
alter table headwater.dead_letter
    drop constraint dead_letter_pkey,
    add column subscription_id bigint references headwater.subscription (id) on delete cascade,
    add column handler text check (length(handler) between 1 and 200),
    add constraint dead_letter_identity unique nulls not distinct (group_id, position, subscription_id, handler),
    add constraint "a subscriber's dead letter names its handler" check ((subscription_id is null) = (handler is null));
create index dead_letter_subscription on headwater.dead_letter (subscription_id) where subscription_id is not null;
-- So far what was given up stayed among the retries, without a time.
with given_up as (
    delete from headwater.subscription_retry r where r.due_at is null returning r.*
)
insert into headwater.dead_letter
    (group_id, position, topic_id, attempts, alone, last_error, history, subscription_id, handler)
select g.group_id, g.position, g.topic_id, g.attempt, false, g.last_error, g.history, g.subscription_id, g.handler
from given_up g
where g.topic_id is not null;
delete from headwater.subscription_retry r where r.topic_id is null;
alter table headwater.subscription_retry
    alter column topic_id set not null,
    alter column due_at set not null;

-- They return more than before.
drop function if exists headwater.dead_letters(text, bigint[], text, text, bigint, integer) cascade;
