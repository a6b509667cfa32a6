-- Responses to requests with an idempotency key: a repeated request does nothing and gets the same response.

create table headwater_internal.kept_answer (
    -- SHA-256 of who asked, for what, and the key.
    key_hash     bytea       primary key check (octet_length(key_hash) = 32),
    -- SHA-256 of what was asked: the same key with another request is refused.
    request_hash bytea       not null check (octet_length(request_hash) = 32),
    -- Null only within the transaction that does what was asked.
    answer       text,
    kept_at      timestamptz not null default clock_timestamp()
);
create index kept_answer_kept_at on headwater_internal.kept_answer (kept_at);
