-- Accounts, their permissions and their API keys.

-- Accounts of the HTTP, gRPC and Kafka servers, and their permissions. (Roles of Postgres are separate:
-- they authenticate to Postgres.)
create table headwater_internal.account (
    name            text        primary key
        constraint "an account name is 1 to 200 characters" check (length(name) between 1 and 200),
    -- Verifiers as SCRAM has them, for each of its mechanisms: the password itself is not stored. Null: the account cannot
    -- authenticate with that mechanism.
    salt_256        bytea       check (octet_length(salt_256) between 8 and 64),
    iterations_256  integer
        constraint "iterations are 4096 to 1000000"
        check (iterations_256 between 4096 and 1000000 and iterations_512 between 4096 and 1000000),
    stored_key_256  bytea       check (octet_length(stored_key_256) = 32),
    server_key_256  bytea       check (octet_length(server_key_256) = 32),
    salt_512        bytea       check (octet_length(salt_512) between 8 and 64),
    iterations_512  integer,
    stored_key_512  bytea       check (octet_length(stored_key_512) = 64),
    server_key_512  bytea       check (octet_length(server_key_512) = 64),
    check (num_nulls(salt_256, iterations_256, stored_key_256, server_key_256) in (0, 4)),
    check (num_nulls(salt_512, iterations_512, stored_key_512, server_key_512) in (0, 4)),
    -- May do everything, and grant permissions to others.
    administrator   boolean     not null default false,
    created_at      timestamptz not null default clock_timestamp()
);

create table headwater_internal.permission (
    account  text    not null
        constraint "an account name is 1 to 200 characters" check (length(account) between 1 and 200),
    action   text    not null
        constraint "actions are read, write, create, delete, alter, describe, all"
        check (action in ('read', 'write', 'create', 'delete', 'alter', 'describe', 'all')),
    kind     text    not null
        constraint "a permission is for a topic, consumer, transaction or the log"
        check (kind in ('topic', 'consumer', 'transaction', 'log')),
    -- Of all that begin with the name, if `prefix`; `*` stands for all.
    name     text    not null check (length(name) between 1 and 32767),
    prefix   boolean not null default false,
    primary key (account, action, kind, name, prefix)
);
comment on column headwater_internal.permission.account is 'the name of an account, or * for everybody';

-- API keys: programs authenticate with them instead of a password.

create table headwater_internal.api_key (
    -- SHA-256 of the key. Keys are random and long, so nothing slower is needed, and the key itself is nowhere.
    hash       bytea       primary key check (octet_length(hash) = 32),
    account    text        not null references headwater_internal.account (name) on delete cascade,
    -- A session is a key that a server issued after a login with a password; each use extends it.
    session    boolean     not null default false,
    label      text        not null default ''
        constraint "the label of a key is up to 200 characters" check (length(label) <= 200),
    created_at timestamptz not null default clock_timestamp(),
    -- Null: until it is taken back.
    expires_at timestamptz,
    constraint "a session ends" check (not session or expires_at is not null)
);
create index api_key_account on headwater_internal.api_key (account, created_at);
