-- Clock steps, bindings that follow a rewind, and indexes for retention per topic.

-- The clock when a lease or a wait began. Where it is later than the clock, the clock went back since, and the time
-- that is left is counted from now on: see redate() in clock.sql.
alter table headwater.ledger add column dated_at timestamptz not null default clock_timestamp();
alter table headwater.redelivery add column dated_at timestamptz not null default clock_timestamp();
alter table headwater.subscription_retry add column dated_at timestamptz not null default clock_timestamp();
alter table headwater.reading add column leased_at timestamptz;
alter table headwater.pipeline add column leased_at timestamptz;
alter table headwater.kafka_broker add column leased_at timestamptz not null default clock_timestamp();
alter table headwater.webhook_pace add column dated_at timestamptz not null default clock_timestamp();

-- Steps of the database clock that upkeep has seen, the newest 100.
create table headwater.clock_step (
    id       bigint           generated always as identity primary key,
    -- By the clock after the step.
    seen_at  timestamptz      not null default clock_timestamp(),
    -- The head of the log when it was seen.
    position bigint           not null,
    -- Below zero: the clock went back by at least that much.
    seconds  double precision not null
);

-- Whether from_position was given. If not, the binding began where its queue stood, and a rewind goes below it.
alter table headwater.binding add column from_position_given boolean not null default false;
create index binding_topic on headwater.binding (topic_id);
