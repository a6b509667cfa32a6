"""Databases of one test, one module or one run, on the Postgres that the tests share."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from psycopg import conninfo, sql

_numbers = itertools.count()


@contextmanager
def database(admin_dsn: str, template: str = "template0") -> Iterator[str]:
    """A new database, dropped afterwards. From the fixture `template` it has a log, otherwise nothing."""
    name = f"headwater_test_{os.getpid()}_{next(_numbers)}"
    with psycopg.connect(admin_dsn, autocommit=True) as connection:
        connection.execute(sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name)))
        connection.execute(
            sql.SQL("create database {} template {}").format(sql.Identifier(name), sql.Identifier(template))
        )
    yield conninfo.make_conninfo(admin_dsn, dbname=name)
    with psycopg.connect(admin_dsn, autocommit=True) as connection:
        connection.execute(sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name)))
