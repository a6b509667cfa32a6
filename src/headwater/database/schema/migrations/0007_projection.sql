-- Tables that pipelines keep: which those are, and up to where each of them is.

create table headwater.projection (
    schema_name  text        not null,
    table_name   text        not null,
    pipeline     text        not null
        constraint "a pipeline name is 1 to 100 characters" check (length(pipeline) between 1 and 100),
    -- Set while a rebuild fills this table: the one that will be made equal to it.
    rebuild_of   text,
    -- Grows when a rebuild takes the place of what was before. Whoever writes must know the one that holds.
    generation   bigint      not null default 0 check (generation >= 0),

    -- As they were made, without what somebody added; none yet: the table is not made or adopted.
    columns      text[]      not null default '{}',
    column_types text[]      not null default '{}' check (cardinality(column_types) = cardinality(columns)),
    key_columns  text[]      not null default '{}' check (key_columns <@ columns),
    -- The staging table beside it is ours, to be dropped and made again.
    has_staging  boolean     not null default false,

    -- The end of the last batch that is in the table, and Spark's number of it. Null: none is.
    done_to      bigint,
    done_batch   bigint,
    done_at      timestamptz,
    primary key (schema_name, table_name)
);
create index projection_pipeline on headwater.projection (pipeline);
