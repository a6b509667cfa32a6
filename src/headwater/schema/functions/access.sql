-- Accounts of the doors that listen, and what they may do.

-- Make an account, or give it a new password: the verifiers are made where the password is. Who came in with the old
-- password has to come in again.
create or replace function headwater.set_account(
    name text,
    salt bytea,
    iterations integer,
    stored_key_256 bytea,
    server_key_256 bytea,
    stored_key_512 bytea,
    server_key_512 bytea,
    administrator boolean default null
)
returns void
language sql
begin atomic
    insert into headwater.account as a
        (name, salt, iterations, stored_key_256, server_key_256, stored_key_512, server_key_512, administrator)
    values (
        set_account.name, set_account.salt, set_account.iterations, set_account.stored_key_256,
        set_account.server_key_256, set_account.stored_key_512, set_account.server_key_512,
        coalesce(set_account.administrator, false)
    )
    on conflict (name) do update
    set
        salt = excluded.salt,
        iterations = excluded.iterations,
        stored_key_256 = excluded.stored_key_256,
        server_key_256 = excluded.server_key_256,
        stored_key_512 = excluded.stored_key_512,
        server_key_512 = excluded.server_key_512,
        administrator = coalesce(set_account.administrator, a.administrator);
    delete from headwater.api_key k where k.account = set_account.name and k.session;
end;

-- Whether no account has a name. Until the transaction ends nobody else makes one, or changes one.
create or replace function headwater.account_is_free(name text)
returns boolean
language plpgsql
volatile
as $$
begin
    lock table headwater.account in share row exclusive mode;
    -- In a new snapshot: what others made before the lock is seen.
    return not exists (select from headwater.account a where a.name = account_is_free.name);
end;
$$;

-- Delete an account with its permissions. False: there is none.
create or replace function headwater.delete_account(name text)
returns boolean
language plpgsql
as $$
begin
    delete from headwater.permission p where p.account = delete_account.name;
    delete from headwater.account a where a.name = delete_account.name;
    return found;
end;
$$;

-- Allow something; what is allowed already stays so.
create or replace function headwater.allow(account text, action text, kind text, name text, prefix boolean default false)
returns void
language sql
begin atomic
    insert into headwater.permission (account, action, kind, name, prefix)
    values (allow.account, allow.action, allow.kind, allow.name, allow.prefix)
    on conflict do nothing;
end;

-- Take a permission back. False: it was not given.
create or replace function headwater.disallow(account text, action text, kind text, name text, prefix boolean default false)
returns boolean
language plpgsql
as $$
begin
    delete from headwater.permission p
    where
        p.account = disallow.account and p.action = disallow.action and p.kind = disallow.kind
        and p.name = disallow.name and p.prefix = disallow.prefix;
    return found;
end;
$$;
