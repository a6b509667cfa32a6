-- Webhooks: queues whose events are sent to a URL.

create table headwater_internal.webhook (
    id               integer     generated always as identity primary key,
    name             text        not null unique
        constraint "a webhook name is 1 to 200 characters" check (length(name) between 1 and 200),
    -- Bindings, retries, dead letters and how many are sent at once are the queue's to say.
    queue_id         integer     not null unique references headwater_internal.queue (id) on delete cascade,
    -- Begins the id of everything that is sent, so that ids of two logs never meet at one receiver.
    uid              uuid        not null default gen_random_uuid(),
    url              text        not null
        constraint "a url is http(s)://, a host without a user, up to 2000 of ASCII" check (
            length(url) <= 2000
            and url ~ '^https?://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~%-]+)(:[0-9]{1,5})?([/?#][!-~]*)?$'
            and coalesce(substring(url from '^https?://[^/?#]*:([0-9]{1,5})(?:[/?#]|$)')::integer, 1) between 1 and 65535
        ),
    -- Each signs, the newest first: a receiver may know any of them while they change.
    secrets          text[]      not null constraint "a webhook has 1 to 5 secrets" check (cardinality(secrets) between 1 and 5),
    headers          jsonb       not null default '{}',
    body             text        not null default 'envelope'
        constraint "a body is envelope, raw, cloudevents-structured or -binary"
            check (body in ('envelope', 'raw', 'cloudevents-structured', 'cloudevents-binary')),
    timeout_seconds  float8      not null default 15
        constraint "a timeout is 0.1 to 300 seconds" check (timeout_seconds between 0.1 and 300),
    -- Null: as fast as the receiver answers.
    rate_per_second  float8
        constraint "a rate is 0.01 to 10000 a second" check (rate_per_second between 0.01 and 10000),
    -- Null: never compressed.
    gzip_above_bytes integer
        constraint "bodies are compressed above 1 byte or more" check (gzip_above_bytes >= 1),
    client_errors    text        not null default 'retry'
        constraint "client errors mean retry or dead" check (client_errors in ('retry', 'dead')),
    state            text        not null default 'active'
        constraint "a webhook is active, paused or disabled" check (state in ('active', 'paused', 'disabled')),
    state_reason     text        constraint "a reason is up to 1000 characters" check (length(state_reason) <= 1000),
    -- Counts changes: who decides by what was read may find that it is no longer so.
    version          bigint      not null default 1,
    created_at       timestamptz not null default clock_timestamp(),
    updated_at       timestamptz not null default clock_timestamp()
);

-- When the next request of a webhook with a rate may be sent, whichever process sends it. Unlogged: after a crash
-- no request waits.
create unlogged table headwater_internal.webhook_pace (
    webhook_id integer     primary key references headwater_internal.webhook (id) on delete cascade,
    next_at    timestamptz not null,
    dated_at   timestamptz not null default clock_timestamp()
) with (fillfactor = 20);
