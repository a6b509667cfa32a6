-- Webhooks: which queue is sent to which URL, and how fast. The events are claimed and settled as those of any queue.

-- The webhook of that name; HW011 if it does not exist.
create or replace function headwater_internal.find_webhook(webhook_name text)
returns headwater_internal.webhook
language plpgsql
stable
as $$
declare
    found_webhook headwater_internal.webhook;
begin
    select * into found_webhook from headwater_internal.webhook w where w.name = webhook_name;
    if not found then
        raise exception 'webhook "%" does not exist', webhook_name
            using errcode = 'HW011',
                  detail = json_build_object('webhook', webhook_name)::text,
                  hint = 'List webhooks: headwater webhook list. Create one: headwater webhook create.';
    end if;
    return found_webhook;
end;
$$;

-- HW002 unless a secret is 'whsec_' followed by 24 to 64 bytes in base64, as Standard Webhooks defines it.
create or replace function headwater_internal.refuse_bad_secret(secret text)
returns void
language plpgsql
immutable
as $$
declare
    key_bytes bytea;
begin
    if secret ~ '^whsec_[A-Za-z0-9+/]+={0,2}$' then
        begin
            key_bytes := decode(substr(secret, 7), 'base64');
        exception
            when invalid_parameter_value then null;
        end;
    end if;
    if key_bytes is null or length(key_bytes) not between 24 and 64 then
        -- The message does not contain the secret: messages end up in logs.
        raise exception 'invalid secret: expected whsec_ followed by 24 to 64 bytes in base64'
            using errcode = 'HW002', hint = 'Omit it to have one generated.';
    end if;
end;
$$;

-- HW002 unless the headers are valid in HTTP, and none of them is set by the delivery itself.
create or replace function headwater_internal.refuse_bad_webhook_headers(headers jsonb)
returns void
language plpgsql
immutable
as $$
declare
    bad text;
begin
    if jsonb_typeof(headers) <> 'object' or pg_column_size(headers) > 16384 then
        raise exception 'invalid webhook headers: expected a JSON object of at most 16 kB' using errcode = 'HW002';
    end if;
    select h.key into bad
    from jsonb_each(headers) as h
    where
        h.key !~ '^[A-Za-z0-9!#$%&''*+.^_`|~-]{1,200}$'
        or jsonb_typeof(h.value) <> 'string'
        or (h.value #>> '{}') !~ '^([!-~]([ -~]*[!-~])?)?$'
    limit 1;
    if bad is not null then
        raise exception 'invalid header "%": expected a token as name and printable ASCII as value', bad
            using errcode = 'HW002';
    end if;
    select h.key into bad
    from jsonb_object_keys(headers) as h (key)
    where
        lower(h.key) ~ '^(webhook-|headwater-|ce-|content-|proxy-)'
        or lower(h.key) in ('host', 'connection', 'keep-alive', 'te', 'trailer', 'transfer-encoding', 'upgrade', 'expect')
    limit 1;
    if bad is not null then
        raise exception 'header "%" is reserved: the delivery sets it', bad using errcode = 'HW002';
    end if;
end;
$$;

-- Create a webhook that sends the events of a queue, or those that its SQL subscriptions match, to a URL. HW013 if a
-- webhook of that name exists, or if the queue already has one.
create or replace function headwater_internal.create_webhook(
    webhook_name text,
    queue_name text,
    url text,
    secret text,
    headers jsonb default null,
    body text default null,
    timeout_seconds float8 default null,
    rate_per_second float8 default null,
    gzip_above_bytes integer default null,
    client_errors text default null
)
returns headwater_internal.webhook
language plpgsql
as $$
declare
    target constant headwater_internal.queue := headwater_internal.find_queue(queue_name);
    created headwater_internal.webhook;
    other text;
begin
    perform headwater_internal.refuse_bad_secret(secret);
    perform headwater_internal.refuse_bad_webhook_headers(coalesce(create_webhook.headers, '{}'));
    insert into headwater_internal.webhook (
        name, queue_id, url, secrets, headers, body, timeout_seconds, rate_per_second, gzip_above_bytes, client_errors
    )
    values (
        webhook_name,
        target.id,
        create_webhook.url,
        array[secret],
        coalesce(create_webhook.headers, '{}'),
        coalesce(create_webhook.body, 'envelope'),
        coalesce(create_webhook.timeout_seconds, 15),
        nullif(create_webhook.rate_per_second, 0),
        nullif(create_webhook.gzip_above_bytes, 0),
        coalesce(create_webhook.client_errors, 'retry')
    )
    on conflict do nothing
    returning * into created;
    if created.id is null then
        select w.name into other from headwater_internal.webhook w where w.queue_id = target.id and w.name <> webhook_name;
        if other is not null then
            raise exception 'queue "%" already has the webhook "%"', queue_name, other
                using errcode = 'HW013',
                      detail = json_build_object('webhook', other, 'queue', queue_name)::text,
                      hint = 'Create another queue for a second receiver.';
        end if;
        raise exception 'webhook "%" already exists', webhook_name
            using errcode = 'HW013', detail = json_build_object('webhook', webhook_name)::text;
    end if;
    return created;
end;
$$;

-- Change the settings of a webhook and return it; null leaves a setting unchanged; 0 removes the rate limit, or turns
-- compression off. HW011 if it does not exist.
create or replace function headwater_internal.alter_webhook(
    webhook_name text,
    url text default null,
    headers jsonb default null,
    body text default null,
    timeout_seconds float8 default null,
    rate_per_second float8 default null,
    gzip_above_bytes integer default null,
    client_errors text default null
)
returns headwater_internal.webhook
language plpgsql
as $$
declare
    altered headwater_internal.webhook := headwater_internal.find_webhook(webhook_name);
begin
    perform headwater_internal.refuse_bad_webhook_headers(coalesce(alter_webhook.headers, '{}'));
    update headwater_internal.webhook w
    set
        url = coalesce(alter_webhook.url, w.url),
        headers = coalesce(alter_webhook.headers, w.headers),
        body = coalesce(alter_webhook.body, w.body),
        timeout_seconds = coalesce(alter_webhook.timeout_seconds, w.timeout_seconds),
        rate_per_second = nullif(coalesce(alter_webhook.rate_per_second, w.rate_per_second), 0),
        gzip_above_bytes = nullif(coalesce(alter_webhook.gzip_above_bytes, w.gzip_above_bytes), 0),
        client_errors = coalesce(alter_webhook.client_errors, w.client_errors),
        version = w.version + 1,
        updated_at = clock_timestamp()
    where w.id = altered.id
    returning * into altered;
    return altered;
end;
$$;

-- Set the state of a webhook: 'active', 'paused' (by a user) or 'disabled' (because of its receiver). With
-- `seen_version`, only if the webhook has not changed since; otherwise it is returned unchanged.
create or replace function headwater_internal.set_webhook_state(
    webhook_name text, state text, reason text default null, seen_version bigint default null
)
returns headwater_internal.webhook
language plpgsql
as $$
declare
    altered headwater_internal.webhook := headwater_internal.find_webhook(webhook_name);
begin
    update headwater_internal.webhook w
    set
        state = set_webhook_state.state,
        state_reason = case when set_webhook_state.state <> 'active' then left(reason, 1000) end,
        version = w.version + 1,
        updated_at = clock_timestamp()
    where w.id = altered.id and (seen_version is null or w.version = seen_version);
    return headwater_internal.find_webhook(webhook_name);
end;
$$;

-- Sign with a new secret from now on, and also with the `keep` newest of the previous ones.
create or replace function headwater_internal.rotate_webhook_secret(webhook_name text, secret text, keep integer default 1)
returns headwater_internal.webhook
language plpgsql
as $$
declare
    altered headwater_internal.webhook := headwater_internal.find_webhook(webhook_name);
begin
    perform headwater_internal.refuse_bad_secret(secret);
    if keep not between 0 and 4 then
        raise exception 'invalid keep: expected 0 to 4 previous secrets' using errcode = 'HW002';
    end if;
    update headwater_internal.webhook w
    set
        secrets = array[secret] || (array_remove(w.secrets, secret))[:keep],
        version = w.version + 1,
        updated_at = clock_timestamp()
    where w.id = altered.id
    returning * into altered;
    return altered;
end;
$$;

-- Delete a webhook; its queue stays, with the events that were not sent. Returns false if it does not exist.
create or replace function headwater_internal.delete_webhook(webhook_name text)
returns boolean
language plpgsql
as $$
begin
    delete from headwater_internal.webhook w where w.name = webhook_name;
    return found;
end;
$$;

-- Reserve the next sending slot of a webhook with a rate limit. Returns the seconds until it; null if the webhook was
-- deleted.
create or replace function headwater_internal.next_webhook_turn(webhook_id integer, rate_per_second float8)
returns float8
language sql
volatile
begin atomic
    insert into headwater_internal.webhook_pace as p (webhook_id, next_at)
    select w.id, clock_timestamp() + make_interval(secs => 1 / next_webhook_turn.rate_per_second)
    from headwater_internal.webhook w
    where w.id = next_webhook_turn.webhook_id
    on conflict (webhook_id) do update
        -- A slot reserved for later than its own date proves that the clock was set back.
        set next_at = greatest(case when p.dated_at <= clock_timestamp() then p.next_at end, clock_timestamp())
                + make_interval(secs => 1 / next_webhook_turn.rate_per_second),
            dated_at = clock_timestamp()
    returning greatest(
        extract(epoch from p.next_at - clock_timestamp())::float8 - 1 / next_webhook_turn.rate_per_second, 0
    );
end;
