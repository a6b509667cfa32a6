-- Schemas of payloads: subjects with their versions, what they refer to, and which topics they are for.

-- What holds for every subject that says nothing else.
create table headwater_internal.schema_registry (
    only_row      boolean primary key default true check (only_row),
    compatibility text    not null default 'BACKWARD'
        constraint "compatibility is NONE, BACKWARD, FORWARD, FULL or *_TRANSITIVE"
        check (compatibility in (
            'NONE', 'BACKWARD', 'BACKWARD_TRANSITIVE', 'FORWARD', 'FORWARD_TRANSITIVE', 'FULL', 'FULL_TRANSITIVE'
        ))
);
insert into headwater_internal.schema_registry default values;

-- A schema is stored once, however often it is registered. Its id is in every payload, so an id never changes its meaning.
create table headwater_internal.registered_schema (
    id           integer     generated always as identity primary key,
    type         text        not null
        constraint "a schema is AVRO, JSON or PROTOBUF" check (type in ('AVRO', 'JSON', 'PROTOBUF')),
    text         text        not null
        constraint "a schema is up to 524288 bytes" check (octet_length(text) <= 524288),
    -- SHA-256 of the schema in its one form, without what makes no difference; with its references.
    hash         bytea       not null unique check (octet_length(hash) = 32),
    created_at   timestamptz not null default clock_timestamp()
);

create table headwater_internal.schema_subject (
    name          text   primary key
        constraint "a subject is 1 to 300 characters" check (length(name) between 1 and 300),
    -- Null: as for all.
    compatibility text
        constraint "compatibility is NONE, BACKWARD, FORWARD, FULL or *_TRANSITIVE"
        check (compatibility in (
            'NONE', 'BACKWARD', 'BACKWARD_TRANSITIVE', 'FORWARD', 'FORWARD_TRANSITIVE', 'FULL', 'FULL_TRANSITIVE'
        )),
    -- Goes up with every change. What was found compatible is registered only if nothing changed since.
    revision      bigint not null default 0
);

create table headwater_internal.schema_version (
    subject       text        not null references headwater_internal.schema_subject (name),
    version       integer     not null
        constraint "a subject has up to 10000 versions" check (version between 1 and 10000),
    schema_id     integer     not null references headwater_internal.registered_schema (id),
    registered_at timestamptz not null default clock_timestamp(),
    -- Deleted softly: payloads that carry its id can still be read.
    deleted_at    timestamptz,
    primary key (subject, version)
);
create index schema_version_schema on headwater_internal.schema_version (schema_id);

-- Under which name a schema uses a version of another subject.
create table headwater_internal.schema_reference (
    schema_id integer  not null references headwater_internal.registered_schema (id) on delete cascade,
    ordinal   smallint not null,
    name      text     not null
        constraint "the name of a reference is 1 to 1000 characters" check (length(name) between 1 and 1000),
    subject   text     not null,
    version   integer  not null,
    primary key (schema_id, ordinal),
    unique (schema_id, name),
    foreign key (subject, version) references headwater_internal.schema_version (subject, version)
);
create index schema_reference_version on headwater_internal.schema_reference (subject, version);

-- Which schema the keys or the values of a topic must fit when they are produced to it.
create table headwater_internal.topic_schema (
    topic_id  integer not null references headwater_internal.topic (id) on delete cascade,
    part      text    not null check (part in ('key', 'value')),
    -- The subject that was named; null: the strategy says which.
    subject   text    references headwater_internal.schema_subject (name),
    -- Only payloads that carry the id of their schema are taken.
    framed    boolean not null default false,
    strategy  text    not null default 'TopicNameStrategy'
        constraint "a strategy is Topic-, Record- or TopicRecordNameStrategy"
        check (strategy in ('TopicNameStrategy', 'RecordNameStrategy', 'TopicRecordNameStrategy')),
    primary key (topic_id, part)
);
