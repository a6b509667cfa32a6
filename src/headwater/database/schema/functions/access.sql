-- Accounts of the servers, and their permissions.

-- Create an account, or set a new password: the verifiers are computed where the password is known. Sessions created
-- with the old password end.
create or replace function headwater_internal.set_account(
    name text,
    salt_256 bytea,
    iterations_256 integer,
    stored_key_256 bytea,
    server_key_256 bytea,
    salt_512 bytea,
    iterations_512 integer,
    stored_key_512 bytea,
    server_key_512 bytea,
    administrator boolean default null
)
returns void
language sql
begin atomic
    insert into headwater_internal.account as a
        (name, salt_256, iterations_256, stored_key_256, server_key_256, salt_512, iterations_512, stored_key_512,
         server_key_512, administrator)
    values (
        set_account.name, set_account.salt_256, set_account.iterations_256, set_account.stored_key_256,
        set_account.server_key_256, set_account.salt_512, set_account.iterations_512, set_account.stored_key_512,
        set_account.server_key_512, coalesce(set_account.administrator, false)
    )
    on conflict (name) do update
    set
        salt_256 = excluded.salt_256,
        iterations_256 = excluded.iterations_256,
        stored_key_256 = excluded.stored_key_256,
        server_key_256 = excluded.server_key_256,
        salt_512 = excluded.salt_512,
        iterations_512 = excluded.iterations_512,
        stored_key_512 = excluded.stored_key_512,
        server_key_512 = excluded.server_key_512,
        administrator = coalesce(set_account.administrator, a.administrator);
    delete from headwater_internal.api_key k where k.account = set_account.name and k.session;
end;

-- Set the verifiers of an account for one mechanism; a missing account is created. Without verifiers: delete those of
-- the mechanism; false if there are none.
create or replace function headwater_internal.set_credential(
    name text,
    mechanism text,
    salt bytea,
    iterations integer,
    stored_key bytea,
    server_key bytea
)
returns boolean
language plpgsql
as $$
declare
    first constant boolean := mechanism = 'SCRAM-SHA-256';
begin
    if salt is not null then
        insert into headwater_internal.account (name) values (set_credential.name) on conflict do nothing;
    end if;
    update headwater_internal.account a
    set
        salt_256 = case when first then salt else a.salt_256 end,
        iterations_256 = case when first then iterations else a.iterations_256 end,
        stored_key_256 = case when first then stored_key else a.stored_key_256 end,
        server_key_256 = case when first then server_key else a.server_key_256 end,
        salt_512 = case when first then a.salt_512 else salt end,
        iterations_512 = case when first then a.iterations_512 else iterations end,
        stored_key_512 = case when first then a.stored_key_512 else stored_key end,
        server_key_512 = case when first then a.server_key_512 else server_key end
    where
        a.name = set_credential.name
        and (salt is not null or case when first then a.salt_256 else a.salt_512 end is not null);
    return found;
end;
$$;

-- Whether no account has a name. Until the transaction ends, no other transaction can create or change an account.
create or replace function headwater_internal.account_is_free(name text)
returns boolean
language plpgsql
volatile
as $$
begin
    lock table headwater_internal.account in share row exclusive mode;
    -- In a new snapshot, which sees accounts created before the lock was acquired.
    return not exists (select from headwater_internal.account a where a.name = account_is_free.name);
end;
$$;

-- Delete an account with its permissions. Returns false if it does not exist.
create or replace function headwater_internal.delete_account(name text)
returns boolean
language plpgsql
as $$
begin
    delete from headwater_internal.permission p where p.account = delete_account.name;
    delete from headwater_internal.account a where a.name = delete_account.name;
    return found;
end;
$$;

-- Grant a permission; does nothing if it was already granted.
create or replace function headwater_internal.allow(account text, action text, kind text, name text, prefix boolean default false)
returns void
language sql
begin atomic
    insert into headwater_internal.permission (account, action, kind, name, prefix)
    values (allow.account, allow.action, allow.kind, allow.name, allow.prefix)
    on conflict do nothing;
end;

-- Revoke a permission. Returns false if it was not granted.
create or replace function headwater_internal.disallow(account text, action text, kind text, name text, prefix boolean default false)
returns boolean
language plpgsql
as $$
begin
    delete from headwater_internal.permission p
    where
        p.account = disallow.account and p.action = disallow.action and p.kind = disallow.kind
        and p.name = disallow.name and p.prefix = disallow.prefix;
    return found;
end;
$$;
