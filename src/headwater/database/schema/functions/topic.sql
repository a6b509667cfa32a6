-- Topics: create, change, find, delete.

-- Raise HW004 for a topic name.
create or replace function headwater_internal.raise_topic_not_found(topic text)
returns void
language plpgsql
as $$
begin
    raise exception 'topic "%" does not exist', topic
        using errcode = 'HW004',
              detail = json_build_object('topic', topic)::text,
              hint = 'Create it: headwater topic create, or headwater.create_topic().';
end;
$$;

-- The topic of that name; HW004 if it does not exist.
create or replace function headwater_internal.find_topic(name text)
returns headwater_internal.topic
language plpgsql
stable
as $$
declare
    found_topic headwater_internal.topic;
begin
    select * into found_topic
    from headwater_internal.topic t
    where t.name = find_topic.name and t.deleted_at is null;
    if not found then
        perform headwater_internal.raise_topic_not_found(name);
    end if;
    return found_topic;
end;
$$;

-- Create a topic and return it. HW005 if it exists, unless `if_missing` is true: then the existing topic is returned
-- unchanged.
create or replace function headwater.create_topic(
    name text,
    kind text default 'open',
    partitions integer default 1,
    retention interval default null,
    max_payload_bytes integer default 1048576,
    max_header_bytes integer default 65536,
    if_missing boolean default false
)
returns headwater_internal.topic
language plpgsql
as $$
declare
    created headwater_internal.topic;
begin
    insert into headwater_internal.topic (name, kind, partitions, retention, max_payload_bytes, max_header_bytes, created_after)
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
            raise exception 'topic "%" already exists', name
                using errcode = 'HW005', detail = json_build_object('topic', name)::text;
        end if;
        created := headwater_internal.find_topic(name);
    end if;
    return created;
end;
$$;

-- Change the settings of a topic and return it; null leaves a setting unchanged, `keep_forever` removes the retention.
-- HW004 if the topic does not exist. The number of partitions can only grow (else HW002): otherwise a key would move to
-- another partition and lose its order.
create or replace function headwater.alter_topic(
    name text,
    partitions integer default null,
    retention interval default null,
    max_payload_bytes integer default null,
    max_header_bytes integer default null,
    keep_forever boolean default false
)
returns headwater_internal.topic
language plpgsql
as $$
declare
    altered headwater_internal.topic := headwater_internal.find_topic(name);
begin
    if partitions < altered.partitions then
        raise exception 'topic "%" has % partitions: the number cannot be reduced to %', name, altered.partitions, partitions
            using errcode = 'HW002';
    end if;
    update headwater_internal.topic t
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

-- Delete a topic; HW004 if it does not exist. Its events become unreadable at once; maintenance frees their space.
create or replace function headwater.delete_topic(name text)
returns void
language plpgsql
as $$
declare
    doomed headwater_internal.topic := headwater_internal.find_topic(name);
begin
    delete from headwater_internal.scheduled s where s.topic_id = doomed.id;
    delete from headwater_internal.binding b where b.topic_id = doomed.id;
    update headwater_internal.topic t set deleted_at = clock_timestamp() where t.id = doomed.id;
end;
$$;

-- Create the missing topic that a publisher named, if the setting `auto_create_topics` is on; HW004 otherwise.
create or replace function headwater_internal.create_missing_topic(name text)
returns headwater_internal.topic
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    if not (select s.auto_create_topics from headwater_internal.setting s) then
        perform headwater_internal.raise_topic_not_found(name);
    end if;
    return headwater.create_topic(name, if_missing => true);
end;
$$;

-- The topic to which a publisher wants to publish: created if missing and allowed (else HW004), HW015 if it is
-- reserved.
create or replace function headwater_internal.topic_to_publish(name text)
returns headwater_internal.topic
language plpgsql
as $$
declare
    found_topic headwater_internal.topic;
begin
    select * into found_topic
    from headwater_internal.topic t
    where t.name = topic_to_publish.name and t.deleted_at is null;
    if not found then
        found_topic := headwater_internal.create_missing_topic(name);
    end if;
    if found_topic.reserved then
        raise exception 'topic "%" is reserved: only Headwater writes to it', name
            using errcode = 'HW015',
                  detail = json_build_object('topic', name)::text,
                  hint = 'Publish to a topic whose name does not begin with "headwater.".';
    end if;
    return found_topic;
end;
$$;

-- One row for each topic with its settings and its contents.
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
        from headwater_internal.event e
        where e.topic_id = t.id
        order by e.position
        limit 1
    ) as first_position,
    (
        select e.position
        from headwater_internal.event e
        where e.topic_id = t.id
        order by e.position desc
        limit 1
    ) as last_position,
    (
        select e.published_at
        from headwater_internal.event e
        where e.topic_id = t.id
        order by e.position desc
        limit 1
    ) as last_published_at
from headwater_internal.topic t
where t.deleted_at is null;
