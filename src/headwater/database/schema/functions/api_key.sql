-- Keys of accounts: made where the key is, found by their hash.

-- Keep a key of an account. Of its sessions, the oldest make room for the newest.
create or replace function headwater.create_api_key(
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
    if not exists (select from headwater.account a where a.name = create_api_key.account) then
        raise exception 'there is no account %', create_api_key.account
            using errcode = 'HW002', hint = 'Make it with headwater account create.',
                detail = json_build_object('account', create_api_key.account)::text;
    end if;
    insert into headwater.api_key (hash, account, session, label, expires_at)
    values (
        create_api_key.hash, create_api_key.account, create_api_key.session, create_api_key.label,
        clock_timestamp() + create_api_key.expires_in
    );
    if create_api_key.session then
        delete from headwater.api_key k
        where
            k.account = create_api_key.account and k.session
            and (
                k.expires_at <= clock_timestamp()
                or k.hash in (
                    select o.hash
                    from headwater.api_key o
                    where o.account = create_api_key.account and o.session
                    order by o.created_at desc, o.hash
                    offset create_api_key.max_sessions
                )
            );
    end if;
end;
$$;

-- Whose key this is; null: nobody's, or not any more. A session whose time is half over is prolonged.
create or replace function headwater.account_of_key(hash bytea, prolong interval default '24 hours')
returns text
language plpgsql
as $$
declare
    found_key headwater.api_key;
begin
    select k.* into found_key
    from headwater.api_key k
    where k.hash = account_of_key.hash and (k.expires_at is null or k.expires_at > clock_timestamp());
    if found_key.session and found_key.expires_at < clock_timestamp() + prolong / 2 then
        update headwater.api_key k set expires_at = clock_timestamp() + prolong where k.hash = account_of_key.hash;
    end if;
    return found_key.account;
end;
$$;

-- Take keys of an account back: the one whose hash begins so, written in hex. How many there were.
create or replace function headwater.delete_api_key(account text, hash_prefix text)
returns integer
language plpgsql
as $$
declare
    gone integer;
begin
    if length(delete_api_key.hash_prefix) < 8 then
        raise exception 'a key is named by at least 8 digits of its hash'
            using errcode = 'HW002', detail = json_build_object('hash', delete_api_key.hash_prefix)::text;
    end if;
    delete from headwater.api_key k
    where k.account = delete_api_key.account and starts_with(encode(k.hash, 'hex'), delete_api_key.hash_prefix);
    get diagnostics gone = row_count;
    return gone;
end;
$$;
