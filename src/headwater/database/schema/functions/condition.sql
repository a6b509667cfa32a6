-- Filters (conditions): SQL expressions of subscribers, checked and run where they can do no harm.
--
-- A filter becomes the body of a SQL function that Postgres expands into the query that calls it. It is refused when it
-- is installed unless each of four layers accepts it, in this order:
-- 1. its tokens: no name of another schema, no escapes by which a text could end early (refuse_tokens);
-- 2. its parse tree: known kinds of nodes, types and functions of pg_catalog that read nothing and cannot allocate
--    without bound (refuse_tree). Up to here nothing of it was planned, so no constant was folded;
-- 3. its dependencies: nothing but e and s;
-- 4. the planner: what is not expanded could have side effects.
-- Two roles. headwater_condition_owner owns the schema, the filters and every function that decides what is run.
-- headwater_condition is what filters run as: it may create nothing and read nothing but subscriptions. Postgres lets a
-- function run as another role only if that role owns it, so it owns two, `explain_as_filter` and `match_as_filter`,
-- which execute one statement and decide nothing. Two rules make this ownership useless:
-- - nothing but functions of headwater_condition_owner may call them, so that they never run with more rights than its;
-- - the caller makes the transaction read-only before it calls them, and read-only cannot be left from within.

do $do$
declare
    installer constant text := current_user;
    needed text;
    old record;
begin
    foreach needed in array array['headwater_condition', 'headwater_condition_owner'] loop
        if not exists (select from pg_roles r where r.rolname = needed) then
            begin
                execute format('create role %I nologin', needed);
            exception
                when insufficient_privilege or duplicate_object or unique_violation then null;
            end;
        end if;
    end loop;
    begin
        foreach needed in array array['headwater_condition', 'headwater_condition_owner'] loop
            -- Since Postgres 16 who makes a role is its member, but may not become it.
            if current_setting('server_version_num')::integer >= 160000 then
                if not pg_has_role(installer, needed, 'set') then
                    execute format('grant %I to %I with set true', needed, installer);
                end if;
            elsif not pg_has_role(installer, needed, 'member') then
                execute format('grant %I to %I', needed, installer);
            end if;
        end loop;
        -- Of a build in which the role that runs filters owned them: they are installed again below.
        if exists (
            select from pg_namespace n
            where n.nspname = 'headwater_condition' and n.nspowner = 'headwater_condition'::regrole
        ) then
            set local role headwater_condition;
            drop schema headwater_condition cascade;
            execute format('set local role %I', installer);
        end if;
        if not exists (select from pg_namespace n where n.nspname = 'headwater_condition') then
            create schema headwater_condition authorization headwater_condition_owner;
        end if;
        grant usage on schema headwater to headwater_condition, headwater_condition_owner;
        grant select on headwater.subscription to headwater_condition;
        set local role headwater_condition_owner;
    exception
        when insufficient_privilege or undefined_object then
            -- Without the roles there are no filters; `headwater doctor` says how to get them.
            return;
    end;
    grant usage on schema headwater_condition to headwater_condition;

    -- The role that runs filters may create its own two functions here, and only now.
    grant create on schema headwater_condition to headwater_condition;
    execute format('set local role %I', installer);
    set local role headwater_condition;
    for old in
        select p.oid::regprocedure::text as signature
        from pg_proc p
        where
            p.proowner = 'headwater_condition'::regrole
            and p.pronamespace = 'headwater_condition'::regnamespace
            and p.proname not in ('explain_as_filter', 'match_as_filter')
    loop
        execute format('drop function %s', old.signature);
    end loop;

    execute $run$
        -- Plan a statement as the role that filters run as.
        create or replace function headwater_condition.explain_as_filter(statement text)
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
        create or replace function headwater_condition.match_as_filter(
            statement text, events headwater.condition_event[], group_id integer, first_position bigint
        )
        returns headwater.condition_match[]
        language plpgsql
        security definer
        set search_path = pg_catalog, pg_temp
        as $body$
        declare
            matches headwater.condition_match[];
        begin
            execute statement into matches using events, group_id::text, group_id, first_position;
            return matches;
        end;
        $body$
    $run$;

    execute format('set local role %I', installer);
    set local role headwater_condition_owner;
    revoke create on schema headwater_condition from headwater_condition;

    execute $refuse$
        -- Refuse a text that names anything beyond e, s and pg_catalog, or that could be read in two ways.
        create or replace function headwater_condition.refuse_tokens(expression text)
        returns void
        language plpgsql
        set search_path = pg_catalog, pg_temp
        set standard_conforming_strings = on
        as $body$
        declare
            -- Longest match, as the lexer of Postgres: space, comment, texts, names, numbers, and single characters.
            token constant text := $re$[ \t\n\r\f\v]+|--[^\n\r]*|/\*(?:[^*/]|\*+[^*/]|/+[^*/])*\*+/|$re$
                || $re$[eE]'(?:[^'\\]|\\.|'')*'|'(?:[^']|'')*'|"(?:[^"]|"")+"|$re$
                || $re$[A-Za-z_][A-Za-z0-9_]*|(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|$re$
                || $re$[-+*/<>=~!@#%^&|?`:.,()]|\[|\]$re$;
            columns constant text[] := array(
                select a.attname from pg_attribute a
                where
                    a.attnum > 0 and a.attrelid in ('headwater.subscription'::regclass, (
                        select t.typrelid from pg_type t where t.oid = 'headwater.condition_event'::regtype
                    ))
            );
            tokens text[];
            one text;
            -- The tokens before it, without space and comments; and what is right before it.
            last text := '';
            second_last text := '';
            adjacent text := '';
            depth integer := 0;
        begin
            if length(expression) not between 1 and 10000 or octet_length(expression) > 40000 then
                raise exception 'a filter is 1 to 10000 characters' using errcode = 'HW002';
            end if;
            select array_agg(m.found[1]) into tokens from regexp_matches(expression, token, 'g') as m (found);
            if array_to_string(tokens, '') is distinct from expression then
                raise exception 'a filter has texts, names, numbers and operators only: no $ quotes, no semicolon, no '
                    'comment within a comment, no other letters than those of ASCII outside of texts'
                    using errcode = 'HW002';
            end if;
            foreach one in array tokens loop
                if one = '*' and adjacent = '/' then
                    raise exception 'no comment within a comment in a filter' using errcode = 'HW002';
                end if;
                adjacent := one;
                continue when one ~ '^(?:[ \t\n\r\f\v]|--|/\*)';
                if one ~ $re$^[eE]?'$re$ and last ~ $re$'$$re$ then
                    -- The second would be read by the rules of the first.
                    raise exception 'two texts next to each other in a filter: put || between them'
                        using errcode = 'HW002';
                elsif lower(second_last) = 'u' and last = '&' and one ~ $re$^['"]$re$ then
                    raise exception 'no unicode escapes in a filter: write the letter itself' using errcode = 'HW002';
                elsif one = '.' and last !~ '^[eEsS]$'
                    -- Neither a type nor a function of a schema that is called e or s.
                    or one = '.' and lower(second_last) in (':', '.', 'as', 'of', 'returning', 'operator')
                    or last = '.' and lower(trim('"' from one)) <> all (columns)
                    or second_last = '.' and (one = '(' or one ~ $re$^[eE]?'$re$ or one = '.')
                then
                    raise exception 'a filter names columns of e and s, and nothing of another schema'
                        using errcode = 'HW002';
                end if;
                depth := depth + case one when '(' then 1 when ')' then -1 else 0 end;
                if depth < 0 then
                    raise exception 'a ) without its ( in a filter' using errcode = 'HW002';
                end if;
                second_last := last;
                last := one;
            end loop;
            -- Types of pg_temp are found without their schema's name.
            select t.typname into one
            from pg_type t
            join unnest(tokens) as w (word)
                on t.typname = left(case when w.word like '"%' then replace(trim('"' from w.word), '""', '"') else lower(w.word) end, 63)
            where t.typnamespace = pg_my_temp_schema();
            if found then
                raise exception 'a filter cannot use %, which is temporary', one using errcode = 'HW002';
            end if;
        end;
        $body$
    $refuse$;

    execute $refuse$
        -- Refuse a filter by its parse tree: what is not known to be harmless is not allowed.
        create or replace function headwater_condition.refuse_tree(function_name text)
        returns void
        language plpgsql
        set search_path = pg_catalog, pg_temp
        as $body$
        declare
            filter constant oid := to_regproc('headwater_condition.' || quote_ident(function_name));
            tree constant text := (select f.prosqlbody::text from pg_proc f where f.oid = filter);
            refused text;
            most integer;
            -- What a filter may call by name. Operators and casts are checked below.
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
            -- For the current node and those above it: whether it enlarges what it is given, whether its result has a fixed
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
                raise exception 'a filter is one plain expression over e and s, without %', lower(refused)
                    using errcode = 'HW002';
            end if;
            -- current_date and its kind; not current_user, current_schema and theirs.
            if tree ~ '\{SQLVALUEFUNCTION :op (?:9|1[0-9])\M' then
                raise exception 'a filter cannot ask who runs it' using errcode = 'HW002';
            end if;
            -- Types: of pg_catalog, without those that are names of things in the database.
            select format_type(t.oid, null) into refused
            from (
                select distinct m.found[1]::oid as oid
                from regexp_matches(tree, ':[A-Za-z_]*(?:type|typeid|typeId|typid) ([0-9]{1,9})\M', 'g') as m (found)
            ) as used
            join pg_type t on t.oid = used.oid
            left join pg_type element on element.oid = t.typelem and t.typcategory = 'A'
            where
                t.oid not in ('headwater.condition_event'::regtype, 'headwater.subscription'::regtype)
                and (
                    t.typnamespace <> 'pg_catalog'::regnamespace
                    or t.typtype in ('c', 'd', 'e')
                    or coalesce(element.typtype in ('c', 'd', 'e', 'p'), false)
                    or t.typtype = 'p' and t.typname not in ('unknown', 'anyarray', 'anyelement')
                    -- Paths are checked one by one below.
                    or element.typname = 'jsonpath'
                    or coalesce(element.typname, t.typname)
                        ~ '^(?:xml|oid|xid|xid8|cid|tid|refcursor|aclitem|txid_snapshot|reg.*|pg_.*)$'
                )
            limit 1;
            if found then
                raise exception 'a filter cannot use the type %', refused
                    using errcode = 'HW002', hint = 'Only types of Postgres itself that are plain values.';
            end if;
            -- Functions that are called by name (funcformat 0), or by a syntax of their own (3).
            select p.proname into refused
            from regexp_matches(
                tree, '\{FUNCEXPR :funcid ([0-9]{1,9}) :funcresulttype [0-9]+ :funcretset [a-z]+ :funcvariadic [a-z]+ :funcformat [03]\M', 'g'
            ) as m (found)
            join pg_proc p on p.oid = m.found[1]::oid
            where p.proname <> all (callable)
            limit 1;
            if found then
                raise exception 'a filter cannot call %', refused
                    using errcode = 'HW002', hint = 'Only functions of Postgres itself that are known to be harmless.';
            end if;
            -- Functions, also those of operators and casts.
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
                -- Input and output functions run what belongs to a type; those of oids look at catalogs.
                or p.proargtypes::oid[] && array['cstring', 'internal', 'oid', 'regclass', 'regtype', 'regproc',
                    'regconfig', 'regdictionary', 'xml', 'record']::regtype[]::oid[]
                or p.prorettype in ('cstring'::regtype, 'internal'::regtype, 'record'::regtype, 'xml'::regtype)
                -- They look at tables, catalogs, settings or text search configurations.
                or p.proname ~ '_to_xml|^(pg|has|current|session|txid|inet_(client|server)|to_reg|(obj|col|shobj)_desc)'
                or p.proname ~ '^(to_ts|plainto_|phraseto_|websearch_|ts_|jsonb?_to_ts|get_|version|getdatabase|getpgu)'
                or p.proname ~ '^(array_in|array_recv|domain_|enum_|record_|(multi)?range_(in|out|recv|send)$|format_type)'
                -- What they return can be many times as large as what they are given.
                or p.proname ~ '^(repeat|lpad|rpad|format|replace|regexp_replace|array_fill|array_to_string|concat_ws)$'
                or p.proname ~ '^(jsonb?_populate|jsonb?_to_record|jsonb?_object$|row_to_json|xml|xpath)'
            limit 1;
            if found then
                raise exception 'a filter cannot call %', refused
                    using errcode = 'HW002', hint = 'Only functions of Postgres itself that read nothing.';
            end if;
            -- Bound what the rest can allocate and compute from a few characters.
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
                raise exception 'a filter has at most % %', most, refused using errcode = 'HW002';
            end if;
            -- Bound the memory of one evaluation: what is computed on the way is freed only at its end. A conversion to text
            -- can double what it is given (it escapes backslashes and quotes), so that n of them within each other make 2^n
            -- times as much; all else is at most as large as its arguments together.
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
                    -- A constant is at most 10000 characters.
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
                    raise exception 'a filter is too large: it could take more than 128 times the memory of its event'
                        using errcode = 'HW002',
                              hint = 'Use fewer texts, JSON values and arrays, and fewer conversions within each other.';
                end if;
            end loop;
            -- A path in JSON is a language of its own, in which a few characters can ask for more items than fit into
            -- memory: [0,0][0,0]... doubles them each time, .**.** squares them, and $ within ?() asks for all of them
            -- again for each. So a path is a constant, and has none of these.
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
                raise exception 'a path in JSON is a constant with at most one .**, no list of subscripts and no $ within ?()'
                    using errcode = 'HW002';
            end if;
            -- char(n), bit(n) and the like make a value of n characters of anything. Their functions are not callable by
            -- name, so a length is one of a type, and the filter as Postgres shows it has it as a number.
            if regexp_replace(pg_get_function_sqlbody(filter), $re$'(?:[^']|'')*'$re$, '', 'g')
                ~ '::"?(?:character|char|bpchar|bit|bit varying|varbit)"?\([0-9]{5,}\)'
            then
                raise exception 'a length in a filter is too large' using errcode = 'HW002';
            end if;
            -- What is not of Postgres itself is a dependency.
            if exists (
                select from pg_depend d
                where
                    d.classid = 'pg_proc'::regclass
                    and d.objid = filter
                    and not (
                        d.refclassid = 'pg_namespace'::regclass
                        or d.refclassid = 'pg_type'::regclass and d.refobjid in (
                            'headwater.condition_event'::regtype, 'headwater.subscription'::regtype
                        )
                        or d.refclassid = 'pg_class'::regclass and d.refobjid in (
                            'headwater.subscription'::regclass, (
                                select t.typrelid from pg_type t where t.oid = 'headwater.condition_event'::regtype
                            )
                        )
                    )
            ) then
                raise exception 'a filter can only use e, s and what Postgres itself has' using errcode = 'HW002';
            end if;
        end;
        $body$
    $refuse$;

    execute $split$
        -- The parts of a condition as EXPLAIN shows it that are joined by AND.
        create or replace function headwater_condition.conjuncts(shown text)
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
        -- Make a function of the event alone, named by what it computes; null if the text needs more than the event.
        create or replace function headwater_condition.install_part(kind text, result text, expression text)
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
                select from pg_proc p where p.proname = name and p.pronamespace = 'headwater_condition'::regnamespace
            ) then
                execute format(
                    E'create function headwater_condition.%I(e headwater.condition_event) returns %s language sql stable '
                    'return (%s\n)', name, result, expression
                );
                perform headwater_condition.refuse_tree(name);
                execute format('revoke all on function headwater_condition.%I from public', name);
                execute format('grant execute on function headwater_condition.%I to headwater_condition', name);
            end if;
            return name;
        exception
            when undefined_table or undefined_column or sqlstate 'HW002' or syntax_error_or_access_rule_violation then
                return null;
        end;
        $body$
    $install$;

    execute $install$
        -- Check a filter and make it callable; returns the name of its function. How it is matched is noted as its comment:
        -- `key`: a function of the event; only subscriptions whose params contain what it returns can match.
        -- `when`: a function of the event that must hold. `event_only`: nothing else must; `key_only`: nothing but both.
        -- `plain_key`: the key only takes values out of JSON, so it does not fail on events that `when` would keep from it.
        create or replace function headwater_condition.install(expression text)
        returns text
        language plpgsql
        security definer
        set search_path = pg_catalog, pg_temp
        set standard_conforming_strings = on
        as $body$
        declare
            name constant text := 'condition_' || left(encode(sha256(convert_to(expression, 'UTF8')), 'hex'), 48);
            plan jsonb;
            joined text;
            part text;
            how jsonb;
        begin
            if to_regproc('headwater_condition.' || name) is not null then
                return name;
            end if;
            perform headwater_condition.refuse_tokens(expression);
            -- Two that install the same filter: the second waits for the first, and finds it done.
            perform pg_advisory_xact_lock((29285::bigint << 48) | (hashtextextended(name, 0) & 281474976710655));
            -- By a query: what to_regproc did not find before the lock, it would not find now.
            if exists (
                select from pg_proc p where p.proname = name and p.pronamespace = 'headwater_condition'::regnamespace
            ) then
                return name;
            end if;
            execute 'create function headwater_condition.' || name
                || '(e headwater.condition_event, s headwater.subscription) returns boolean language sql stable '
                || 'return (' || expression || E'\n)';
            perform headwater_condition.refuse_tree(name);
            execute format('revoke all on function headwater_condition.%I from public', name);
            execute format('grant execute on function headwater_condition.%I to headwater_condition', name);
            plan := headwater_condition.plan(name);
            if strpos(plan::text, name) > 0 then
                raise exception 'a filter is one plain expression over e and s: no subquery, no volatile function'
                    using errcode = 'HW002';
            end if;
            joined := plan #>> '{joined}';
            foreach part in array headwater_condition.conjuncts(coalesce(joined, '')) loop
                part := coalesce(
                    substring(part from '^\(s\.params @> (.*)\)$'), substring(part from '^\((.*) <@ s\.params\)$')
                );
                if part is not null then
                    how := jsonb_build_object('key', headwater_condition.install_part('key', 'jsonb', part));
                    exit when how ->> 'key' is not null;
                end if;
            end loop;
            how := jsonb_strip_nulls(
                coalesce(how, '{}')
                || jsonb_build_object(
                    'key_only', case
                        when how ->> 'key' is not null and cardinality(headwater_condition.conjuncts(joined)) = 1
                            and plan ->> 'of_subscription' is null and plan ->> 'once' is null then true
                    end,
                    'plain_key', (
                        select true from pg_proc k
                        where
                            k.proname = how ->> 'key'
                            and k.pronamespace = 'headwater_condition'::regnamespace
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
                    'when', headwater_condition.install_part('when', 'boolean', nullif(plan ->> 'of_event', '')),
                    'event_only', case
                        when joined is null and plan ->> 'of_subscription' is null and plan ->> 'once' is null then true
                    end
                )
            );
            if plan ->> 'of_event' is not null and not how ? 'when' then
                how := how - 'event_only' - 'key_only';
            end if;
            execute format(
                'comment on function headwater_condition.%I(headwater.condition_event, headwater.subscription) is %L',
                name, how
            );
            return name;
        end;
        $body$
    $install$;

    execute $uninstall$
        -- Forget a filter without subscriptions. What it shares with others stays.
        create or replace function headwater_condition.uninstall(function_name text)
        returns void
        language plpgsql
        security definer
        set search_path = pg_catalog, pg_temp
        as $body$
        begin
            if function_name !~ '^condition_[0-9a-f]{48}$' then
                raise exception 'not the function of a filter: %', function_name using errcode = 'HW002';
            end if;
            execute format('drop function if exists headwater_condition.%I', function_name);
        end;
        $body$
    $uninstall$;

    execute $plan$
        -- How Postgres plans a filter: what it asks of the event, of the subscription, of both, and once.
        create or replace function headwater_condition.plan(function_name text)
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
            if function_name !~ '^condition_[0-9a-f]{48}$' then
                raise exception 'not the function of a filter: %', function_name using errcode = 'HW002';
            end if;
            -- Read-only until this block is rolled back, which Postgres takes as the end of a transaction.
            begin
                perform set_config('transaction_read_only', 'on', true);
                plan := headwater_condition.explain_as_filter(
                    'select from unnest(array[]::headwater.condition_event[]) as e, '
                    'headwater.subscription as s where headwater_condition.' || function_name || '(e, s)'
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
        -- The subscriptions of a group with these filters that each event matches, by one statement. A filter with a key
        -- is one probe of the index on subscription.probe for each event, and filters with the same key share it: the
        -- subquery that probes has no other condition, so that no other index can be chosen.
        create or replace function headwater_condition.match(
            function_names text[], condition_ids integer[], events headwater.condition_event[], group_id integer
        )
        returns headwater.condition_match[]
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
            matches headwater.condition_match[];
            -- Events come in the order of their positions.
            first_position constant bigint := (events[1]).position;
        begin
            with filter as (
                select f.id, f.name, d.how ->> 'key' as key, d.how ->> 'when' as condition, d.how ? 'event_only' as of_event,
                    d.how ? 'key_only' as key_only, d.how ? 'plain_key' as plain_key
                from unnest(function_names, condition_ids) as f (name, id)
                -- One that is missing stays in: its call fails, and the error is noted.
                left join pg_proc p
                    on p.proname = f.name and p.pronamespace = 'headwater_condition'::regnamespace
                cross join lateral (
                    select (
                        select c.description from pg_description c
                        where c.objoid = p.oid and c.classoid = 'pg_proc'::regclass and c.objsubid = 0
                    )::jsonb as how
                    -- Looked up once, and not for each mention.
                    offset 0
                ) as d
            ), key as (
                select
                    f.key,
                    row_number() over (order by f.key) as number,
                    -- Many of them cost more to plan than the probes that they save. A key that can fail needs them.
                    case when count(f.condition) = count(*) and not (bool_and(f.plain_key) and count(*) > 8) then
                        string_agg(distinct 'headwater_condition.' || quote_ident(f.condition) || '(e)', ' or ')
                    end as condition
                from filter f
                where f.key is not null
                group by f.key
            )
            select
                (
                    select string_agg(
                        format(
                            case when k.condition is null then '(%s, headwater_condition.%I(e))'
                            else '(%s, case when %3$s then headwater_condition.%2$I(e) end)' end,
                            k.number, k.key, k.condition
                        ), ', ' order by k.number
                    )
                    from key k
                ),
                (
                    select string_agg(
                        format('when %s then k.number = %s', f.id, k.number) || case
                            when not f.key_only then format(' and headwater_condition.%I(e, c.s)', f.name)
                            when f.condition is null then ''
                            else format(' and headwater_condition.%I(e)', f.condition)
                        end,
                        ' ' order by f.id
                    )
                    from filter f join key k using (key)
                ),
                (
                    select array_agg(a.arm order by f.id)
                    from filter f
                    cross join lateral (
                        -- The filter is of the event alone: ask it once, and not for each subscription.
                        select format(
                            'select e.position, c.ids from unnest($1) as e cross join ('
                            'select array_agg(s.id order by s.id) as ids from headwater.subscription as s '
                            'where s.group_id = $3 and s.condition_id = %s and s.from_position < $4) as c '
                            'where c.ids is not null and %s',
                            f.id, coalesce('headwater_condition.' || quote_ident(f.condition) || '(e)', 'true')
                        )
                        where f.of_event
                        union all
                        select format(
                            'select e.position, array_agg(s.id order by s.id) from unnest($1) as e join headwater.subscription as s '
                            'on s.group_id = $3 and s.condition_id = %s and e.position > s.from_position %s '
                            'and headwater_condition.%I(e, s) group by e.position',
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
                    'select s.id, s.condition_id, s.from_position, %s as s from headwater.subscription as s '
                    'where s.probe @> jsonb_build_object($2, k.key) offset 0) as c '
                    'where k.key is not null and e.position > c.from_position '
                    'and case c.condition_id %s else false end group by e.position',
                    -- The whole row only where a filter looks at it.
                    keys, case when strpos(tests, '(e, c.s)') > 0 then 's' else 'null' end, tests
                ) || arms;
            end if;
            -- Read-only until this block is rolled back; what was found stays in the variable.
            begin
                perform set_config('transaction_read_only', 'on', true);
                matches := headwater_condition.match_as_filter(
                    'select array_agg(row(f.*)::headwater.condition_match) from (' || array_to_string(arms, ' union all ')
                    || ') as f', events, group_id, first_position
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
            format('headwater_condition.%I(%s)', p.proname, pg_get_function_identity_arguments(p.oid)) as signature,
            p.proowner::regrole::text as owner
        from pg_proc p
        where
            p.pronamespace = 'headwater_condition'::regnamespace
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
            execute format('grant execute on function %s to headwater_condition_owner', old.signature);
        end if;
        execute format('set local role %I', installer);
    end loop;
    set local role headwater_condition_owner;
    execute format('grant usage on schema headwater_condition to %I', installer);
    execute format('set local role %I', installer);
    reset role;

    -- Filters of an earlier build are checked again. One that is refused now stops its subscriptions.
    for old in
        select c.* from headwater.condition c where to_regproc('headwater_condition.' || quote_ident(c.function_name)) is null
    loop
        begin
            perform headwater_condition.install(old.expression);
        exception
            when others then
                insert into headwater.filter_stop (group_id, condition_id, position, stopped_at, error)
                select distinct s.group_id, old.id, d.position, clock_timestamp(), left(sqlerrm, 10000)
                from headwater.subscription s
                join headwater.reading d on d.group_id = s.group_id
                where s.condition_id = old.id
                on conflict do nothing;
        end;
    end loop;
end;
$do$;
