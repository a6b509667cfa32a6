-- Kept answers: a request that comes again with its key is answered as the first time, and not done again.

-- Begin a request that has a key, in the transaction that does it. `is_new`: nobody began it; whoever begins it at the
-- same time waits for this transaction. Otherwise `is_same` says whether it is the request of before, and `answer` what
-- that was told.
create or replace function headwater.begin_request(
    key_hash bytea, request_hash bytea, out is_new boolean, out is_same boolean, out answer text
)
language plpgsql
as $$
begin
    loop
        insert into headwater.kept_answer (key_hash, request_hash)
        values (begin_request.key_hash, begin_request.request_hash)
        on conflict do nothing;
        is_new := found;
        exit when is_new;
        select k.request_hash = begin_request.request_hash, k.answer into is_same, answer
        from headwater.kept_answer k
        where k.key_hash = begin_request.key_hash;
        -- Unless it was forgotten just now.
        exit when found;
    end loop;
end;
$$;

-- Keep what a request is answered, for those who repeat it. In the transaction that began it.
create or replace function headwater.keep_answer(key_hash bytea, answer text)
returns void
language sql
begin atomic
    update headwater.kept_answer k
    set answer = keep_answer.answer
    where k.key_hash = keep_answer.key_hash;
end;

-- Forget answers that are older than a day, the oldest first.
create or replace function headwater.forget_answers(
    older_than interval default '1 day', sweep_size integer default 10000
)
returns void
language sql
begin atomic
    delete from headwater.kept_answer k
    where k.key_hash in (
        select o.key_hash
        from headwater.kept_answer o
        where o.kept_at < clock_timestamp() - older_than
        order by o.kept_at
        limit sweep_size
        for update skip locked
    );
end;
