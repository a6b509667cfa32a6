-- Webhooks: what is sent where, and how fast. The events themselves are claimed and settled as those of any queue.

-- The webhook of that name, or HW011.
create or replace function headwater.find_webhook(webhook_name text)
returns headwater.webhook
language plpgsql
stable
as $$
declare
    found_webhook headwater.webhook;
begin
    select * into found_webhook from headwater.webhook w where w.name = webhook_name;
    if not found then
        raise exception 'there is no webhook "%"', webhook_name
            using errcode = 'HW011',
                  detail = json_build_object('webhook', webhook_name)::text,
                  hint = 'See headwater webhook list; make one with headwater webhook create.';
    end if;
    return found_webhook;
end;
$$;

-- A secret is 'whsec_' and 24 to 64 bytes in base64, as the Standard Webhooks scheme has it.
create or replace function headwater.refuse_bad_secret(secret text)
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
        -- Without the secret itself: messages end up in logs.
        raise exception 'a secret is whsec_ followed by 24 to 64 bytes in base64'
            using errcode = 'HW002', hint = 'Leave it out to have one made.';
    end if;
end;
$$;

-- Headers are names and values that HTTP can carry, and none that delivery itself sets.
create or replace function headwater.refuse_bad_webhook_headers(headers jsonb)
returns void
language plpgsql
immutable
as $$
declare
    bad text;
begin
    if jsonb_typeof(headers) <> 'object' or pg_column_size(headers) > 16384 then
        raise exception 'the headers of a webhook are an object of up to 16 kB' using errcode = 'HW002';
    end if;
    select h.key into bad
    from jsonb_each(headers) as h
    where
        h.key !~ '^[A-Za-z0-9!#$%&''*+.^_`|~-]{1,200}$'
        or jsonb_typeof(h.value) <> 'string'
        or (h.value #>> '{}') !~ '^([!-~]([ -~]*[!-~])?)?$'
    limit 1;
    if bad is not null then
        raise exception 'header "%" cannot be sent: names are tokens, values are printable ASCII', bad
            using errcode = 'HW002';
    end if;
    select h.key into bad
    from jsonb_object_keys(headers) as h (key)
    where
        lower(h.key) ~ '^(webhook-|headwater-|content-|proxy-)'
        or lower(h.key) in ('host', 'connection', 'keep-alive', 'te', 'trailer', 'transfer-encoding', 'upgrade', 'expect')
    limit 1;
    if bad is not null then
        raise exception 'header "%" is set by the delivery itself', bad using errcode = 'HW002';
    end if;
end;
$$;

-- Send the events of a group to a URL: those of a queue, or those that its SQL subscriptions match. HW013 if there is such a webhook, or the queue has one already.
create or replace function headwater.create_webhook(
    webhook_name text,
    group_name text,
    url text,
    secret text,
    headers jsonb default null,
    body text default null,
    timeout_seconds float8 default null,
    rate_per_second float8 default null,
    gzip_above_bytes integer default null,
    client_errors text default null
)
returns headwater.webhook
language plpgsql
as $$
declare
    target constant headwater.consumer_group := headwater.find_group(group_name);
    created headwater.webhook;
    other text;
begin
    perform headwater.refuse_bad_secret(secret);
    perform headwater.refuse_bad_webhook_headers(coalesce(create_webhook.headers, '{}'));
    insert into headwater.webhook (
        name, group_id, url, secrets, headers, body, timeout_seconds, rate_per_second, gzip_above_bytes, client_errors
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
        select w.name into other from headwater.webhook w where w.group_id = target.id and w.name <> webhook_name;
        if other is not null then
            raise exception 'group "%" is sent by webhook "%" already', group_name, other
                using errcode = 'HW013',
                      detail = json_build_object('webhook', other, 'group', group_name)::text,
                      hint = 'A second receiver needs a group of its own.';
        end if;
        raise exception 'webhook "%" exists already', webhook_name
            using errcode = 'HW013', detail = json_build_object('webhook', webhook_name)::text;
    end if;
    return created;
end;
$$;

-- Change what can change; null leaves a setting as it is; 0 removes the rate, or turns compression off.
create or replace function headwater.alter_webhook(
    webhook_name text,
    url text default null,
    headers jsonb default null,
    body text default null,
    timeout_seconds float8 default null,
    rate_per_second float8 default null,
    gzip_above_bytes integer default null,
    client_errors text default null
)
returns headwater.webhook
language plpgsql
as $$
declare
    altered headwater.webhook := headwater.find_webhook(webhook_name);
begin
    perform headwater.refuse_bad_webhook_headers(coalesce(alter_webhook.headers, '{}'));
    update headwater.webhook w
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

-- Let a webhook send ('active') or not ('paused', by somebody; 'disabled', by its receiver). `seen_version`: only if
-- nobody has changed it since; otherwise it is returned as it is.
create or replace function headwater.set_webhook_state(
    webhook_name text, state text, reason text default null, seen_version bigint default null
)
returns headwater.webhook
language plpgsql
as $$
declare
    altered headwater.webhook := headwater.find_webhook(webhook_name);
begin
    update headwater.webhook w
    set
        state = set_webhook_state.state,
        state_reason = case when set_webhook_state.state <> 'active' then left(reason, 1000) end,
        version = w.version + 1,
        updated_at = clock_timestamp()
    where w.id = altered.id and (seen_version is null or w.version = seen_version);
    return headwater.find_webhook(webhook_name);
end;
$$;

-- Sign with another secret from now on, and with the `keep` newest of those before it too.
create or replace function headwater.rotate_webhook_secret(webhook_name text, secret text, keep integer default 1)
returns headwater.webhook
language plpgsql
as $$
declare
    altered headwater.webhook := headwater.find_webhook(webhook_name);
begin
    perform headwater.refuse_bad_secret(secret);
    if keep not between 0 and 4 then
        raise exception 'of the secrets before, 0 to 4 can be kept' using errcode = 'HW002';
    end if;
    update headwater.webhook w
    set
        secrets = array[secret] || (array_remove(w.secrets, secret))[:keep],
        version = w.version + 1,
        updated_at = clock_timestamp()
    where w.id = altered.id
    returning * into altered;
    return altered;
end;
$$;

-- Forget a webhook; its group stays, with what was not sent. False: there is none.
create or replace function headwater.delete_webhook(webhook_name text)
returns boolean
language plpgsql
as $$
begin
    delete from headwater.webhook w where w.name = webhook_name;
    return found;
end;
$$;

-- The next turn of a webhook that has a rate, whoever asks: how many seconds until it; null if it was deleted.
create or replace function headwater.next_webhook_turn(webhook_id integer, rate_per_second float8)
returns float8
language sql
volatile
begin atomic
    insert into headwater.webhook_pace as p (webhook_id, next_at)
    select w.id, clock_timestamp() + make_interval(secs => 1 / next_webhook_turn.rate_per_second)
    from headwater.webhook w
    where w.id = next_webhook_turn.webhook_id
    on conflict (webhook_id) do update
        -- A turn that was given later than now is of before the clock went back.
        set next_at = greatest(case when p.dated_at <= clock_timestamp() then p.next_at end, clock_timestamp())
                + make_interval(secs => 1 / next_webhook_turn.rate_per_second),
            dated_at = clock_timestamp()
    returning greatest(
        extract(epoch from p.next_at - clock_timestamp())::float8 - 1 / next_webhook_turn.rate_per_second, 0
    );
end;
