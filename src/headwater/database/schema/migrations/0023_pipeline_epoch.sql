-- Pipelines and epochs. What a pipeline keeps in this database (its place, what its tables and topics have) goes back with
-- the log, and needs no epoch. What is kept outside of it is compared with the log by functions/pipeline_run.sql.

alter table headwater.pipeline add column rewound_in integer;
comment on column headwater.pipeline.rewound_in is
    'the epoch in which it was last set back from a history that the log lost; null: never';

-- Functions whose parameters have changed.
drop function if exists headwater.claim_pipeline(text, text, interval, text, jsonb, boolean);
drop function if exists headwater.record_batch(text, bigint, bigint, bigint, jsonb);
drop function if exists headwater.renew_generation(text, bigint);
drop function if exists headwater.note_archived(text, bigint);
drop function if exists headwater.merge_projection(
    text, text, text, bigint, boolean, text[], bigint, bigint, bigint, text, text, text, boolean, boolean
);
drop function if exists headwater.switch_rebuilt(text, bigint, bigint, bigint);
