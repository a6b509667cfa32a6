-- Whether a table of that name exists.
select to_regclass(%s) is not null;
