-- Filters (conditions): SQL expressions of subscribers, checked and run where they can do no harm.
--
-- A filter becomes the body of a SQL function that Postgres expands into the query that calls it. It is refused when it
-- is installed unless each of four layers accepts it, in this order:
-- 1. its tokens: no name of another schema, no escapes by which a text could end early (refuse_tokens);
-- 2. its parse tree: known kinds of nodes, types and functions of pg_catalog that read nothing and cannot allocate
--    without bound (refuse_tree). Up to here nothing of it was planned, so no constant was folded;
-- 3. its dependencies: nothing but e and s;
-- 4. the planner: what is not expanded could have side effects.
-- Two roles: headwater_condition_owner owns the schema, the filters and `install`; headwater_condition runs and plans
-- filters. It owns the two functions that do so and nothing else, may create nothing and read nothing but
-- subscriptions, and those two functions make the transaction read-only while they run.

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
                    or coalesce(element.typname, t.typname)
                        ~ '^(?:xml|oid|xid|xid8|cid|tid|refcursor|aclitem|txid_snapshot|reg.*|pg_.*)$'
                )
            limit 1;
            if found then
                raise exception 'a filter cannot use the type %', refused
                    using errcode = 'HW002', hint = 'Only types of Postgres itself that are plain values.';
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
                            or p.proname ~ '^(array_prepend|jsonb_concat|jsonb_set|jsonb_insert|overlay)' then 'joins'
                        when p.proname ~ '^(encode|convert|quote_|to_json|ascii|to_char|jsonb_pretty|jsonb_build)'
                            or p.proname ~ '^(bpchar|varbit|bit|translate|string_to_array|regexp_split|array_replace)'
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
            -- char(n), bit(n) and the like make a value of n characters of anything.
            if exists (
                select from regexp_matches(tree, ':[A-Za-z_]*typmod ([0-9]{1,10})\M', 'g') as m (found)
                where m.found[1]::bigint > 10000004
            ) or tree ~ ':(?:funcid) (?:668|1685|1687) ' and tree ~ ':constlen 4 [^}]*:constvalue 4 \[ [-0-9]+ [-0-9]+ (?!0 )'
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

    -- The role that runs filters may create its own functions here, and only now.
    grant create on schema headwater_condition to headwater_condition;
    execute format('set local role %I', installer);
    set local role headwater_condition;

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
                execute 'explain (verbose, format json) select from unnest(array[]::headwater.condition_event[]) as e, '
                    'headwater.subscription as s where headwater_condition.' || function_name || '(e, s)'
                    into plan;
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
                execute 'select array_agg(row(f.*)::headwater.condition_match) from (' || array_to_string(arms, ' union all ')
                    || ') as f'
                    into matches using events, group_id::text, group_id, first_position;
                raise exception 'matched' using errcode = 'HW000';
            exception
                when sqlstate 'HW000' then null;
            end;
            return coalesce(matches, '{}');
        end;
        $body$
    $match$;

    execute format('set local role %I', installer);
    set local role headwater_condition_owner;
    revoke create on schema headwater_condition from headwater_condition;
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
                'refuse_tokens', 'refuse_tree', 'conjuncts', 'install_part', 'install', 'uninstall', 'plan', 'match'
            )
    loop
        execute format('set local role %s', old.owner);
        execute format('revoke all on function %s from public', old.signature);
        if old.proname in ('install', 'uninstall', 'match') then
            execute format('grant execute on function %s to %I', old.signature, installer);
        elsif old.proname = 'plan' then
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
