"""Exactly-once processing: the writes of the handler and the cursor commit in one transaction."""

import os
from collections.abc import Sequence
from typing import Any

import psycopg

import headwater

TABLE = "create table if not exists visits (page text primary key, count integer not null)"
COUNT = "insert into visits as v (page, count) values (%s, 1) on conflict (page) do update set count = v.count + 1"


def count_visits(connection: psycopg.Connection[Any], events: Sequence[headwater.Event]) -> None:
    """Called once per batch, in the transaction that moves the cursor."""
    with connection.cursor() as cursor:
        cursor.executemany(COUNT, [(event.data["page"],) for event in events])


def main() -> None:
    with headwater.connect(os.environ["HEADWATER_DSN"]) as log:
        log.create_topic("visits", if_missing=True)
        with log.connection() as connection:
            connection.execute(TABLE)
        log.publish_many("visits", (headwater.NewEvent({"page": page}) for page in ("/", "/", "/about")))
        for _ in range(2):
            log.process("visits", count_visits, cursor="visit-counter", stop_when_caught_up=True)
        with log.connection() as connection:
            print(dict(connection.execute("select page, count from visits order by page").fetchall()))


if __name__ == "__main__":
    main()
