-- Lag: how many events of its own topics a consumer has not received yet, and how old the first of them is.
--
-- Counts are exact up to a limit; beyond it they say that there are more. Positions are never counted, since those of
-- other topics are not lag. The index finds the events of a topic, not those of a range of positions, so the last
-- position of every topic is looked up once for all consumers, and for each consumer only the topics with later events
-- are read.

-- The topics with events after a position, up to the head, in ascending order of their last positions; the last
-- position by topic id, 0 for the others; and the highest expired position of any topic. With `topic_ids`: of these
-- topics only.
create or replace function headwater_internal.topic_ends(
    after bigint,
    topic_ids integer[] default null,
    out ids integer[],
    out ends bigint[],
    out end_by_id bigint[],
    out expired_to bigint
)
language plpgsql
stable
-- The bounds must be known at plan time, so that Postgres prunes the other segments.
set plan_cache_mode = force_custom_plan
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
    head constant bigint := coalesce(pg_sequence_last_value('headwater_internal.position'), 0);
begin
    select array_agg(t.id order by l.position), array_agg(l.position order by l.position)
    into ids, ends
    from headwater_internal.topic t
    cross join lateral (
        select e.position
        from headwater_internal.event e
        where
            e.topic_id = t.id and e.position > after and e.position <= head
            and e.position > t.expired_to
        order by e.position desc
        limit 1
    ) as l
    where t.deleted_at is null and (topic_ends.topic_ids is null or t.id = any (topic_ends.topic_ids));
    select coalesce(max(t.expired_to), 0) into topic_ends.expired_to from headwater_internal.topic t;
    ids := coalesce(ids, '{}');
    ends := coalesce(ends, '{}');
    select coalesce(array_agg(coalesce(f.position, 0) order by n.id), '{}') into end_by_id
    from generate_series(1, (select max(i.id) from unnest(ids) as i (id))) as n (id)
    left join unnest(ids, ends) as f (id, position) on f.id = n.id;
end;
$$;

-- The number of events of these topics after a position, counted up to `most`, and the age in seconds of the first of
-- them. With many topics the age is taken from some of them only, those that ended first: it is then a minimum.
-- `expired_to`, if known, is the highest expired position of any topic.
create or replace function headwater_internal.lag_of(
    topic_ids integer[],
    after bigint,
    most integer default 1000,
    expired_to bigint default null,
    out events bigint,
    out is_more boolean,
    out seconds float8
)
language plpgsql
stable
set enable_seqscan = off
set enable_bitmapscan = off
as $$
begin
    if
        coalesce(lag_of.expired_to > after, true)
        and exists (select from headwater_internal.topic t where t.id = any (lag_of.topic_ids) and t.expired_to > after)
    then
        -- Some of the events have expired and may still wait to be deleted.
        select count(*) into events
        from (
            select
            from unnest(lag_of.topic_ids) as i (id)
            join headwater_internal.topic t on t.id = i.id
            cross join lateral (
                select from headwater_internal.event e
                where e.topic_id = t.id and e.position > greatest(after, t.expired_to)
                limit most + 1
            ) as f
            limit most + 1
        ) as counted;
    else
        select count(*) into events
        from (
            select from headwater_internal.event e
            where e.topic_id = any (lag_of.topic_ids) and e.position > after
            limit most + 1
        ) as counted;
    end if;
    is_more := events > most;
    events := least(events, most);
    if events > 0 then
        seconds := headwater_internal.seconds_behind(lag_of.topic_ids[:greatest(most / 5, 100)], after);
    end if;
end;
$$;

-- The age in seconds of the first event of these topics after a position; null if there is none.
create or replace function headwater_internal.seconds_behind(topic_ids integer[], after bigint)
returns float8
language sql
stable
return (
    select greatest(extract(epoch from clock_timestamp() - min(f.published_at)), 0)::float8
    from unnest(topic_ids) as i (id)
    join headwater_internal.topic t on t.id = i.id
    cross join lateral (
        select e.published_at
        from headwater_internal.event e
        where e.topic_id = t.id and e.position > greatest(after, t.expired_to)
        order by e.position
        limit 1
    ) as f
);

-- The ids of those of the named topics (null: of all) that have events after a position.
create or replace function headwater_internal.topics_behind(topics text[], after bigint)
returns integer[]
language sql
stable
begin atomic
    select e.ids
    from headwater_internal.topic_ends(
        after,
        case
            when topics_behind.topics is not null then
                array(
                    select t.id from headwater_internal.topic t
                    where t.name = any (topics_behind.topics) and t.deleted_at is null
                )
        end
    ) as e;
end;

-- The lag of every cursor, or of those named.
create or replace function headwater_internal.cursor_lags(names text[] default null, most integer default 1000)
returns table (name text, lag_events bigint, lag_is_more boolean, lag_seconds float8)
language plpgsql
stable
as $$
declare
    head constant bigint := coalesce(pg_sequence_last_value('headwater_internal.position'), 0);
    known record;
    one headwater_internal.cursor;
    ids integer[];
begin
    select e.* into known
    from (
        select min(c.position) as lowest from headwater_internal.cursor c
        where c.position < head and (names is null or c.name = any (names))
    ) as l
    cross join lateral headwater_internal.topic_ends(coalesce(l.lowest, head)) as e;
    for one in select * from headwater_internal.cursor c where names is null or c.name = any (names) order by c.name loop
        name := one.name;
        lag_events := 0;
        lag_is_more := false;
        lag_seconds := null;
        ids := known.ids[width_bucket(one.position, known.ends) + 1:];
        if one.position < head and cardinality(ids) > 0 then
            if one.topics is not null then
                ids := array(
                    select t.id from headwater_internal.topic t
                    where
                        t.name = any (one.topics) and t.deleted_at is null
                        and known.end_by_id[t.id] > one.position
                );
            end if;
            select l.events, l.is_more, l.seconds into lag_events, lag_is_more, lag_seconds
            from headwater_internal.lag_of(ids, one.position, most, known.expired_to) as l;
        end if;
        return next;
    end loop;
end;
$$;

-- How many records of a partition a Kafka consumer group has not received yet, and the offset after the last record.
-- Offsets of a sequenced topic are dense; those of an open topic are positions, and its events are counted up to 1000.
create or replace function headwater_internal.kafka_lag(
    topic_id integer,
    partition integer,
    committed_offset bigint,
    out events bigint,
    out is_more boolean,
    out end_offset bigint
)
language plpgsql
volatile
set enable_seqscan = off
set enable_bitmapscan = off
as $$
begin
    is_more := false;
    if (select t.kind from headwater_internal.topic t where t.id = kafka_lag.topic_id) = 'sequenced' then
        end_offset := greatest(headwater_internal.next_offset(kafka_lag.topic_id, kafka_lag.partition), committed_offset);
        events := end_offset - committed_offset;
        return;
    end if;
    select count(*) into events
    from (
        select from headwater_internal.event e
        where
            e.topic_id = kafka_lag.topic_id and e.partition = kafka_lag.partition
            and e.position >= greatest(
                committed_offset, (select t.expired_to + 1 from headwater_internal.topic t where t.id = kafka_lag.topic_id)
            )
        limit 1001
    ) as counted;
    is_more := events > 1000;
    events := least(events, 1000);
    select coalesce(max(l.position) + 1, committed_offset) into end_offset
    from (
        select e.position from headwater_internal.event e
        where
            e.topic_id = kafka_lag.topic_id and e.partition = kafka_lag.partition and e.position >= committed_offset
        order by e.position desc
        limit 1
    ) as l;
end;
$$;
