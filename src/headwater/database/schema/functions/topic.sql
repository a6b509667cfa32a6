-- Topics: create, change, find, delete.

create or replace function headwater.raise_topic_not_found(topic text)
returns void
language plpgsql
as $$
begin
    raise exception 'there is no topic "%"', topic
        using errcode = 'HW004',
              detail = json_build_object('topic', topic)::text,
              hint = 'Create it: headwater topic create, or headwater.create_topic().';
end;
$$;

-- The topic of that name, or HW004.
create or replace function headwater.find_topic(name text)
returns headwater.topic
language plpgsql
stable
as $$
declare
    found_topic headwater.topic;
begin
    select * into found_topic
    from headwater.topic t
    where t.name = find_topic.name and t.deleted_at is null;
    if not found then
        perform headwater.raise_topic_not_found(name);
    end if;
    return found_topic;
end;
$$;

-- Create a topic. An existing one is HW005, unless `if_missing`: then it is returned as it is.
create or replace function headwater.create_topic(
    name text,
    kind text default 'open',
    partitions integer default 1,
    retention interval default null,
    max_payload_bytes integer default 1048576,
    max_header_bytes integer default 65536,
    if_missing boolean default false
)
returns headwater.topic
language plpgsql
as $$
declare
    created headwater.topic;
begin
    insert into headwater.topic (name, kind, partitions, retention, max_payload_bytes, max_header_bytes, created_after)
    values (
        create_topic.name,
        coalesce(create_topic.kind, 'open'),
        coalesce(create_topic.partitions, 1),
        create_topic.retention,
        coalesce(create_topic.max_payload_bytes, 1048576),
        coalesce(create_topic.max_header_bytes, 65536),
        headwater.head()
    )
    on conflict do nothing
    returning * into created;
    if created.id is null then
        if not if_missing then
            raise exception 'topic "%" exists already', name
                using errcode = 'HW005', detail = json_build_object('topic', name)::text;
        end if;
        created := headwater.find_topic(name);
    end if;
    return created;
end;
$$;

-- Change what can change; null leaves a setting as it is. `keep_forever` removes the retention.
-- Partitions only grow: a key would otherwise move to another lane and lose its order.
create or replace function headwater.alter_topic(
    name text,
    partitions integer default null,
    retention interval default null,
    max_payload_bytes integer default null,
    max_header_bytes integer default null,
    keep_forever boolean default false
)
returns headwater.topic
language plpgsql
as $$
declare
    altered headwater.topic := headwater.find_topic(name);
begin
    if partitions < altered.partitions then
        raise exception 'topic "%" has % partitions and cannot shrink to %', name, altered.partitions, partitions
            using errcode = 'HW002';
    end if;
    update headwater.topic t
    set
        partitions = coalesce(alter_topic.partitions, t.partitions),
        retention = case when keep_forever then null else coalesce(alter_topic.retention, t.retention) end,
        max_payload_bytes = coalesce(alter_topic.max_payload_bytes, t.max_payload_bytes),
        max_header_bytes = coalesce(alter_topic.max_header_bytes, t.max_header_bytes)
    where t.id = altered.id
    returning * into altered;
    return altered;
end;
$$;

-- Delete a topic. Its events are unreadable at once; `maintain` gives their room back.
create or replace function headwater.delete_topic(name text)
returns void
language plpgsql
as $$
declare
    doomed headwater.topic := headwater.find_topic(name);
begin
    delete from headwater.scheduled s where s.topic_id = doomed.id;
    delete from headwater.binding b where b.topic_id = doomed.id;
    update headwater.topic t set deleted_at = clock_timestamp() where t.id = doomed.id;
end;
$$;

-- Make a topic that a publisher named and nobody made, if the log is set to do so.
create or replace function headwater.create_missing_topic(name text)
returns headwater.topic
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    if not (select s.auto_create_topics from headwater.setting s) then
        perform headwater.raise_topic_not_found(name);
    end if;
    return headwater.create_topic(name, if_missing => true);
end;
$$;

-- The topic that a publisher named.
create or replace function headwater.topic_to_publish(name text)
returns headwater.topic
language plpgsql
as $$
declare
    found_topic headwater.topic;
begin
    select * into found_topic
    from headwater.topic t
    where t.name = topic_to_publish.name and t.deleted_at is null;
    if not found then
        found_topic := headwater.create_missing_topic(name);
    end if;
    if found_topic.reserved then
        raise exception 'topic "%" is written by Headwater alone', name
            using errcode = 'HW015',
                  detail = json_build_object('topic', name)::text,
                  hint = 'Publish to a topic of your own.';
    end if;
    return found_topic;
end;
$$;

-- One line a topic, with what it holds.
create or replace view headwater.topic_overview as
select
    t.name,
    t.kind,
    t.partitions,
    t.retention,
    t.max_payload_bytes,
    t.max_header_bytes,
    t.created_at,
    t.expired_to,
    (
        select e.position
        from headwater.event e
        where e.topic_id = t.id
        order by e.position
        limit 1
    ) as first_position,
    (
        select e.position
        from headwater.event e
        where e.topic_id = t.id
        order by e.position desc
        limit 1
    ) as last_position,
    (
        select e.published_at
        from headwater.event e
        where e.topic_id = t.id
        order by e.position desc
        limit 1
    ) as last_published_at
from headwater.topic t
where t.deleted_at is null;
