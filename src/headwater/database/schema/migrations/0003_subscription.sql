-- Subscriptions by SQL condition, and their readers.

-- One distinct condition: a boolean SQL expression over an event e and a subscription s, installed as a function.
create table headwater.condition (
    id            integer     generated always as identity primary key,
    expression    text        not null
        constraint "a condition is 1 to 10000 characters" check (length(expression) between 1 and 10000),
    -- The whole expression, by a hash that cannot be made to collide: two conditions never merge.
    hash          bytea       not null unique,
    function_name text        not null,
    -- It ran out of time; it matches nothing until somebody subscribes to it anew.
    broken_at     timestamptz,
    last_error    text        check (length(last_error) <= 10000),
    created_at    timestamptz not null default clock_timestamp()
);

create table headwater.subscription (
    id             bigint      generated always as identity primary key,
    group_id       integer     not null references headwater.consumer_group (id) on delete cascade,
    condition_id   integer     not null references headwater.condition (id),
    params         jsonb       not null constraint "params are a JSON object" check (jsonb_typeof(params) = 'object'),
    params_hash    bytea       not null,
    -- Only events after it.
    from_position  bigint      not null,
    -- Null: until it is unsubscribed.
    expires_after  interval    constraint "a subscription lives longer than zero" check (expires_after > '0'),
    last_active_at timestamptz not null default clock_timestamp(),
    created_at     timestamptz not null default clock_timestamp(),
    unique (group_id, condition_id, params_hash)
);
create index subscription_params on headwater.subscription using gin (params) with (fastupdate = off);
create index subscription_condition on headwater.subscription (condition_id);

-- How far a group has read for its subscriptions, and who reads for it now.
create table headwater.reading (
    group_id     integer     primary key references headwater.consumer_group (id) on delete cascade,
    position     bigint      not null check (position >= 0),
    -- Null: the whole log.
    topics       text[],
    reader       text        check (length(reader) between 1 and 200),
    leased_until timestamptz
);

-- Events that one handler of one subscription failed at.
create table headwater.subscription_retry (
    id              bigint      generated always as identity primary key,
    group_id        integer     not null references headwater.consumer_group (id) on delete cascade,
    subscription_id bigint      not null references headwater.subscription (id) on delete cascade,
    handler         text        not null check (length(handler) between 1 and 200),
    position        bigint      not null,
    attempt         integer     not null check (attempt >= 1),
    -- Null: given up.
    due_at          timestamptz,
    last_error      text        check (length(last_error) <= 10000),
    unique (subscription_id, handler, position)
);
create index subscription_retry_due on headwater.subscription_retry (group_id, due_at);

-- An event as a condition sees it.
create type headwater.condition_event as (
    position     bigint,
    topic        text,
    partition    integer,
    key          bytea,
    type         text,
    routing_key  text,
    headers      jsonb,
    content_type text,
    payload      bytea,
    event_id     text,
    published_at timestamptz,
    data         jsonb
);

create type headwater.condition_match as (
    position         bigint,
    subscription_ids bigint[]
);

-- An event with the subscriptions that it matched. The last row of a reading has no event, only next_position.
create type headwater.matched_event as (
    next_position    bigint,
    subscription_ids bigint[],
    retry_id         bigint,
    handler          text,
    attempt          integer,
    position         bigint,
    topic            text,
    partition        headwater.event_partition,
    topic_offset     headwater.event_offset,
    key              headwater.event_key,
    type             headwater.event_type,
    routing_key      headwater.event_routing_key,
    headers          headwater.event_headers,
    content_type     headwater.event_content_type,
    payload          headwater.event_payload,
    event_id         headwater.event_id,
    published_at     timestamptz
);
