-- Tables that pipelines keep: which those are, and up to where each of them is.

create table headwater_internal.projection (
    schema_name  text        not null,
    table_name   text        not null,
    pipeline     text        not null
        constraint "a pipeline name is 1 to 100 characters" check (length(pipeline) between 1 and 100),
    -- Set while a rebuild fills this table: the one that will be made equal to it.
    rebuild_of   text,
    -- Grows when a rebuild replaces the table. A writer must name the current one.
    checkpoint_epoch bigint  not null default 0 check (checkpoint_epoch >= 0),

    -- The columns as created, without those added by users; null: the table is not created or adopted yet.
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
create index projection_pipeline on headwater_internal.projection (pipeline);
