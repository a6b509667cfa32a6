"""The Django application: `migrate` also installs and upgrades the log's schema."""

from __future__ import annotations

from typing import Any

import psycopg
from django.apps import AppConfig
from django.db.models.signals import post_migrate

from headwater.database import schema
from headwater.integrations.django import database_dsn, load_settings


class HeadwaterConfig(AppConfig):  # type: ignore[misc] # Django has no types.
    """The application "headwater.integrations.django"."""

    name = "headwater.integrations.django"
    label = "headwater"
    verbose_name = "Headwater"

    def ready(self) -> None:
        post_migrate.connect(_upgrade_schema, sender=self)


def _upgrade_schema(using: str, verbosity: int = 1, **_: Any) -> None:
    chosen = load_settings()
    if not chosen.migrate or using != chosen.database:
        return
    with psycopg.connect(database_dsn(using), autocommit=True) as connection:
        applied = schema.upgrade(connection)
    if applied and verbosity >= 1:
        print(f"  Upgraded the schema of Headwater to migration {applied[-1].number}")
