-- Event stores: appends whose condition has a position of another epoch. See functions/epoch.sql.

-- Which epoch the log is in, and the last position that it shares with the one of the condition.
alter type headwater.append_verdict add attribute epoch integer, add attribute common_position bigint;

-- Functions whose parameters have changed.
drop function if exists headwater.read_matching(text, jsonb, bigint, bigint, integer, bigint, boolean);
drop function if exists headwater.save_snapshot(text, text, text, integer, bigint, bytea);
