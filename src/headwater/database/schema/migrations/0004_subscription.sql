-- Subscriptions by SQL filter, and their readers.

-- One distinct filter: a boolean SQL expression over an event e and a subscription s, installed as a function.
create table headwater_internal.filter (
    id            integer     generated always as identity primary key,
    expression    text        not null
        constraint "a filter is 1 to 10000 characters" check (length(expression) between 1 and 10000),
    -- The whole expression, by a hash that cannot be made to collide: two filters never merge.
    hash          bytea       not null unique,
    function_name text        not null,
    last_error    text        check (length(last_error) <= 10000),
    created_at    timestamptz not null default clock_timestamp(),
    -- When evaluating it failed last, and how often it failed.
    last_error_at timestamptz,
    errors        bigint      not null default 0
);

-- Params under the id of their queue: one key of the index names both. Must be immutable for a generated column.
create function headwater_internal.filter_probe(queue_id integer, params jsonb)
returns jsonb
language plpgsql
immutable
as $$
begin
    return jsonb_build_object(queue_id::text, params);
end;
$$;

create table headwater_internal.subscription (
    id             bigint      generated always as identity primary key,
    queue_id       integer     not null references headwater_internal.queue (id) on delete cascade,
    filter_id      integer     not null references headwater_internal.filter (id),
    params         jsonb       not null constraint "params are a JSON object" check (jsonb_typeof(params) = 'object'),
    params_hash    bytea       not null,
    -- Only events after it.
    from_position  bigint      not null,
    -- Null: until it is unsubscribed.
    expires_after  interval    constraint "a subscription lives longer than zero" check (expires_after > '0'),
    last_active_at timestamptz not null default clock_timestamp(),
    created_at     timestamptz not null default clock_timestamp(),
    probe          jsonb       generated always as (headwater_internal.filter_probe(queue_id, params)) stored,
    unique (queue_id, filter_id, params_hash),
    -- Every reader of the queue has them in memory.
    constraint "params are at most 1 MiB" check (octet_length(params::text) <= 1048576)
);
create index subscription_probe on headwater_internal.subscription using gin (probe jsonb_path_ops) with (fastupdate = off);
create index subscription_filter on headwater_internal.subscription (filter_id);

-- How far a queue has read for its subscriptions, and who reads for it now.
create table headwater_internal.reading (
    queue_id     integer     primary key references headwater_internal.queue (id) on delete cascade,
    position     bigint      not null check (position >= 0),
    -- Null: the whole log.
    topics       text[],
    reader       text        check (length(reader) between 1 and 200),
    leased_until timestamptz,
    -- Match this many events at most, after matching more ran out of time. 0: one event, filter by filter.
    max_events     integer     check (max_events >= 0),
    -- While filters that were resumed catch up: up to here the other filters have had their events.
    others_done_to bigint      check (others_done_to >= 0),
    leased_at      timestamptz
);

-- Events that one handler of one subscription failed at.
create table headwater_internal.subscription_retry (
    id              bigint      generated always as identity primary key,
    queue_id        integer     not null references headwater_internal.queue (id) on delete cascade,
    subscription_id bigint      not null references headwater_internal.subscription (id) on delete cascade,
    handler         text        not null check (length(handler) between 1 and 200),
    position        bigint      not null,
    -- 0: redriven, or put off before the first try.
    attempt         integer     not null check (attempt >= 0),
    due_at          timestamptz not null,
    last_error      text        check (length(last_error) <= 10000),
    topic_id        integer     not null,
    history         jsonb       not null default '[]',
    dated_at        timestamptz not null default clock_timestamp(),
    unique (subscription_id, handler, position)
);
create index subscription_retry_due on headwater_internal.subscription_retry (queue_id, due_at);

-- An event `e` as a filter sees it. `data` is the payload, if that is JSON.
create type headwater.filter_event as (
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

create type headwater_internal.filter_match as (
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
    partition        headwater_internal.event_partition,
    topic_offset     headwater_internal.event_offset,
    key              headwater_internal.event_key,
    type             headwater_internal.event_type,
    routing_key      headwater_internal.event_routing_key,
    headers          headwater_internal.event_headers,
    content_type     headwater_internal.event_content_type,
    payload          headwater_internal.event_payload,
    event_id         headwater_internal.event_id,
    published_at     timestamptz
);

-- Filters that are behind their queue: one event took them too long. Nothing is passed over: when a filter is resumed,
-- the queue goes back to `position` and reads up to where it was for this filter alone.
create table headwater_internal.filter_stop (
    queue_id     integer     not null references headwater_internal.queue (id) on delete cascade,
    filter_id    integer     not null references headwater_internal.filter (id) on delete cascade,
    -- The filter has had every event up to here.
    position     bigint      not null check (position >= 0),
    -- Events up to here are never matched again, also not while others catch up.
    done_to      bigint      not null default 0 check (done_to >= 0),
    -- Null: it was resumed, and waits for its turn to catch up or does so.
    stopped_at   timestamptz,
    catching_up  boolean     not null default false,
    error        text        check (length(error) <= 10000),
    primary key (queue_id, filter_id),
    constraint "a filter that catches up is not stopped" check (not catching_up or stopped_at is null)
);
create index filter_stop_filter on headwater_internal.filter_stop (filter_id);

alter table headwater_internal.dead_letter
    add foreign key (subscription_id) references headwater_internal.subscription (id) on delete cascade;
