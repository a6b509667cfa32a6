-- Kafka's leader epochs are the epochs of the log. Functions whose results have changed are made again.
drop function if exists headwater.kafka_bounds(integer[], integer[]);
drop function if exists headwater.kafka_look(
    integer[], integer[], bigint[], bigint[], integer[], bigint[], integer[], bigint[], bigint[]
);
drop function if exists headwater.kafka_append(
    integer[], integer[], integer[], bigint[], integer[], integer[],
    bytea[], bytea[], text[], text[], text[], text[], bigint[], bytea[]
);
