-- What keeps claims fast with many bindings, and what says whether a queue has workers.

-- A queue may be bound to thousands of topics: the bindings of one topic are found without reading the others.
create index binding_group_topic on headwater.binding (group_id, topic_id);
drop index headwater.binding_group;

-- When a worker last asked a queue for events, written at most once in ten seconds. No row: none ever did.
create table headwater.queue_activity (
    group_id   integer     primary key references headwater.consumer_group (id) on delete cascade,
    claimed_at timestamptz not null,
    worker     text        not null
) with (fillfactor = 20);

-- The columns of these views change: lag counts events of the consumer's own topics. With them go the functions that
-- read them; all are created again with the other functions.
drop function if exists headwater.metrics(integer), headwater.metrics_of_doors(integer);
drop view if exists headwater.group_lag, headwater.group_overview, headwater.cursor_lag, headwater.pipeline_status,
    headwater.archive_overview;

-- It takes the topics as an argument now.
drop function if exists headwater.claim_selected;
