-- Keys with which programs come in by the doors that listen, instead of a password.

create table headwater.api_key (
    -- SHA-256 of the key. Keys are random and long, so nothing slower is needed, and the key itself is nowhere.
    hash       bytea       primary key check (octet_length(hash) = 32),
    account    text        not null references headwater.account (name) on delete cascade,
    -- A session is a key that a door gave to somebody who came with a password; each use prolongs it.
    session    boolean     not null default false,
    label      text        not null default ''
        constraint "the label of a key is up to 200 characters" check (length(label) <= 200),
    created_at timestamptz not null default clock_timestamp(),
    -- Null: until it is taken back.
    expires_at timestamptz,
    constraint "a session ends" check (not session or expires_at is not null)
);
create index api_key_account on headwater.api_key (account, created_at);
