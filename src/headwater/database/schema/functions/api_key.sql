-- API keys of accounts: stored and found by their hash; the key itself never reaches the database.

-- Store a key of an account. The oldest sessions of the account are deleted when there are too many. HW002 if the
-- account does not exist.
create or replace function headwater_internal.create_api_key(
    hash bytea,
    account text,
    label text default '',
    expires_in interval default null,
    session boolean default false,
    max_sessions integer default 16
)
returns void
language plpgsql
as $$
begin
    if not exists (select from headwater_internal.account a where a.name = create_api_key.account) then
        raise exception 'account % does not exist', create_api_key.account
            using errcode = 'HW002', hint = 'Create it: headwater account create.',
                detail = json_build_object('account', create_api_key.account)::text;
    end if;
    insert into headwater_internal.api_key (hash, account, session, label, expires_at)
    values (
        create_api_key.hash, create_api_key.account, create_api_key.session, create_api_key.label,
        clock_timestamp() + create_api_key.expires_in
    );
    if create_api_key.session then
        delete from headwater_internal.api_key k
        where
            k.account = create_api_key.account and k.session
            and (
                k.expires_at <= clock_timestamp()
                or k.hash in (
                    select o.hash
                    from headwater_internal.api_key o
                    where o.account = create_api_key.account and o.session
                    order by o.created_at desc, o.hash
                    offset create_api_key.max_sessions
                )
            );
    end if;
end;
$$;

-- The account of a key; null if the key is unknown or has expired. A session is extended when half of its time is over.
create or replace function headwater_internal.account_of_key(hash bytea, prolong interval default '24 hours')
returns text
language plpgsql
as $$
declare
    found_key headwater_internal.api_key;
begin
    select k.* into found_key
    from headwater_internal.api_key k
    where k.hash = account_of_key.hash and (k.expires_at is null or k.expires_at > clock_timestamp());
    if found_key.session and found_key.expires_at < clock_timestamp() + prolong / 2 then
        update headwater_internal.api_key k set expires_at = clock_timestamp() + prolong where k.hash = account_of_key.hash;
    end if;
    return found_key.account;
end;
$$;

-- Delete the keys of an account whose hash, in hex, begins with a prefix. Returns their number.
create or replace function headwater_internal.delete_api_key(account text, hash_prefix text)
returns integer
language plpgsql
as $$
declare
    gone integer;
begin
    if length(delete_api_key.hash_prefix) < 8 then
        raise exception 'invalid key: expected at least 8 digits of its hash'
            using errcode = 'HW002', detail = json_build_object('hash', delete_api_key.hash_prefix)::text;
    end if;
    delete from headwater_internal.api_key k
    where k.account = delete_api_key.account and starts_with(encode(k.hash, 'hex'), delete_api_key.hash_prefix);
    get diagnostics gone = row_count;
    return gone;
end;
$$;
