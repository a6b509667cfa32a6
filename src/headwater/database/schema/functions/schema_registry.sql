-- The schema registry: registering, deleting, compatibility, and which topics must conform to which subject.

-- One version of a subject with its schema, including deleted ones.
create or replace view headwater_internal.schema_overview as
select
    v.subject,
    v.version,
    s.id,
    s.type,
    s.text,
    s.hash,
    v.deleted_at is not null as deleted,
    v.registered_at,
    coalesce(
        (
            select jsonb_agg(jsonb_build_array(r.name, r.subject, r.version) order by r.ordinal)
            from headwater_internal.schema_reference r
            where r.schema_id = s.id
        ),
        '[]'
    ) as refers_to
from headwater_internal.schema_version v
join headwater_internal.registered_schema s on s.id = v.schema_id;

-- Each subject that has versions, with its settings and the topics whose keys or values must conform to it.
create or replace view headwater_internal.schema_subject_overview as
select
    s.name,
    newest.type,
    counted.versions,
    counted.latest,
    coalesce(s.compatibility, r.compatibility) as compatibility,
    array(
        select t.name || ' (' || b.part || ')'
        from headwater_internal.topic_schema b
        join headwater_internal.topic t on t.id = b.topic_id and t.deleted_at is null
        where
            s.name = b.subject
            or (b.subject is null and b.framed and b.strategy = 'TopicNameStrategy' and s.name = t.name || '-' || b.part)
        order by 1
    ) as topics
from headwater_internal.schema_subject s
cross join headwater_internal.schema_registry r
join lateral (
    select count(*) as versions, max(v.version) as latest
    from headwater_internal.schema_version v
    where v.subject = s.name and v.deleted_at is null
) as counted on counted.versions > 0
join headwater_internal.schema_version v on v.subject = s.name and v.version = counted.latest
join headwater_internal.registered_schema newest on newest.id = v.schema_id;

-- Raise HW030 for a missing subject or version.
create or replace function headwater_internal.raise_schema_not_found(subject text, version integer default null)
returns void
language plpgsql
as $$
begin
    raise exception '%', case
        when version is null then format('subject "%s" does not exist', subject)
        else format('subject "%s" has no version %s', subject, version)
    end
        using
            errcode = 'HW030',
            hint = 'List subjects: headwater schema list.',
            detail = json_build_object('subject', subject, 'version', version)::text;
end;
$$;

-- Register a schema under a subject, idempotently: returns the id and version of the existing one, or of a new one. No
-- row if the subject changed since `revision` was read: the compatibility check is then out of date.
create or replace function headwater_internal.register_schema(
    subject text,
    type text,
    schema_text text,
    hash bytea,
    refers_to jsonb,
    revision bigint
)
returns table (id integer, version integer)
language plpgsql
as $$
#variable_conflict use_column
declare
    kept headwater_internal.schema_subject;
    found_id integer;
    next_version integer;
begin
    insert into headwater_internal.schema_subject (name) values (register_schema.subject) on conflict do nothing;
    select s.* into kept from headwater_internal.schema_subject s where s.name = register_schema.subject for update;
    return query
    select v.schema_id, v.version
    from headwater_internal.schema_version v
    join headwater_internal.registered_schema s on s.id = v.schema_id
    where v.subject = register_schema.subject and s.hash = register_schema.hash and v.deleted_at is null
    order by v.version desc
    limit 1;
    if found or kept.revision <> register_schema.revision then
        return;
    end if;
    insert into headwater_internal.registered_schema (type, text, hash)
    values (register_schema.type, schema_text, register_schema.hash)
    on conflict (hash) do nothing
    returning registered_schema.id into found_id;
    if found_id is null then
        -- Locked, so that it is not deleted with its last version at the same time.
        select s.id into found_id
        from headwater_internal.registered_schema s
        where s.hash = register_schema.hash
        for key share;
        if found_id is null then
            return;
        end if;
    else
        insert into headwater_internal.schema_reference (schema_id, ordinal, name, subject, version)
        select found_id, o.ordinal, o.said ->> 0, o.said ->> 1, (o.said ->> 2)::integer
        from jsonb_array_elements(register_schema.refers_to) with ordinality as o (said, ordinal);
    end if;
    select coalesce(max(v.version), 0) + 1 into next_version
    from headwater_internal.schema_version v
    where v.subject = register_schema.subject;
    insert into headwater_internal.schema_version (subject, version, schema_id)
    values (register_schema.subject, next_version, found_id);
    update headwater_internal.schema_subject s set revision = s.revision + 1 where s.name = register_schema.subject;
    return query select found_id, next_version;
end;
$$;

-- HW031 if other schemas refer to these versions.
create or replace function headwater_internal.refuse_referenced(subject text, versions integer[])
returns void
language plpgsql
as $$
declare
    referring record;
begin
    select r.version, v.subject as by_subject, v.version as by_version into referring
    from headwater_internal.schema_reference r
    join headwater_internal.schema_version v on v.schema_id = r.schema_id and v.deleted_at is null
    where r.subject = refuse_referenced.subject and r.version = any (refuse_referenced.versions)
    limit 1;
    if found then
        raise exception 'version % of subject "%" is referenced by version % of "%"',
            referring.version, refuse_referenced.subject, referring.by_version, referring.by_subject
            using
                errcode = 'HW031',
                hint = 'Delete the referencing version first.',
                detail = json_build_object(
                    'subject', refuse_referenced.subject, 'version', referring.version,
                    'by_subject', referring.by_subject, 'by_version', referring.by_version
                )::text;
    end if;
end;
$$;

-- Delete one version of a subject, or without a version all of them: softly, so that payloads with their ids can still
-- be read; or permanently, which requires a soft deletion before (else HW032). Returns the deleted versions. HW030 if
-- there are none, HW031 if they are in use.
create or replace function headwater_internal.delete_schema(subject text, version integer default null, for_good boolean default false)
returns integer[]
language plpgsql
as $$
#variable_conflict use_column
declare
    chosen integer[];
    living integer;
    orphans integer[];
begin
    perform from headwater_internal.schema_subject s where s.name = delete_schema.subject for update;
    select array_agg(v.version order by v.version), min(v.version) filter (where v.deleted_at is null)
    into chosen, living
    from headwater_internal.schema_version v
    where
        v.subject = delete_schema.subject
        and v.version = coalesce(delete_schema.version, v.version)
        and (for_good or v.deleted_at is null);
    if chosen is null then
        perform headwater_internal.raise_schema_not_found(delete_schema.subject, delete_schema.version);
    end if;
    perform headwater_internal.refuse_referenced(delete_schema.subject, chosen);
    if not for_good then
        update headwater_internal.schema_version v
        set deleted_at = clock_timestamp()
        where v.subject = delete_schema.subject and v.version = any (chosen);
    elsif living is not null then
        raise exception 'version % of subject "%" must be soft-deleted before it can be deleted permanently', living, delete_schema.subject
            using
                errcode = 'HW032',
                hint = 'Delete it without --for-good first.',
                detail = json_build_object('subject', delete_schema.subject, 'version', living)::text;
    else
        if exists (
            select from headwater_internal.topic_schema b
            join headwater_internal.topic t on t.id = b.topic_id and t.deleted_at is null
            where b.subject = delete_schema.subject
        ) and not exists (
            select from headwater_internal.schema_version v
            where v.subject = delete_schema.subject and v.version <> all (chosen)
        ) then
            raise exception 'subject "%" is in use: a topic must conform to it', delete_schema.subject
                using
                    errcode = 'HW031',
                    hint = 'Unbind the topic first: headwater topic alter TOPIC --no-value-schema.',
                    detail = json_build_object('subject', delete_schema.subject)::text;
        end if;
        with gone as (
            delete from headwater_internal.schema_version v
            where v.subject = delete_schema.subject and v.version = any (chosen)
            returning v.schema_id
        )
        select array_agg(g.schema_id) into orphans from gone g;
        -- Locked before checking who else uses them: another session may be registering one under another subject.
        perform from headwater_internal.registered_schema s where s.id = any (orphans) order by s.id for update;
        delete from headwater_internal.registered_schema s
        where s.id = any (orphans) and not exists (
            select from headwater_internal.schema_version v where v.schema_id = s.id
        );
    end if;
    update headwater_internal.schema_subject s set revision = s.revision + 1 where s.name = delete_schema.subject;
    return chosen;
end;
$$;

-- Set the compatibility of a subject, or without a subject the default. Null makes a subject use the default.
create or replace function headwater_internal.set_schema_compatibility(subject text, compatibility text)
returns void
language plpgsql
as $$
begin
    if set_schema_compatibility.subject is null then
        update headwater_internal.schema_registry r
        set compatibility = coalesce(set_schema_compatibility.compatibility, 'BACKWARD');
    else
        insert into headwater_internal.schema_subject as s (name, compatibility, revision)
        values (set_schema_compatibility.subject, set_schema_compatibility.compatibility, 1)
        on conflict (name) do update
        set compatibility = excluded.compatibility, revision = s.revision + 1;
    end if;
end;
$$;

-- Set the subjects to which the keys or values of a topic must conform. Null leaves a part unchanged; an empty subject
-- removes the requirement.
create or replace function headwater_internal.set_topic_schema(
    topic text,
    part text,
    subject text default null,
    framed boolean default null,
    strategy text default null
)
returns void
language plpgsql
as $$
#variable_conflict use_column
declare
    bound headwater_internal.topic := headwater_internal.find_topic(topic);
begin
    if set_topic_schema.subject <> '' and not exists (
        select from headwater_internal.schema_version v where v.subject = set_topic_schema.subject and v.deleted_at is null
    ) then
        perform headwater_internal.raise_schema_not_found(set_topic_schema.subject);
    end if;
    insert into headwater_internal.topic_schema as t (topic_id, part, subject, framed, strategy)
    values (
        bound.id,
        set_topic_schema.part,
        nullif(set_topic_schema.subject, ''),
        coalesce(set_topic_schema.framed, false),
        coalesce(set_topic_schema.strategy, 'TopicNameStrategy')
    )
    on conflict (topic_id, part) do update
    set
        subject = case when set_topic_schema.subject is null then t.subject else excluded.subject end,
        framed = coalesce(set_topic_schema.framed, t.framed),
        strategy = coalesce(set_topic_schema.strategy, t.strategy);
    -- A topic without requirements has no row, so that producing to it costs nothing.
    delete from headwater_internal.topic_schema t
    where t.topic_id = bound.id and t.subject is null and not t.framed and t.strategy = 'TopicNameStrategy';
end;
$$;

-- The same for all settings that a Kafka client sent at once: part -> subject, framed, strategy, each as it is or null.
create or replace function headwater_internal.set_topic_schemas(topic text, parts jsonb)
returns void
language sql
begin atomic
    select headwater_internal.set_topic_schema(
        set_topic_schemas.topic, p.key, p.value ->> 'subject', (p.value ->> 'framed')::boolean, p.value ->> 'strategy'
    )
    from jsonb_each(set_topic_schemas.parts) as p;
end;
