-- Whether a transaction with a published change, which the reader has not seen yet, has committed.
select exists (
    select
    from pg_logical_slot_peek_binary_changes(
        %(slot)s, '0/0'::pg_lsn + %(end)s::numeric, null, 'proto_version', '1', 'publication_names', %(publication)s
    ) as changes
    where get_byte(changes.data, 0) = ascii('B')
        and ('x' || encode(substr(changes.data, 2, 8), 'hex'))::bit(64)::bigint >= %(start)s
        and ('x' || encode(substr(changes.data, 2, 8), 'hex'))::bit(64)::bigint < %(end)s
);
