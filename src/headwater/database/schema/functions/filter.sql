-- Filters: SQL expressions of subscribers, checked when installed and run with minimal privileges.
--
-- A filter becomes the body of a SQL function that Postgres inlines into the query that calls it. It is rejected when
-- it is installed unless each of four layers accepts it, in this order:
--   1. its tokens: no name of another schema, no escape by which a string could end early (refuse_tokens);
--   2. its parse tree: known kinds of nodes, types and functions of pg_catalog that read nothing and cannot allocate
--      without bound (refuse_tree). Up to here nothing was planned, so no constant was folded;
--   3. its dependencies: nothing but e and s;
--   4. the planner: an expression that is not inlined could have side effects.
-- Two roles: headwater_filter_owner owns the schema, the filters and every function that decides what is run. Filters
-- run as headwater_filter, which may create nothing and read nothing but subscriptions. Postgres runs a function as
-- another role only if that role owns it, so headwater_filter owns two functions, `explain_as_filter` and
-- `match_as_filter`, which execute one statement and decide nothing. Two rules make this ownership harmless:
--   * only functions of headwater_filter_owner may call them, so that they never run with more privileges than its own;
--   * the caller makes the transaction read-only before it calls them, and read-only cannot be left from within.

do $do$
declare
    installer constant text := current_user;
    needed text;
    old record;
begin
    foreach needed in array array['headwater_filter', 'headwater_filter_owner'] loop
        if not exists (select from pg_roles r where r.rolname = needed) then
            begin
                execute format('create role %I nologin', needed);
            exception
                when insufficient_privilege or duplicate_object or unique_violation then null;
            end;
        end if;
    end loop;
    begin
        foreach needed in array array['headwater_filter', 'headwater_filter_owner'] loop
            -- Since Postgres 16 the creator of a role is a member of it, but may not SET ROLE to it.
            if current_setting('server_version_num')::integer >= 160000 then
                if not pg_has_role(installer, needed, 'set') then
                    execute format('grant %I to %I with set true', needed, installer);
                end if;
            elsif not pg_has_role(installer, needed, 'member') then
                execute format('grant %I to %I', needed, installer);
            end if;
        end loop;
        -- Left by a build in which the role that runs filters owned them: they are installed again below.
        if exists (
            select from pg_namespace n
            where n.nspname = 'headwater_filter' and n.nspowner = 'headwater_filter'::regrole
        ) then
            set local role headwater_filter;
            drop schema headwater_filter cascade;
            execute format('set local role %I', installer);
        end if;
        if not exists (select from pg_namespace n where n.nspname = 'headwater_filter') then
            create schema headwater_filter authorization headwater_filter_owner;
        end if;
        grant usage on schema headwater, headwater_internal to headwater_filter, headwater_filter_owner;
        grant select on headwater_internal.subscription to headwater_filter;
        set local role headwater_filter_owner;
    exception
        when insufficient_privilege or undefined_object then
            -- Without the roles, filters are not available; `headwater doctor` explains how to create the roles.
            return;
    end;
    grant usage on schema headwater_filter to headwater_filter;

    -- The role that runs filters may create its own two functions here, and only now.
    grant create on schema headwater_filter to headwater_filter;
    execute format('set local role %I', installer);
    set local role headwater_filter;
    for old in
        select p.oid::regprocedure::text as signature
        from pg_proc p
        where
            p.proowner = 'headwater_filter'::regrole
            and p.pronamespace = 'headwater_filter'::regnamespace
            and p.proname not in ('explain_as_filter', 'match_as_filter')
    loop
        execute format('drop function %s', old.signature);
    end loop;

    execute $run$
        -- Plan a statement as the role that filters run as.
        create or replace function headwater_filter.explain_as_filter(statement text)
        returns json
        language plpgsql
        security definer
        set search_path = pg_catalog, pg_temp
        as $body$
        declare
            plan json;
        begin
            execute 'explain (verbose, format json) ' || statement into plan;
            return plan;
        end;
        $body$
    $run$;

    execute $run$
        -- Run a statement that matches events, as the role that filters run as.
        create or replace function headwater_filter.match_as_filter(
            statement text, events headwater.filter_event[], queue_id integer, first_position bigint
        )
        returns headwater_internal.filter_match[]
        language plpgsql
        security definer
        set search_path = pg_catalog, pg_temp
        as $body$
        declare
            matches headwater_internal.filter_match[];
        begin
            execute statement into matches using events, queue_id::text, queue_id, first_position;
            return matches;
        end;
        $body$
    $run$;

    execute format('set local role %I', installer);
    set local role headwater_filter_owner;
    revoke create on schema headwater_filter from headwater_filter;

    execute $refuse$
        -- HW002 for an expression that names anything beyond e, s and pg_catalog, or that is ambiguous.
        create or replace function headwater_filter.refuse_tokens(expression text)
        returns void
        language plpgsql
        set search_path = pg_catalog, pg_temp
        set standard_conforming_strings = on
        as $body$
        declare
            -- Longest match, as in the lexer of Postgres: space, comment, strings, names, numbers, and single
            -- characters.
            token constant text := $re$[ \t\n\r\f\v]+|--[^\n\r]*|/\*(?:[^*/]|\*+[^*/]|/+[^*/])*\*+/|$re$
                || $re$[eE]'(?:[^'\\]|\\.|'')*'|'(?:[^']|'')*'|"(?:[^"]|"")+"|$re$
                || $re$[A-Za-z_][A-Za-z0-9_]*|(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|$re$
                || $re$[-+*/<>=~!@#%^&|?`:.,()]|\[|\]$re$;
            columns constant text[] := array(
                select a.attname from pg_attribute a
                where
                    a.attnum > 0 and a.attrelid in ('headwater_internal.subscription'::regclass, (
                        select t.typrelid from pg_type t where t.oid = 'headwater.filter_event'::regtype
                    ))
            );
            tokens text[];
            one text;
            -- The tokens before the current one, without space and comments; and the one right before it.
            last text := '';
            second_last text := '';
            adjacent text := '';
            depth integer := 0;
        begin
            if length(expression) not between 1 and 10000 or octet_length(expression) > 40000 then
                raise exception 'invalid filter: expected 1 to 10000 characters' using errcode = 'HW002';
            end if;
            select array_agg(m.found[1]) into tokens from regexp_matches(expression, token, 'g') as m (found);
            if array_to_string(tokens, '') is distinct from expression then
                raise exception 'a filter may contain only strings, names, numbers and operators: no $ quotes, no semicolon, no '
                    'nested comment, no characters other than ASCII outside of strings'
                    using errcode = 'HW002';
            end if;
            foreach one in array tokens loop
                if one = '*' and adjacent = '/' then
                    raise exception 'a filter must not contain nested comments' using errcode = 'HW002';
                end if;
                adjacent := one;
                continue when one ~ '^(?:[ \t\n\r\f\v]|--|/\*)';
                if one ~ $re$^[eE]?'$re$ and last ~ $re$'$$re$ then
                    -- The lexer would read the second by the rules of the first.
                    raise exception 'a filter must not contain two adjacent strings: put || between them'
                        using errcode = 'HW002';
                elsif lower(second_last) = 'u' and last = '&' and one ~ $re$^['"]$re$ then
                    raise exception 'a filter must not contain unicode escapes: write the character itself' using errcode = 'HW002';
                elsif one = '.' and last !~ '^[eEsS]$'
                    -- Excludes types and functions of a schema that is called e or s.
                    or one = '.' and lower(second_last) in (':', '.', 'as', 'of', 'returning', 'operator')
                    or last = '.' and lower(trim('"' from one)) <> all (columns)
                    or second_last = '.' and (one = '(' or one ~ $re$^[eE]?'$re$ or one = '.')
                then
                    raise exception 'a filter may name only columns of e and s, and nothing of another schema'
                        using errcode = 'HW002';
                end if;
                depth := depth + case one when '(' then 1 when ')' then -1 else 0 end;
                if depth < 0 then
                    raise exception 'unbalanced ) in a filter' using errcode = 'HW002';
                end if;
                second_last := last;
                last := one;
            end loop;
            -- Types of pg_temp are found without the name of their schema.
            select t.typname into one
            from pg_type t
            join unnest(tokens) as w (word)
                on t.typname = left(case when w.word like '"%' then replace(trim('"' from w.word), '""', '"') else lower(w.word) end, 63)
            where t.typnamespace = pg_my_temp_schema();
            if found then
                raise exception 'a filter cannot use the temporary type %', one using errcode = 'HW002';
            end if;
        end;
        $body$
    $refuse$;

    execute $refuse$
        -- HW002 for a filter whose parse tree contains anything that is not known to be harmless.
        create or replace function headwater_filter.refuse_tree(function_name text)
        returns void
        language plpgsql
        set search_path = pg_catalog, pg_temp
        as $body$
        declare
            filter constant oid := to_regproc('headwater_filter.' || quote_ident(function_name));
            tree constant text := (select f.prosqlbody::text from pg_proc f where f.oid = filter);
            refused text;
            most integer;
            -- The functions that a filter may call by name. Operators and casts are checked below.
            callable constant text[] := string_to_array(
                'abs age array_append array_cat array_dims array_length array_lower array_ndims array_position array_positions '
                'array_prepend array_remove array_replace array_upper ascii atan atan2 bit_length broadcast btrim cardinality '
                'casefold cbrt ceil ceiling char_length character_length chr concat convert_from convert_to cos crc32 crc32c '
                'date date_bin date_part date_trunc datemultirange daterange decode degrees div encode exp extract factorial family '
                'floor gcd host hostmask inet_same_family initcap int4multirange int4range int8multirange int8range is_normalized '
                'isempty isfinite json_array_length json_build_array json_build_object json_extract_path '
                'json_extract_path_text json_strip_nulls json_typeof jsonb_array_length jsonb_build_array jsonb_build_object '
                'jsonb_contained jsonb_contains jsonb_exists jsonb_exists_all jsonb_exists_any jsonb_extract_path '
                'jsonb_extract_path_text jsonb_insert jsonb_path_exists jsonb_path_exists_tz jsonb_path_match '
                'jsonb_path_match_tz jsonb_path_query_array jsonb_path_query_array_tz jsonb_path_query_first '
                'jsonb_path_query_first_tz jsonb_set jsonb_strip_nulls jsonb_typeof justify_days justify_hours '
                'justify_interval lcm left length like like_escape ln log log10 lower lower_inc lower_inf ltrim make_date '
                'make_interval make_time make_timestamp make_timestamptz masklen md5 mod netmask network normalize notlike '
                'now num_nonnulls num_nulls nummultirange numrange octet_length overlaps overlay pi position pow power '
                'radians range_merge regexp_count regexp_instr regexp_like regexp_match regexp_split_to_array regexp_substr '
                'reverse right round rtrim scale sha224 sha256 sha384 sha512 sign similar_escape similar_to_escape sin '
                'split_part sqrt starts_with statement_timestamp string_to_array strpos substr substring tan text timestamp '
                'timestamptz timezone to_char to_date to_hex to_json to_jsonb to_number to_timestamp transaction_timestamp '
                'translate trim_array trim_scale trunc tsmultirange tsrange tstzmultirange tstzrange unistr upper upper_inc '
                'upper_inf uuid_extract_timestamp uuid_extract_version width_bucket', ' '
            );
            node record;
            -- For the current node and those above it: whether it enlarges its input, whether its result has a fixed
            -- length, and the sum of the sizes of its arguments. A size of 1 is that of the event or the params.
            enlarges boolean[] := '{f}';
            fixed boolean[] := '{f}';
            sizes float8[] := '{0}';
            kinds text[] := '{""}';
            depth integer := 1;
            size float8;
            total float8 := 0;
        begin
            select m.found[1] into refused
            from regexp_matches(tree, '\{([A-Z_]+)', 'g') as m (found)
            where m.found[1] not in (
                'QUERY', 'FROMEXPR', 'TARGETENTRY', 'BOOLEXPR', 'OPEXPR', 'DISTINCTEXPR', 'NULLIFEXPR',
                'SCALARARRAYOPEXPR', 'FUNCEXPR', 'CONST', 'PARAM', 'FIELDSELECT', 'RELABELTYPE', 'COERCEVIAIO',
                'ARRAYCOERCEEXPR', 'CASEEXPR', 'CASE', 'CASEWHEN', 'WHEN', 'CASETESTEXPR', 'ARRAYEXPR', 'ARRAY',
                'COALESCEEXPR', 'COALESCE', 'MINMAXEXPR', 'MINMAX', 'NULLTEST', 'BOOLEANTEST', 'COLLATEEXPR', 'COLLATE',
                'SUBSCRIPTINGREF', 'SQLVALUEFUNCTION', 'JSONISPREDICATE'
            )
            limit 1;
            if found then
                raise exception 'a filter must be one plain expression over e and s, without %', lower(refused)
                    using errcode = 'HW002';
            end if;
            -- Allows current_date and similar; rejects current_user, current_schema and similar.
            if tree ~ '\{SQLVALUEFUNCTION :op (?:9|1[0-9])\M' then
                raise exception 'a filter cannot read the current user or schema' using errcode = 'HW002';
            end if;
            -- Types of pg_catalog, except those that name objects of the database.
            select format_type(t.oid, null) into refused
            from (
                select distinct m.found[1]::oid as oid
                from regexp_matches(tree, ':[A-Za-z_]*(?:type|typeid|typeId|typid) ([0-9]{1,9})\M', 'g') as m (found)
            ) as used
            join pg_type t on t.oid = used.oid
            left join pg_type element on element.oid = t.typelem and t.typcategory = 'A'
            where
                t.oid not in ('headwater.filter_event'::regtype, 'headwater_internal.subscription'::regtype)
                and (
                    t.typnamespace <> 'pg_catalog'::regnamespace
                    or t.typtype in ('c', 'd', 'e')
                    or coalesce(element.typtype in ('c', 'd', 'e', 'p'), false)
                    or t.typtype = 'p' and t.typname not in ('unknown', 'anyarray', 'anyelement')
                    -- JSON paths are checked one by one below.
                    or element.typname = 'jsonpath'
                    or coalesce(element.typname, t.typname)
                        ~ '^(?:xml|oid|xid|xid8|cid|tid|refcursor|aclitem|txid_snapshot|reg.*|pg_.*)$'
                )
            limit 1;
            if found then
                raise exception 'a filter cannot use the type %', refused
                    using errcode = 'HW002', hint = 'Use only built-in types of Postgres that are plain values.';
            end if;
            -- Functions called by name (funcformat 0), or by a syntax of their own (3).
            select p.proname into refused
            from regexp_matches(
                tree, '\{FUNCEXPR :funcid ([0-9]{1,9}) :funcresulttype [0-9]+ :funcretset [a-z]+ :funcvariadic [a-z]+ :funcformat [03]\M', 'g'
            ) as m (found)
            join pg_proc p on p.oid = m.found[1]::oid
            where p.proname <> all (callable)
            limit 1;
            if found then
                raise exception 'a filter cannot call %', refused
                    using errcode = 'HW002', hint = 'Use only built-in functions of Postgres that are on the list of allowed functions.';
            end if;
            -- All functions, including those of operators and casts.
            select p.proname into refused
            from (
                select distinct m.found[1]::oid as oid
                from regexp_matches(tree, ':[A-Za-z_]*funcid ([0-9]{1,9})\M', 'g') as m (found)
            ) as used
            join pg_proc p on p.oid = used.oid
            where
                p.pronamespace <> 'pg_catalog'::regnamespace
                or p.provolatile = 'v'
                or p.proretset
                or p.prokind <> 'f'
                -- Input and output functions run code of a type; those of OID types read catalogs.
                or p.proargtypes::oid[] && array['cstring', 'internal', 'oid', 'regclass', 'regtype', 'regproc',
                    'regconfig', 'regdictionary', 'xml', 'record']::regtype[]::oid[]
                or p.prorettype in ('cstring'::regtype, 'internal'::regtype, 'record'::regtype, 'xml'::regtype)
                -- These read tables, catalogs, settings or text search configurations.
                or p.proname ~ '_to_xml|^(pg|has|current|session|txid|inet_(client|server)|to_reg|(obj|col|shobj)_desc)'
                or p.proname ~ '^(to_ts|plainto_|phraseto_|websearch_|ts_|jsonb?_to_ts|get_|version|getdatabase|getpgu)'
                or p.proname ~ '^(array_in|array_recv|domain_|enum_|record_|(multi)?range_(in|out|recv|send)$|format_type)'
                -- The result of these can be many times as large as their input.
                or p.proname ~ '^(repeat|lpad|rpad|format|replace|regexp_replace|array_fill|array_to_string|concat_ws)$'
                or p.proname ~ '^(jsonb?_populate|jsonb?_to_record|jsonb?_object$|row_to_json|xml|xpath)'
            limit 1;
            if found then
                raise exception 'a filter cannot call %', refused
                    using errcode = 'HW002', hint = 'Use only built-in functions of Postgres that read nothing and do not enlarge their input.';
            end if;
            -- Limit what the rest can allocate and compute from a few characters.
            select u.kind, u.most into refused, most
            from (
                select
                    case
                        when p.proname ~ '^(textcat|textanycat|anytextcat|byteacat|bitcat|concat|array_cat|array_append)'
                            or p.proname ~ '^(array_prepend|jsonb_concat|jsonb_set|jsonb_insert|overlay|jsonb?_build)'
                            or p.proname ~ '^(tsvector_concat|tsquery_|path_add)' then 'joins'
                        when p.proname ~ '^(encode|convert|to_json|ascii|to_char|normalize)'
                            or p.proname ~ '^(bpchar|varbit|bit|translate|string_to_array|regexp_|array_replace)'
                            then 'functions that enlarge'
                        when p.proname ~ '^(factorial|numeric_(power|exp|ln|log|sqrt)|power|exp|ln|log|sqrt)$'
                            or p.proname ~ '^(pow|gcd|lcm|numeric_fac)' then 'large numbers'
                        when p.proname ~ 'regex|like|^jsonb_path|^similar' then 'patterns'
                    end as kind,
                    count(*) as uses
                from regexp_matches(tree, ':(?:funcid|opfuncid) ([0-9]{1,9})\M', 'g') as m (found)
                join pg_proc p on p.oid = m.found[1]::oid
                group by 1
            ) as c
            join (
                values ('joins', 16), ('functions that enlarge', 8), ('large numbers', 4), ('patterns', 64)
            ) as u (kind, most) on u.kind = c.kind and c.uses > u.most
            limit 1;
            if found then
                raise exception 'a filter may have at most % %', most, refused using errcode = 'HW002';
            end if;
            -- Limit the memory of one evaluation: intermediate results are freed only at its end. A conversion to text
            -- can double its input (it escapes backslashes and quotes), so n nested conversions produce 2^n times as
            -- much; any other result is at most as large as all arguments together.
            for node in
                select
                    m.found[1] as kind,
                    m.found[1] in ('COERCEVIAIO', 'ARRAYCOERCEEXPR') or coalesce(
                        p.proname ~ '^(encode|convert|to_json|to_char|normalize|translate|string_to_array|regexp_|array_replace)'
                        or p.proname ~ '^(concat|jsonb?_build|textanycat|anytextcat)',
                        false
                    ) as enlarges,
                    m.found[1] in ('BOOLEXPR', 'NULLTEST', 'BOOLEANTEST', 'DISTINCTEXPR', 'SCALARARRAYOPEXPR', 'JSONISPREDICATE')
                    or coalesce(t.typlen > 0, false) as fixed,
                    m.found[4] is not null and r.typlen > 0 as converted_to_fixed
                from regexp_matches(
                    tree,
                    '\{([A-Z_]+)(?: :(?:opno [0-9]+ :op)?funcid ([0-9]{1,9}) :(?:func|op)resulttype ([0-9]{1,9})\M)?'
                    '|\}(?: :resulttype ([0-9]{1,9})\M)?', 'g'
                ) with ordinality as m (found, number)
                left join pg_proc p on p.oid = m.found[2]::oid
                left join pg_type t on t.oid = m.found[3]::oid
                left join pg_type r on r.oid = m.found[4]::oid
                order by m.number
            loop
                if node.kind is not null then
                    depth := depth + 1;
                    enlarges[depth] := node.enlarges;
                    fixed[depth] := node.fixed;
                    -- A constant has at most 10000 characters.
                    sizes[depth] := case node.kind when 'PARAM' then 1 when 'CONST' then 0.01 else 0 end;
                    kinds[depth] := node.kind;
                    continue;
                end if;
                size := sizes[depth] * case when enlarges[depth] and not fixed[depth] then 2 else 1 end;
                if kinds[depth] in ('FUNCEXPR', 'OPEXPR', 'COERCEVIAIO', 'ARRAYCOERCEEXPR', 'ARRAYEXPR', 'ARRAY') and (
                    not fixed[depth] or enlarges[depth]
                ) then
                    total := total + size;
                end if;
                depth := depth - 1;
                if not fixed[depth + 1] then
                    sizes[depth] := sizes[depth] + size;
                end if;
                if node.converted_to_fixed then
                    fixed[depth] := true;
                end if;
                if total > 128 then
                    raise exception 'filter too large: it could need more than 128 times the memory of its event'
                        using errcode = 'HW002',
                              hint = 'Use fewer strings, JSON values and arrays, and fewer nested conversions.';
                end if;
            end loop;
            -- A JSON path is a language of its own, in which a few characters can request more items than fit into
            -- memory: [0,0][0,0]... doubles them each time, .**.** squares them, and $ within ?() visits all of them
            -- again for each. A path must therefore be a constant that contains none of these.
            if tree ~ ':resulttype 4072\M' or (
                select count(*) filter (where m.found[1] = '4072')
                from regexp_matches(
                    tree, ':consttype ([0-9]+) :consttypmod -?[0-9]+ :constcollid [0-9]+ :constlen -?[0-9]+ :constbyval [a-z]+ :constisnull false', 'g'
                ) as m (found)
            ) <> (
                select count(*)
                from regexp_matches(pg_get_function_sqlbody(filter), $re$(E?)'((?:[^']|'')*)'(::jsonpath\M)?$re$, 'g') as m (found)
                cross join lateral (
                    select regexp_replace(
                        case m.found[1] when 'E' then replace(m.found[2], $$\\$$, $$\$$) else m.found[2] end,
                        $re$"(?:[^"\\]|\\.)*"$re$, '""', 'g'
                    ) as path
                ) as plain
                where
                    m.found[3] is not null
                    and plain.path !~ ',|\*\*.*\*\*|\?.*\$'
                    and plain.path !~ 'like_regex.*like_regex.*like_regex'
            ) then
                raise exception 'a JSON path must be a constant with at most one .**, no list of subscripts and no $ within ?()'
                    using errcode = 'HW002';
            end if;
            -- char(n), bit(n) and the like make a value of n characters of anything. Their functions cannot be called
            -- by name, so a length can only come from a type, and the filter as deparsed by Postgres shows it as a
            -- number.
            if regexp_replace(pg_get_function_sqlbody(filter), $re$'(?:[^']|'')*'$re$, '', 'g')
                ~ '::"?(?:character|char|bpchar|bit|bit varying|varbit)"?\([0-9]{5,}\)'
            then
                raise exception 'a length in the filter is too large' using errcode = 'HW002';
            end if;
            -- Anything that is not built into Postgres is a dependency.
            if exists (
                select from pg_depend d
                where
                    d.classid = 'pg_proc'::regclass
                    and d.objid = filter
                    and not (
                        d.refclassid = 'pg_namespace'::regclass
                        or d.refclassid = 'pg_type'::regclass and d.refobjid in (
                            'headwater.filter_event'::regtype, 'headwater_internal.subscription'::regtype
                        )
                        or d.refclassid = 'pg_class'::regclass and d.refobjid in (
                            'headwater_internal.subscription'::regclass, (
                                select t.typrelid from pg_type t where t.oid = 'headwater.filter_event'::regtype
                            )
                        )
                    )
            ) then
                raise exception 'a filter can use only e, s and what is built into Postgres' using errcode = 'HW002';
            end if;
        end;
        $body$
    $refuse$;

    execute $split$
        -- The parts, joined by AND, of an expression as EXPLAIN shows it.
        create or replace function headwater_filter.conjuncts(shown text)
        returns text[]
        language plpgsql
        immutable
        set search_path = pg_catalog, pg_temp
        as $body$
        declare
            letters constant text[] := string_to_array(shown, null);
            depth integer := 0;
            quoted text;
            start integer := 2;
            parts text[] := '{}';
        begin
            for i in 1 .. cardinality(letters) loop
                if quoted is not null then
                    if letters[i] = quoted then
                        quoted := null;
                    end if;
                elsif letters[i] in ('''', '"') then
                    quoted := letters[i];
                elsif letters[i] = '(' then
                    depth := depth + 1;
                elsif letters[i] = ')' then
                    depth := depth - 1;
                elsif depth = 1 and letters[i] = ' ' and array_to_string(letters[i:i + 4], '') = ' AND ' then
                    parts := parts || array_to_string(letters[start:i - 1], '');
                    start := i + 5;
                end if;
            end loop;
            if parts = '{}' then
                return array[shown];
            end if;
            return parts || array_to_string(letters[start:cardinality(letters) - 1], '');
        end;
        $body$
    $split$;

    execute $install$
        -- Create a function of the event only, named by its expression; null if the expression needs more than the
        -- event.
        create or replace function headwater_filter.install_part(kind text, result text, expression text)
        returns text
        language plpgsql
        set search_path = pg_catalog, pg_temp
        set standard_conforming_strings = on
        as $body$
        declare
            name constant text := kind || '_' || left(encode(sha256(convert_to(expression, 'UTF8')), 'hex'), 48);
        begin
            if expression is null then
                return null;
            end if;
            perform pg_advisory_xact_lock((29285::bigint << 48) | (hashtextextended(name, 0) & 281474976710655));
            if not exists (
                select from pg_proc p where p.proname = name and p.pronamespace = 'headwater_filter'::regnamespace
            ) then
                execute format(
                    E'create function headwater_filter.%I(e headwater.filter_event) returns %s language sql stable '
                    'return (%s\n)', name, result, expression
                );
                perform headwater_filter.refuse_tree(name);
                execute format('revoke all on function headwater_filter.%I from public', name);
                execute format('grant execute on function headwater_filter.%I to headwater_filter', name);
            end if;
            return name;
        exception
            when undefined_table or undefined_column or sqlstate 'HW002' or syntax_error_or_access_rule_violation then
                return null;
        end;
        $body$
    $install$;

    execute $install$
        -- Check a filter and install its function; returns the name of the function. HW002 if the filter is rejected.
        -- How to match it is stored as the comment of the function: `key`: a function of the event; only subscriptions
        -- whose params contain its result can match. `when`: a function of the event that must be true. `event_only`:
        -- nothing else must be true; `key_only`: nothing but both. `plain_key`: the key only extracts values from JSON,
        -- so it does not fail on events that `when` would exclude.
        create or replace function headwater_filter.install(expression text)
        returns text
        language plpgsql
        security definer
        set search_path = pg_catalog, pg_temp
        set standard_conforming_strings = on
        as $body$
        declare
            name constant text := 'filter_' || left(encode(sha256(convert_to(expression, 'UTF8')), 'hex'), 48);
            plan jsonb;
            joined text;
            part text;
            how jsonb;
        begin
            if to_regproc('headwater_filter.' || name) is not null then
                return name;
            end if;
            perform headwater_filter.refuse_tokens(expression);
            -- Of two sessions that install the same filter, the second waits here and then finds it installed. Lock
            -- tag: see locks.sql.
            perform pg_advisory_xact_lock((29285::bigint << 48) | (hashtextextended(name, 0) & 281474976710655));
            -- By a query: to_regproc caches that the function was missing before the lock.
            if exists (
                select from pg_proc p where p.proname = name and p.pronamespace = 'headwater_filter'::regnamespace
            ) then
                return name;
            end if;
            execute 'create function headwater_filter.' || name
                || '(e headwater.filter_event, s headwater_internal.subscription) returns boolean language sql stable '
                || 'return (' || expression || E'\n)';
            perform headwater_filter.refuse_tree(name);
            execute format('revoke all on function headwater_filter.%I from public', name);
            execute format('grant execute on function headwater_filter.%I to headwater_filter', name);
            plan := headwater_filter.plan(name);
            if strpos(plan::text, name) > 0 then
                raise exception 'a filter must be one plain expression over e and s: no subquery, no volatile function'
                    using errcode = 'HW002';
            end if;
            joined := plan #>> '{joined}';
            foreach part in array headwater_filter.conjuncts(coalesce(joined, '')) loop
                part := coalesce(
                    substring(part from '^\(s\.params @> (.*)\)$'), substring(part from '^\((.*) <@ s\.params\)$')
                );
                if part is not null then
                    how := jsonb_build_object('key', headwater_filter.install_part('key', 'jsonb', part));
                    exit when how ->> 'key' is not null;
                end if;
            end loop;
            how := jsonb_strip_nulls(
                coalesce(how, '{}')
                || jsonb_build_object(
                    'key_only', case
                        when how ->> 'key' is not null and cardinality(headwater_filter.conjuncts(joined)) = 1
                            and plan ->> 'of_subscription' is null and plan ->> 'once' is null then true
                    end,
                    'plain_key', (
                        select true from pg_proc k
                        where
                            k.proname = how ->> 'key'
                            and k.pronamespace = 'headwater_filter'::regnamespace
                            and k.prosqlbody::text !~ '[{](COERCEVIAIO|ARRAYCOERCEEXPR)'
                            and not exists (
                                select
                                from regexp_matches(k.prosqlbody::text, ':[A-Za-z_]*funcid ([0-9]{1,9})\M', 'g') as m (found)
                                join pg_proc f on f.oid = m.found[1]::oid
                                where f.proname not in (
                                    'jsonb_build_object', 'jsonb_build_array', 'jsonb_object_field',
                                    'jsonb_object_field_text', 'jsonb_extract_path', 'jsonb_extract_path_text'
                                )
                            )
                    ),
                    'when', headwater_filter.install_part('when', 'boolean', nullif(plan ->> 'of_event', '')),
                    'event_only', case
                        when joined is null and plan ->> 'of_subscription' is null and plan ->> 'once' is null then true
                    end
                )
            );
            if plan ->> 'of_event' is not null and not how ? 'when' then
                how := how - 'event_only' - 'key_only';
            end if;
            execute format(
                'comment on function headwater_filter.%I(headwater.filter_event, headwater_internal.subscription) is %L',
                name, how
            );
            return name;
        end;
        $body$
    $install$;

    execute $uninstall$
        -- Drop a filter without subscriptions. The parts that it shares with other filters stay.
        create or replace function headwater_filter.uninstall(function_name text)
        returns void
        language plpgsql
        security definer
        set search_path = pg_catalog, pg_temp
        as $body$
        begin
            if function_name !~ '^filter_[0-9a-f]{48}$' then
                raise exception 'not the function of a filter: %', function_name using errcode = 'HW002';
            end if;
            execute format('drop function if exists headwater_filter.%I', function_name);
        end;
        $body$
    $uninstall$;

    execute $plan$
        -- How Postgres plans a filter: its parts that use the event, the subscription, both, and those evaluated once.
        create or replace function headwater_filter.plan(function_name text)
        returns jsonb
        language plpgsql
        security definer
        set search_path = pg_catalog, pg_temp
        set standard_conforming_strings = on
        set jit = off
        set enable_indexscan = off
        set enable_bitmapscan = off
        set enable_hashjoin = off
        set enable_mergejoin = off
        as $body$
        declare
            plan json;
        begin
            if function_name !~ '^filter_[0-9a-f]{48}$' then
                raise exception 'not the function of a filter: %', function_name using errcode = 'HW002';
            end if;
            -- Read-only until this block is rolled back; Postgres then restores the setting.
            begin
                perform set_config('transaction_read_only', 'on', true);
                plan := headwater_filter.explain_as_filter(
                    'select from unnest(array[]::headwater.filter_event[]) as e, '
                    'headwater_internal.subscription as s where headwater_filter.' || function_name || '(e, s)'
                );
                raise exception 'planned' using errcode = 'HW000';
            exception
                when sqlstate 'HW000' then null;
            end;
            return jsonb_build_object(
                'all', plan,
                'joined', jsonb_path_query_first(plan::jsonb, 'strict $.** ? (exists (@."Join Filter"))') ->> 'Join Filter',
                'of_event', jsonb_path_query_first(plan::jsonb, 'strict $.** ? (@."Alias" == "e")') ->> 'Filter',
                'of_subscription', jsonb_path_query_first(plan::jsonb, 'strict $.** ? (@."Alias" == "s")') ->> 'Filter',
                'once',
                jsonb_path_query_first(plan::jsonb, 'strict $.** ? (exists (@."One-Time Filter"))') ->> 'One-Time Filter'
            );
        end;
        $body$
    $plan$;

    execute $match$
        -- The subscriptions of a queue with these filters that each event matches, in one statement. A filter with a
        -- key costs one probe of the index on subscription.probe for each event, and filters with the same key share
        -- it: the subquery that probes has no other condition, so that no other index can be chosen.
        create or replace function headwater_filter.match(
            function_names text[], filter_ids integer[], events headwater.filter_event[], queue_id integer
        )
        returns headwater_internal.filter_match[]
        language plpgsql
        security definer
        set search_path = pg_catalog, pg_temp
        set standard_conforming_strings = on
        set jit = off
        set enable_seqscan = off
        set enable_hashjoin = off
        set enable_mergejoin = off
        set enable_memoize = off
        set plan_cache_mode = force_generic_plan
        as $body$
        declare
            keys text;
            tests text;
            arms text[];
            matches headwater_internal.filter_match[];
            -- Events are ordered by position.
            first_position constant bigint := (events[1]).position;
        begin
            with filter as (
                select f.id, f.name, d.how ->> 'key' as key, d.how ->> 'when' as event_part, d.how ? 'event_only' as of_event,
                    d.how ? 'key_only' as key_only, d.how ? 'plain_key' as plain_key
                from unnest(function_names, filter_ids) as f (name, id)
                -- A missing filter stays in the list: its call fails, and the error is recorded.
                left join pg_proc p
                    on p.proname = f.name and p.pronamespace = 'headwater_filter'::regnamespace
                cross join lateral (
                    select (
                        select c.description from pg_description c
                        where c.objoid = p.oid and c.classoid = 'pg_proc'::regclass and c.objsubid = 0
                    )::jsonb as how
                    -- Evaluated once, not for each reference.
                    offset 0
                ) as d
            ), key as (
                select
                    f.key,
                    row_number() over (order by f.key) as number,
                    -- Many of these tests cost more to plan than the probes that they save. A key that can fail needs
                    -- them.
                    case when count(f.event_part) = count(*) and not (bool_and(f.plain_key) and count(*) > 8) then
                        string_agg(distinct 'headwater_filter.' || quote_ident(f.event_part) || '(e)', ' or ')
                    end as event_part
                from filter f
                where f.key is not null
                group by f.key
            )
            select
                (
                    select string_agg(
                        format(
                            case when k.event_part is null then '(%s, headwater_filter.%I(e))'
                            else '(%s, case when %3$s then headwater_filter.%2$I(e) end)' end,
                            k.number, k.key, k.event_part
                        ), ', ' order by k.number
                    )
                    from key k
                ),
                (
                    select string_agg(
                        format('when %s then k.number = %s', f.id, k.number) || case
                            when not f.key_only then format(' and headwater_filter.%I(e, c.s)', f.name)
                            when f.event_part is null then ''
                            else format(' and headwater_filter.%I(e)', f.event_part)
                        end,
                        ' ' order by f.id
                    )
                    from filter f join key k using (key)
                ),
                (
                    select array_agg(a.arm order by f.id)
                    from filter f
                    cross join lateral (
                        -- The filter depends only on the event: evaluate it once, not for each subscription.
                        select format(
                            'select e.position, c.ids from unnest($1) as e cross join ('
                            'select array_agg(s.id order by s.id) as ids from headwater_internal.subscription as s '
                            'where s.queue_id = $3 and s.filter_id = %s and s.from_position < $4) as c '
                            'where c.ids is not null and %s',
                            f.id, coalesce('headwater_filter.' || quote_ident(f.event_part) || '(e)', 'true')
                        )
                        where f.of_event
                        union all
                        select format(
                            'select e.position, array_agg(s.id order by s.id) from unnest($1) as e join headwater_internal.subscription as s '
                            'on s.queue_id = $3 and s.filter_id = %s and e.position > s.from_position %s '
                            'and headwater_filter.%I(e, s) group by e.position',
                            f.id, case when f.of_event then 'and s.from_position >= $4' else '' end, f.name
                        )
                    ) as a (arm)
                    where f.key is null
                )
            into keys, tests, arms;
            if keys is not null then
                arms := format(
                    'select e.position, array_agg(c.id order by c.id) from unnest($1) as e '
                    'cross join lateral (select * from (values %s) as v (number, key) offset 0) as k '
                    'cross join lateral ('
                    'select s.id, s.filter_id, s.from_position, %s as s from headwater_internal.subscription as s '
                    'where s.probe @> jsonb_build_object($2, k.key) offset 0) as c '
                    'where k.key is not null and e.position > c.from_position '
                    'and case c.filter_id %s else false end group by e.position',
                    -- The whole row only if a filter reads it.
                    keys, case when strpos(tests, '(e, c.s)') > 0 then 's' else 'null' end, tests
                ) || arms;
            end if;
            -- Read-only until this block is rolled back; the result stays in the variable.
            begin
                perform set_config('transaction_read_only', 'on', true);
                matches := headwater_filter.match_as_filter(
                    'select array_agg(row(f.*)::headwater_internal.filter_match) from (' || array_to_string(arms, ' union all ')
                    || ') as f', events, queue_id, first_position
                );
                raise exception 'matched' using errcode = 'HW000';
            exception
                when sqlstate 'HW000' then null;
            end;
            return coalesce(matches, '{}');
        end;
        $body$
    $match$;

    execute format('set local role %I', installer);

    for old in
        select
            -- As text, here: the other roles have a schema of their own name in their search path.
            p.proname,
            format('headwater_filter.%I(%s)', p.proname, pg_get_function_identity_arguments(p.oid)) as signature,
            p.proowner::regrole::text as owner
        from pg_proc p
        where
            p.pronamespace = 'headwater_filter'::regnamespace
            and p.proname in (
                'refuse_tokens', 'refuse_tree', 'conjuncts', 'install_part', 'install', 'uninstall', 'plan', 'match',
                'explain_as_filter', 'match_as_filter'
            )
    loop
        execute format('set local role %s', old.owner);
        execute format('revoke all on function %s from public', old.signature);
        if old.proname in ('install', 'uninstall', 'match') then
            execute format('grant execute on function %s to %I', old.signature, installer);
        elsif old.proname in ('explain_as_filter', 'match_as_filter') then
            execute format('grant execute on function %s to headwater_filter_owner', old.signature);
        end if;
        execute format('set local role %I', installer);
    end loop;
    set local role headwater_filter_owner;
    execute format('grant usage on schema headwater_filter to %I', installer);
    execute format('set local role %I', installer);
    reset role;

    -- Check filters of an earlier build again. One that is now rejected stops its subscriptions.
    for old in
        select c.* from headwater_internal.filter c where to_regproc('headwater_filter.' || quote_ident(c.function_name)) is null
    loop
        begin
            perform headwater_filter.install(old.expression);
        exception
            when others then
                insert into headwater_internal.filter_stop (queue_id, filter_id, position, stopped_at, error)
                select distinct s.queue_id, old.id, d.position, clock_timestamp(), left(sqlerrm, 10000)
                from headwater_internal.subscription s
                join headwater_internal.reading d on d.queue_id = s.queue_id
                where s.filter_id = old.id
                on conflict do nothing;
        end;
    end loop;
end;
$do$;
