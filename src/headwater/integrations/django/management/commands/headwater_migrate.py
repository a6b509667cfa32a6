"""`manage.py headwater_migrate`: install or upgrade the log's schema, for projects whose `migrate` does not."""

from __future__ import annotations

from typing import Any

import psycopg
from django.core.management.base import BaseCommand, CommandParser

from headwater.database import schema
from headwater.integrations.django import database_dsn


class Command(BaseCommand):  # type: ignore[misc] # Django has no types.
    """The command."""

    help = "Install or upgrade the schema of Headwater. Safe to repeat and to run concurrently."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--database", metavar="ALIAS", help="Default: HEADWATER['DATABASE'] of the settings.")

    def handle(self, **options: Any) -> None:
        with psycopg.connect(database_dsn(options["database"]), autocommit=True) as connection:
            applied = schema.upgrade(connection)
        for step in applied:
            self.stdout.write(f"applied migration {step.number:04} {step.name}")
        self.stdout.write(f"the database is at migration {schema.migrations()[-1].number}")
