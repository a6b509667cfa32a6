"""Can a filter do anything but look at its event and its subscription?

One attack for each idea. Each is tried as a login role that is a `headwater_consumer` and nothing else, and has what
PUBLIC has by default: the right to create temporary objects. Where an attack needs an object, the attacker made it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from psycopg import conninfo, sql

import headwater
from patience import PATIENCE_SECONDS

PREPARATION = """
create function pg_temp.evil(t text) returns boolean language plpgsql as $$
begin
    raise exception 'evil ran as %', current_user using errcode = 'EVIL1';
end;
$$;
create domain pg_temp.dom as text check (pg_temp.evil(value));
create type pg_temp.mood as enum ('low', 'high');
create type pg_temp.comp as (a pg_temp.dom);
create temporary table tab (a pg_temp.dom);
create type pg_temp.rng as range (subtype = text);
create function pg_temp.lower(t text) returns text language sql as $$ select 'x' $$;
create function pg_temp.same(a text, b text) returns boolean language sql as $$ select pg_temp.evil(a) $$;
create operator pg_temp.= (leftarg = text, rightarg = text, function = pg_temp.same);
create operator pg_temp.=== (leftarg = text, rightarg = text, function = pg_temp.same);
create aggregate pg_temp.agg (text) (sfunc = textcat, stype = text, initcond = '');
"""


@pytest.fixture(scope="module")
def attacker(dsn: str) -> Iterator[psycopg.Connection]:
    """Somebody who may subscribe, and has made what the attacks need."""
    role = f"attacker_{os.getpid()}"
    name = sql.Identifier(role)
    with psycopg.connect(dsn, autocommit=True) as admin:
        admin.execute(sql.SQL("create role {} login in role headwater_consumer").format(name))
        database = sql.Identifier(admin.info.dbname)
        # Schemas with the names of the aliases, open to all.
        for schema in ("e", "s", "open"):
            admin.execute(sql.SQL("create schema {} authorization {}").format(sql.Identifier(schema), name))
        try:
            with psycopg.connect(conninfo.make_conninfo(dsn, user=role), autocommit=True) as connection:
                connection.execute(PREPARATION)
                for schema in ("e", "s", "open"):
                    connection.execute(
                        f"create function {schema}.evil(t text) returns boolean language plpgsql stable as "
                        "$$ begin raise exception 'evil ran' using errcode = 'EVIL1'; end $$; "
                        f"create domain {schema}.topic as text check ({schema}.evil(value)); "
                        f"create domain {schema}.params as text check ({schema}.evil(value)); "
                        f"create type {schema}.rng as range (subtype = {schema}.topic); "
                        f"grant usage on schema {schema} to public"
                    )
                yield connection
        finally:
            admin.execute(
                sql.SQL("select pg_terminate_backend(pid) from pg_stat_activity where usename = {}").format(role)
            )
            admin.execute(sql.SQL("drop schema e, s, open cascade"))
            admin.execute(sql.SQL("drop owned by {}").format(name))
            admin.execute(sql.SQL("drop role {}").format(name))
            assert database


ATTACKS = {
    "a domain of pg_temp": "e.topic::pg_temp.dom is not null",
    "a domain of pg_temp without its schema": "e.topic::dom is not null",
    "a domain in quotes": 'e.topic::"dom" is not null',
    "a domain by cast": "cast(e.topic as pg_temp.dom) is not null",
    "a domain by a typed literal": "pg_temp.dom 'x' is not null",
    "a domain by a typed literal without its schema": "dom 'x' is not null",
    "an array of a domain": "array[e.topic]::pg_temp.dom[] is not null",
    "a literal array of a domain, read while parsing": "'{x}'::dom[] is not null",
    "a domain of information_schema": "e.topic::information_schema.sql_identifier is not null",
    "a domain of another schema": "e.topic::open.topic is not null",
    "a domain of a schema called e": "e.topic::e.topic is not null",
    "a literal array of a domain of a schema called e": "'{x}'::e.topic[] is not null",
    "a typed literal of a schema called e": "e.topic 'x' is not null",
    "a cast to a schema called s": "cast('{x}' as s.params[]) is not null",
    "a function of a schema called e": "e.evil('x')",
    "an enum": "e.topic::mood is not null",
    "a composite type": "'(x)'::comp is not null",
    "a composite type by its table": "'(x)'::tab is not null",
    "a row type of the catalog": "null::pg_class is null",
    "a row of a catalog from a literal": "('(1)'::pg_class).relname is null",
    "a range with a subtype of a user": "rng(e.topic, null) is not null",
    "a literal range with a domain within": "'[a,b]'::open.rng is not null",
    "a multirange": "'{}'::rngmultirange is not null",
    "the input function of domains, by oid": "domain_in('x', 16384, -1) is not null",
    "the input function of arrays, by oid": "array_in('{x}', 16384, -1) is not null",
    "the input function of records, by oid": "record_in('(x)', 16384, -1) is not null",
    "the input function of ranges, by oid": "range_in('[a,b]', 16384, -1) is not null",
    "a record from JSON": "jsonb_populate_record(null::comp, e.data) is not null",
    "a record from JSON with a catalog's type": "jsonb_populate_record(null::pg_class, e.data) is not null",
    "a row constructor": "row(e.topic)::comp is not null",
    "an operator of pg_temp by name": "e.topic operator(pg_temp.=) 'x'",
    "an operator of pg_temp": "e.topic === 'x'",
    "a function of pg_temp": "pg_temp.evil(e.topic)",
    "a function of pg_temp without its schema": "evil(e.topic)",
    "a function as a field": "(e.topic).evil",
    "an aggregate": "max(e.topic) is null",
    "an aggregate of a user": "agg(e.topic) is null",
    "a window function": "row_number() over () > 0",
    "an ordered-set aggregate": "percentile_disc(0.5) within queue (order by e.position) > 0",
    "a set-returning function": "generate_series(1, 1000000000) > 0",
    "a set-returning function of JSON": "jsonb_array_elements(e.data) is not null",
    "a subquery": "exists (select from headwater_internal.event)",
    "an array of a subquery": "array(select 1) is not null",
    "a subquery of values": "1 in (values (1))",
    "a collation of a user": 'e.topic collate "open"."c" < \'x\'',
    "a name of a table": "'pg_authid'::regclass is not null",
    "a name of a table from the event": "e.topic::regclass is not null",
    "a name of a role": "e.topic::regrole is not null",
    "a name of a function": "e.topic::regproc is not null",
    "a number of a table": "e.position::oid is not null",
    "a setting": "current_setting('data_directory') is null",
    "a setting that is changed": "set_config('role', 'postgres', false) is null",
    "a file": "pg_read_file('/etc/passwd') is null",
    "a file in bytes": "pg_read_binary_file('/etc/passwd') is null",
    "a directory": "pg_ls_dir('/') is null",
    "a large object": "lo_get(1) is null",
    "who runs it": "current_user = 'postgres'",
    "which schema it runs in": "current_schema = 'public'",
    "the version": "version() is null",
    "a privilege": "has_table_privilege('pg_class', 'select')",
    "a comment of an object": "obj_description(1, 'pg_class') is null",
    "a table as XML": "table_to_xml('headwater_internal.subscription', true, true, '') is null",
    "a query as XML": "query_to_xml('select 1', true, true, '') is null",
    "an XML document": "xmlparse(document '<a/>') is not null",
    "an XML type": "'<a/>'::xml is not null",
    "XPath": "xpath('/a', '<a/>') is not null",
    "a text search configuration": "to_tsvector(e.topic) is not null",
    "a sequence": "nextval('headwater_internal.position') > 0",
    "a transaction number": "txid_current() > 0",
    "a sleep": "pg_sleep(10) is null",
    "a lock": "pg_advisory_lock(1) is null",
    "a notice to others": "pg_notify('a', 'b') is null",
    "the end of another session": "pg_terminate_backend(1)",
    "a second statement": "true; drop table headwater_internal.event",
    "the end of the wrapping parentheses": "true) or (true",
    "a union": "true) from headwater_internal.topic union select (true",
    "a body that goes on": "true\n) cost 1 as (true",
    "dollar quotes": "$x$ $x$ is not null",
    "a parameter": "$1 is null",
    "a unicode name": 'U&"\\0065vil"(e.topic)',
    "a unicode text": "U&'\\0041' = 'A'",
    "a comment in a comment that hides a quote": "/* /* ' */ */ e.topic::dom is not null /* ' */",
    "a comment that never ends": "true /* ",
    "a text that goes on by the rules of another": "e'a'\n'\\'' is null or e.topic::pg_temp.dom is null or 'x' = ''",
    "a quote that never ends": "'x",
    "a letter that looks like space": "e\u00a0.topic is null",
    "a megabyte of text": "e.topic <> '" + "x" * 1_000_000 + "'",
    "half a gigabyte from a constant": "length(repeat('x', 500000000)) > 0",
    "half a gigabyte from the event": "length(repeat(e.data ->> 'a', 100000000)) > 0",
    "padding to the left": "length(lpad('x', 500000000)) > 0",
    "padding to the right": "length(rpad(e.topic, 500000000, 'x')) > 0",
    "a width of format": "length(format('%500000000s', 'x')) > 0",
    "padding by a type": "length('x'::char(10000000)::text || 'x'::char(10000000)::text) > 0",
    "padding of the event by a type": "length(e.topic::char(100000)::text) > 0",
    "padding of a number by bits": "1::bit(80000000) is not null",
    "padding by bits of any length": "length('1'::varbit(10)::bit(80000000)) > 0",
    "padding of an array by a type": "array[e.topic]::char(100000)[] is not null",
    "padding by bits": "length('1'::bit(80000000)) > 0",
    "an array of a million": "cardinality(array_fill(1, array[100000000])) > 0",
    "replacing one by many": "length(replace(replace(e.topic, 'a', 'aaaaaaaaaa'), 'a', 'aaaaaaaaaa')) > 0",
    "replacing by a pattern": "length(regexp_replace(e.topic, '.', '\\&\\&\\&', 'g')) > 0",
    "joining an array with a long text": "length(array_to_string(array[1, 2], e.topic)) > 0",
    "a thousand joins": "length(" + " || ".join(["e.topic"] * 500) + ") > 0",
    "a hundred encodings": "length(" + "encode(convert_to(" * 20 + "e.topic" + ", 'UTF8'), 'hex')" * 20 + ") > 0",
    "a number of many digits": "10::numeric ^ 10::numeric ^ 2 ^ 2 ^ 2 ^ 2::numeric > 0 and power(9.9, 9.9) ^ 9 ^ 9 > 0",
    "conversions that double a text each time": "length(" + "array[" * 40 + "'\\'" + "]::text" * 40 + ") > 0",
    "conversions of the event": "length(" + "to_jsonb(" * 8 + "e.topic" + ")::text" * 8 + ") > 0",
    "a polygon of many points": "polygon(60000000, '<(0,0),1>'::circle) is not null",
    "a length that is computed": "length(\"bpchar\"('x'::bpchar, 10000 * 10000, true)) > 0",
    "bits of a number": '"bit"(1, 2000000000) is not null',
    "a hundred copies in one call": "length(concat(" + ", ".join(["e.payload"] * 90) + ")) > 0",
    "a hundred copies in an array": "cardinality(array[" + ", ".join(["e.payload"] * 150) + "]) > 0",
    "a hundred copies in JSON": "jsonb_build_array(" + ", ".join(["e.data"] * 90) + ") is null",
    "hundreds of copies within each other": "length(" + "lower(" * 500 + "e.topic" + ")" * 500 + ") > 0",
    "hundreds of copies one after the other": " or ".join(["(e.data - 'a') is null"] * 300),
    "a JSON path that doubles": "jsonb_path_query_array('1', '$" + "[0,0]" * 28 + "') is null",
    "a JSON path that doubles, in an operator": "'1'::jsonb @@ '$" + "[0,0]" * 28 + " == 2'",
    "a JSON path of all below all": "e.data @? '$ ? (@.**.** == 1)'",
    "a JSON path that starts over for each": "e.data @? '$[*] ? (@ == $[*])'",
    "a JSON path from the subscription": "e.data @? (s.params ->> 'path')::jsonpath",
    "a JSON path from an array": "e.data @? ('{$,$}'::jsonpath[])[1]",
    "a JSON path behind a text that looks like one": "'''$''::jsonpath' = '' or e.data @? '$[0,0]'",
    "indentation that grows": "length(jsonb_pretty('" + "[" * 4000 + "]" * 4000 + "')) > 0",
    "matches that are counted": " or ".join(["regexp_count(e.topic, '') < 0"] * 20),
    "conversions by concat": "length(" + "concat(array[" * 12 + "e.topic" + "])" * 12 + ") > 0",
    "conversions by JSON": "length(" + "(jsonb_build_array(" * 12 + "e.topic" + ") ->> '{}')" * 12 + ") > 0",
    "copies of what was enlarged": f"length({'upper(' * 60}array[array[e.data]::text]::text{')' * 60}) > 0",
    "quotes of quotes": "length(" + "quote_literal(" * 8 + "e.topic" + ")" * 8 + ") > 0",
    "a query by text search": "ts_rewrite('a'::tsquery, 'select 1, 2') is not null",
    "statistics of a query": "ts_stat('select 1') is null",
    "a cursor as XML": "cursor_to_xml('c', 1, true, true, '') is null",
    "the database as XML": "database_to_xml(true, true, '') is null",
    "a schema as XML": "schema_to_xml('headwater', true, true, '') is null",
    "a lock of a publisher": "pg_try_advisory_xact_lock_shared(1, 2)",
    "a snapshot that is given out": "pg_export_snapshot() is null",
    "a message in the WAL": "pg_logical_emit_message(false, 'a', 'b') is null",
    "a large object from a file": "lo_import('/etc/passwd') > 0",
    "a large object that is written": "lo_from_bytea(0, e.payload) > 0",
    "entities of XML": "xmlparse(document '<!DOCTYPE a [<!ENTITY b \"c\">]><a>&b;</a>') is not null",
    "a row from JSON by a definition": "jsonb_to_record(e.data) is not null",
    "a row of a composite array": "'{(1)}'::pg_class[] is not null",
    "a default of a type": "null::comp is null",
    "a range of a domain by its function": "rng('a', 'b') is not null",
    "an access method's function": "hash_array_extended(array[1], 1) is null",
    "a function of an aggregate": "int8inc(e.position) > 0",
    "a list of privileges": "acldefault('r', 10) is null",
    "the rights of a row": "row_security_active('headwater_internal.event')",
    "the user of the operating system": "system_user is null",
    "many factorials": " + ".join(["factorial(32000)"] * 5) + " > 0",
    "a function of ours": "headwater.head() > 0",
    "a function of the sandbox": "headwater_filter.install('true') is null",
    "no expression": "",
    "no boolean": "1",
}


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS.keys())
def test_an_attack_is_refused_when_it_subscribes(attacker: psycopg.Connection, attack: str) -> None:
    with pytest.raises(psycopg.Error) as refused:
        attacker.execute("select headwater.subscribe('attack', %s, from_position => 0)", (attack,))
    # HW002, and nothing of the attacker's ran on the way there.
    assert refused.value.sqlstate == "HW002"
    assert attacker.execute(
        "select count(*) from headwater_internal.filter where expression = %s", (attack,)
    ).fetchone() == (0,)


def test_session_settings_do_not_change_how_a_filter_is_read(attacker: psycopg.Connection) -> None:
    attacker.execute("set standard_conforming_strings = off")
    attacker.execute("set search_path = pg_temp, open, pg_catalog")
    try:
        for attack in (r"'\' is null or e.topic::dom is null or '\' = ''", "e.topic::topic is null"):
            with pytest.raises(psycopg.Error) as refused:
                attacker.execute("select headwater.subscribe('attack', %s, from_position => 0)", (attack,))
            assert refused.value.sqlstate == "HW002"
        # lower() is that of Postgres itself.
        attacker.execute("select headwater.subscribe('harmless', %s, from_position => 0)", ("lower('A') = 'x'",))
    finally:
        attacker.execute("reset all")


def test_the_role_that_runs_filters_owns_nothing_but_the_two_functions_that_switch_to_it(
    connection: psycopg.Connection,
) -> None:
    owned = connection.execute(
        "select p.proname from pg_proc p where p.proowner = 'headwater_filter'::regrole order by 1"
    ).fetchall()
    assert owned == [("explain_as_filter",), ("match_as_filter",)]
    # Postgres itself knows of nothing else, in any catalog.
    assert connection.execute(
        "select count(*) from pg_shdepend where refobjid = 'headwater_filter'::regrole and deptype = 'o'"
        " and dbid = (select oid from pg_database where datname = current_database())"
    ).fetchone() == (2,)
    # They are called by functions of the owner's role only.
    assert connection.execute(
        "select distinct r.rolname from pg_proc p cross join lateral aclexplode(p.proacl) as a "
        "join pg_roles r on r.oid = a.grantee where p.proowner = 'headwater_filter'::regrole order by 1"
    ).fetchall() == [("headwater_filter",), ("headwater_filter_owner",)]
    assert connection.execute(
        "select count(*) from pg_namespace n where nspname in ('headwater', 'headwater_internal', 'headwater_filter') "
        "and has_schema_privilege('headwater_filter', n.oid, 'create')"
    ).fetchone() == (0,)
    readable = connection.execute(
        "select c.relname from pg_class c where c.relnamespace in ('headwater'::regnamespace, "
        "'headwater_internal'::regnamespace) "
        "and c.relkind in ('r', 'p', 'v') "
        "and has_table_privilege('headwater_filter', c.oid, 'select, insert, update, delete')"
    ).fetchall()
    assert readable == [("subscription",)]


MATCH_AS_FILTER = "headwater_filter.match_as_filter(text, headwater.filter_event[], integer, bigint)"
# What code that got through every check would try, and why Postgres refuses it.
ESCAPES = {
    "make its function run as the caller": (f"alter function {MATCH_AS_FILTER} security invoker", "read-only"),
    "give its function a setting": (f"alter function {MATCH_AS_FILTER} set search_path = evil", "read-only"),
    "rename its function": (f"alter function {MATCH_AS_FILTER} rename to other", "read-only"),
    "give its function away": (f"alter function {MATCH_AS_FILTER} owner to headwater_filter_owner", "read-only"),
    "open its function to all": (f"grant execute on function {MATCH_AS_FILTER} to public", "read-only"),
    "drop its function": (f"drop function {MATCH_AS_FILTER}", "read-only"),
    "replace its function": (
        "create or replace function headwater_filter.explain_as_filter(statement text) returns json language sql "
        "return null::json",
        "read-only",
    ),
    "make a temporary table": ("create temporary table evil (a integer)", "read-only"),
    "make a temporary function": ("create function pg_temp.evil() returns integer language sql return 1", "read-only"),
    "make a temporary domain": ("create domain pg_temp.evil as text", "read-only"),
    "make a role": ("create role evil", "read-only"),
    "write": ("delete from headwater_internal.subscription", "read-only"),
    "draw a position": ("select nextval('headwater_internal.position')", "permission denied"),
    "read events": ("select count(*) from headwater_internal.event", "permission denied"),
    "read a file": ("select pg_read_file('/etc/passwd')", "permission denied"),
    "run a program": ("copy (select 1) to program 'true'", "external program"),
    "write again": ("set transaction_read_only = off", "read-write mode"),
    "write again by its other name": ("set transaction read write", "read-write mode"),
    "write again in a block": (
        "do $x$ begin begin perform set_config('transaction_read_only', 'off', true); end; end $x$", "read-write mode",
    ),
    "end the transaction": ("commit", "transaction"),
    "end it in a block": ("do $x$ begin rollback; end $x$", "invalid transaction termination"),
    "become another": ("set role postgres", "security-definer"),
    "become itself": ("reset role", "security-definer"),
    "be the session's user": ("set session authorization default", "security-definer"),
    "stop the read-only rule for later": ("alter role headwater_filter set role = 'postgres'", "read-only"),
}  # fmt: skip


@pytest.fixture
def got_through(
    log: headwater.Headwater, topic: str, connection: psycopg.Connection
) -> Iterator[Callable[[str], str | None]]:
    """Run a statement as if a filter could: returns the error that the reader notes for this filter."""
    log.subscribe(topic, "true")
    ((name,),) = connection.execute(
        "select function_name from headwater_internal.filter where expression = 'true'"
    ).fetchall()
    signature = f"headwater_filter.{name}(e headwater.filter_event, s headwater_internal.subscription)"

    def run(statement: str) -> str | None:
        connection.execute(
            f"create or replace function {signature} returns boolean language plpgsql as $got_through$ begin "
            f"execute {sql.Literal(statement).as_string()}; return true; end $got_through$".encode()
        )
        connection.execute(f"comment on function {signature} is '{{}}'".encode())
        log.publish(topic, 1)
        log.read_next(topic, reader="me")
        (told,) = log.subscriptions(topic)
        return told.last_error

    try:
        yield run
    finally:
        connection.execute("select headwater_filter.uninstall(%s)", (name,))
        connection.execute("delete from headwater_internal.subscription")
        connection.execute("delete from headwater_internal.filter")


@pytest.mark.parametrize(("statement", "why"), ESCAPES.values(), ids=ESCAPES.keys())
def test_code_that_did_run_as_a_filter_could_change_nothing(
    got_through: Callable[[str], str | None], statement: str, why: str
) -> None:
    assert why in (got_through(statement) or "it ran")


def test_a_setting_or_a_notification_of_code_that_did_run_ends_with_it(
    got_through: Callable[[str], str | None], dsn: str, log: headwater.Headwater, topic: str
) -> None:
    assert (
        got_through("select set_config('search_path', 'evil', false), pg_notify('evil', ''), pg_advisory_xact_lock(1)")
        is None
    )
    with psycopg.connect(dsn, autocommit=True) as listener:
        listener.execute("listen evil")
        with psycopg.connect(dsn) as reader:
            log.publish(topic, 1)
            assert reader.execute("select count(*) from headwater.read_next(%s, 'me')", (topic,)).fetchone() == (3,)
            assert reader.execute("show search_path").fetchone() == ('"$user", public',)
            assert reader.execute(
                "select count(*) from pg_locks where pid = pg_backend_pid() and locktype = 'advisory' and objid = 1"
            ).fetchone() == (0,)
        listener.execute("notify evil, 'the last'")
        assert [one.payload for one in listener.notifies(timeout=PATIENCE_SECONDS, stop_after=1)] == ["the last"]


def test_a_large_object_of_code_that_did_run_is_not_kept(
    got_through: Callable[[str], str | None], connection: psycopg.Connection
) -> None:
    # Postgres 15 allows them in a read-only transaction; what matters is that the block is rolled back.
    assert "read-only" in (got_through("select lo_from_bytea(0, 'x')") or "read-only, or rolled back")
    assert connection.execute("select count(*) from pg_largeobject_metadata").fetchone() == (0,)


def test_a_function_of_that_role_that_was_replaced_would_not_run_as_the_caller(
    log: headwater.Headwater, topic: str, connection: psycopg.Connection
) -> None:
    """As if the role had altered what it owns: the code then runs as the owner's role, and read-only all the same."""
    before = connection.execute(f"select pg_get_functiondef('{MATCH_AS_FILTER}'::regprocedure)".encode()).fetchone()
    assert before is not None
    log.subscribe(topic, "true")
    try:
        for statement, why in (
            ("select ('ran as ' || current_user)::integer", '"ran as headwater_filter_owner"'),
            ("alter function headwater_filter.install(text) security invoker", "read-only"),
            ("set transaction_read_only = off", "read-write mode"),
            ("set role postgres", "security-definer"),
        ):
            connection.execute(
                "create or replace function headwater_filter.match_as_filter("
                "statement text, events headwater.filter_event[], queue_id integer, first_position bigint) "
                "returns headwater_internal.filter_match[] language plpgsql security invoker as $replaced$ begin "
                f"execute {sql.Literal(statement).as_string()}; return null; end $replaced$".encode()
            )
            log.publish(topic, 1)
            log.read_next(topic, reader="me")
            (told,) = log.subscriptions(topic)
            assert why in (told.last_error or "it ran")
    finally:
        connection.execute(before[0])
        connection.execute("delete from headwater_internal.subscription")
        connection.execute("delete from headwater_internal.filter")


@pytest.mark.parametrize(
    "call",
    [
        "headwater_filter.explain_as_filter('select 1')",
        "headwater_filter.match_as_filter('select null', '{}', 1, 1)",
        "headwater_filter.plan('filter_')",
        "headwater_filter.install_part('a', 'b', 'c')",
    ],
)
def test_a_consumer_cannot_call_what_runs_filters(attacker: psycopg.Connection, call: str) -> None:
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        attacker.execute(f"select {call}".encode())


def test_params_are_bounded(attacker: psycopg.Connection) -> None:
    with pytest.raises(psycopg.errors.CheckViolation, match="at most 1 MiB"):
        attacker.execute("select headwater.subscribe('large', 'true', jsonb_build_object('a', repeat('x', 2000000)))")


def test_a_consumer_cannot_have_another_text_run_as_a_filter(attacker: psycopg.Connection, topic: str) -> None:
    for forged in ("true) or pg_sleep(1) is null --", "match", "install"):
        attacker.execute("select headwater.subscribe('forged', 'true', from_position => 0)")
        attacker.execute("update headwater_internal.filter set function_name = %s where expression = 'true'", (forged,))
        assert attacker.execute("select subscription_ids from headwater.read_next('forged', 'me')").fetchall() == [
            (None,)
        ]
    attacker.execute("delete from headwater_internal.subscription")
    attacker.execute("delete from headwater_internal.filter")


@pytest.mark.parametrize(
    "honest",
    [
        "e.topic = 'orders' and (e.data ->> 'cents')::int > (s.params ->> 'over')::int",
        "s.params @> jsonb_build_object('user', e.data -> 'user')",
        "jsonb_build_object('user', e.data -> 'user') <@ s.params",
        "e.type in ('a', 'b') or e.key = 'k'::bytea or e.headers @> '{\"a\": 1}'",
        "(e.data #>> '{a,b}')::numeric between 1.5 and 2e3 and e.topic ~ '^a.*b$' and e.topic not like 'x%'",
        "coalesce(e.data ->> 'a', '') <> '' and nullif(e.type, '') is not null and greatest(e.position, 1) > 0",
        "case when e.type = 'a' then true else e.partition = any (array[0, 1]) end",
        "e.published_at > now() - interval '1 hour' and extract(hour from e.published_at) < 25",
        "e.published_at::date = current_date and date_trunc('day', e.published_at) is not null",
        "e.data @? '$.tags[*] ? (@ == \"x\")' or e.data -> 'tags' ? 'x' or jsonb_typeof(e.data) = 'object'",
        "lower(e.topic) || '-' || upper(e.type) = 'a-B' and length(e.payload) < 1000",
        "substring(e.topic from 1 for 3) = 'abc' and split_part(e.routing_key, '.', 2) = 'x'",
        "('10.0.0.1'::inet << '10.0.0.0/8'::inet) and e.event_id::uuid is not null",
        "e.topic collate \"C\" < 'b' and s.id > 0 and s.params -> 'n' = e.data -> 'n'",
        "e.data @? '$.tags[*] ? (@ == \"a,$.**.**?\")' or e.data @@ '$.a == 1 && $.b == 2'",
        "jsonb_path_exists(e.data, '$.**.x') or e.data @? '$ ? (@.a like_regex \"^a\\\\d\")'",
        "extract(hour from e.published_at at time zone 'UTC') < 25 and e.topic similar to 'a%' and trim(e.topic) <> ''",
        "position('a' in e.topic) > 0 and substring(e.topic from '^a') is null and initcap(e.topic) <> ''",
        "encode(sha256(convert_to(e.topic, 'UTF8')), 'hex') like 'a%' and concat(e.topic, ':', e.type) <> ''",
        "e.data ->> 'a' = any (array[s.params ->> 'x', s.params ->> 'y']) and (e.data ->> 'at')::timestamptz < now()",
        "(e.data ->> 'price')::numeric(10, 2) > 9.99 and (e.data ->> 'code')::char(3) = 'abc' and abs(-1) = 1",
        "int4range(1, 5) @> (e.data ->> 'n')::int and 'it''s' <> E'it\\'s not' and e.topic is distinct from 'x'",
    ],
)
def test_an_honest_filter_is_accepted(log: headwater.Headwater, topic: str, honest: str) -> None:
    assert log.subscribe(topic, honest) > 0


def test_how_a_filter_is_matched_does_not_change_what_it_matches(
    log: headwater.Headwater, topic: str, connection: psycopg.Connection
) -> None:
    """By the index, by the event alone or one by one: the same as the expression itself, evaluated for each pair."""
    filters = [
        "s.params @> jsonb_build_object('a', e.data -> 'a')",
        "s.params @> jsonb_build_object('a', e.data -> 'a') and e.type = 'T'",
        "s.params @> jsonb_build_object('a', e.data -> 'a') and s.params @> jsonb_build_object('b', e.data -> 'b')",
        "s.params @> jsonb_build_object('a', e.data -> 'a') and (s.params ->> 'n')::int > 1",
        "e.data <@ s.params",
        "s.params @> e.data or e.type = 'T'",
        "not s.params @> jsonb_build_object('a', e.data -> 'a')",
        "s.params @> '{}' and e.type = 'T'",
        "e.type = 'T'",
        "s.id is not null and s.params is not null",
        "s.params -> 'a' = e.data -> 'a'",
    ]
    values: list[Any] = [
        {"a": 1}, {"a": 1.0}, {"a": 1, "b": 2}, {"a": "1"}, {"a": None}, {"a": [1, 2]}, {"a": [1]}, {"a": {"x": 1}}, {},
        {"a": 1, "b": 2, "n": 3}, {"n": 3, "a": {"x": 1, "y": 2}},
    ]  # fmt: skip
    for text in filters:
        for value in values:
            log.subscribe(topic, text, value)
    log.publish_batch(topic, [headwater.NewEvent(value, type=kind) for value in values for kind in ("T", None)])
    found = {one.event.position: set(one.subscription_ids) for one in log.read_next(topic, reader="me").events}
    for number, text in enumerate(filters):
        pairs = connection.execute(
            "select e.position, s.id from headwater_internal.subscription s "
            "join headwater_internal.queue g on g.id = s.queue_id and g.name = %s "
            "join headwater_internal.filter c on c.id = s.filter_id and c.expression = %s "
            "cross join lateral (select r.position, r.type, convert_from(r.payload, 'UTF8')::jsonb as data "
            f"from headwater.read(array[%s], 0, 100) as r) as e where {text}".encode(),
            (topic, text, topic),
        ).fetchall()
        ids = {one.id for one in log.subscriptions(topic) if one.filter == text}
        assert {(p, i) for p, matched in found.items() for i in matched & ids} == set(pairs), (number, text)
