"""Exactly-once effects: the writes of a handler and the acknowledgement of its event commit in one transaction."""

import asyncio
import os
from typing import Any

import psycopg

import headwater

TABLE = "create table if not exists balance (account text primary key, cents integer not null)"
BOOK = (
    "insert into balance as b (account, cents) values (%s, %s) "
    "on conflict (account) do update set cents = b.cents + excluded.cents"
)

app = headwater.App()
stop = asyncio.Event()
left = 4


@app.worker("payments", queue="bookkeeper", ordered_keys=True, transactional=True, backoff_seconds=0)
async def book(event: headwater.ClaimedEvent, connection: psycopg.AsyncConnection[Any]) -> None:
    """Events of one account are processed in order. A crash at any line rolls back all of it."""
    global left
    await connection.execute(BOOK, (event.key_text, event.data["cents"]))
    if event.attempt == 1 and event.data["cents"] == 250:
        raise RuntimeError("power failure after the booking")
    left -= 1
    if left == 0:
        stop.set()


async def main() -> None:
    dsn = os.environ["HEADWATER_DSN"]
    with headwater.connect(dsn) as log:
        log.create_topic("payments", if_missing=True)
        with log.connection() as connection:
            connection.execute(TABLE)
        for account, cents in (("ada", 1000), ("bob", 250), ("ada", -300), ("bob", 50)):
            log.publish("payments", {"cents": cents}, key=account)
        await app.run(dsn, stop=stop)
        with log.connection() as connection:
            print(dict(connection.execute("select account, cents from balance order by account").fetchall()))


if __name__ == "__main__":
    asyncio.run(main())
