-- Whether there is a table of that name.
select to_regclass(%s) is not null;
