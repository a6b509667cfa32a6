-- Idempotency keys: a request repeated with its key gets the response of the first one, and is not executed again.

-- Begin a request that has a key, in the transaction that executes it. `is_new`: it is the first one; a concurrent
-- request with the same key waits for this transaction. Otherwise `is_same` says whether it equals the first request,
-- and `answer` is the response to that.
create or replace function headwater_internal.begin_request(
    key_hash bytea, request_hash bytea, out is_new boolean, out is_same boolean, out answer text
)
language plpgsql
as $$
begin
    loop
        insert into headwater_internal.kept_answer (key_hash, request_hash)
        values (begin_request.key_hash, begin_request.request_hash)
        on conflict do nothing;
        is_new := found;
        exit when is_new;
        select k.request_hash = begin_request.request_hash, k.answer into is_same, answer
        from headwater_internal.kept_answer k
        where k.key_hash = begin_request.key_hash;
        -- Unless it was deleted at this moment.
        exit when found;
    end loop;
end;
$$;

-- Store the response to a request, for repeated ones. Called in the transaction that began it.
create or replace function headwater_internal.keep_answer(key_hash bytea, answer text)
returns void
language sql
begin atomic
    update headwater_internal.kept_answer k
    set answer = keep_answer.answer
    where k.key_hash = keep_answer.key_hash;
end;

-- Delete responses that are older than a day, the oldest first.
create or replace function headwater_internal.forget_answers(
    older_than interval default '1 day', sweep_size integer default 10000
)
returns void
language sql
begin atomic
    delete from headwater_internal.kept_answer k
    where k.key_hash in (
        select o.key_hash
        from headwater_internal.kept_answer o
        where o.kept_at < clock_timestamp() - older_than
        order by o.kept_at
        limit sweep_size
        for update skip locked
    );
end;
