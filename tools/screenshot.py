"""Take the picture of the console in docs/images: a real server on an embedded Postgres, with publishers and workers.

Needs Chromium (Debian: apt-get install chromium) and the packages of `./dev test`. It takes about a minute and a half.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import psycopg
from playwright.async_api import async_playwright

from headwater import App, Dead, NewEvent, Retry, aio
from headwater.database import schema
from headwater.embedded import Postgres

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "images" / "console.png"
MAX_BYTES = 300_000
TOPICS = {
    "orders": "OrderPlaced",
    "payments": "PaymentReceived",
    "shipments": "ParcelSent",
    "customers": "AddressChanged",
}
PAST_EVENTS = 20_000
SERVE = ("serve", "--json", "--http", "127.0.0.1:0")

app = App()


@app.worker("orders", queue="warehouse", concurrency=8)
async def pack(event):  # type: ignore[no-untyped-def]
    await asyncio.sleep(0.005)


@app.worker("orders", "payments", queue="receipts", concurrency=4, max_attempts=3)
async def send_receipt(event):  # type: ignore[no-untyped-def]
    if random.random() < 0.002:
        return Dead("550 mailbox unavailable")
    if random.random() < 0.01:
        return Retry(timedelta(seconds=20), "451 try again later")
    return None


@app.worker("shipments", queue="notifications", concurrency=2)
async def notify(event):  # type: ignore[no-untyped-def]
    return None


def order(number: int) -> NewEvent:
    return NewEvent({"id": number, "cents": random.randint(500, 20_000)}, key=f"customer-{number % 400}")


async def publish_for_ever(dsn: str) -> None:
    async with await aio.connect(dsn, application_name="shop") as log:
        began = time.monotonic()
        number = PAST_EVENTS
        while True:
            # As in a shop: waves, and now and then a campaign.
            wave = 2 + int(3 * (1 + ((time.monotonic() - began) % 20) / 20))
            for topic, kind in TOPICS.items():
                events = [order(number + i)._replace(type=kind) for i in range(wave if topic != "customers" else 1)]
                await log.publish_batch(topic, events)
                number += len(events)
            await asyncio.sleep(0.05)


async def read_for_ever(dsn: str, topic: str, cursor: str) -> None:
    async with await aio.connect(dsn, application_name=cursor) as log:
        async for _ in log.follow(topic, cursor=cursor):
            await asyncio.sleep(0.002)


async def fill(dsn: str) -> None:
    async with await aio.connect(dsn) as log:
        for topic, kind in TOPICS.items():
            await log.create_topic(topic)
            await log.publish_batch(topic, [order(number)._replace(type=kind) for number in range(PAST_EVENTS // 4)])
        await log.create_queue("search-index", ["orders", "customers"])


async def take(url: str, output: Path, seconds: float) -> None:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        raise SystemExit("no Chromium on this machine: apt-get install chromium")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=chromium, args=["--disable-gpu", *(["--no-sandbox"] if os.getuid() == 0 else [])]
        )
        page = await browser.new_page(
            viewport={"width": 1280, "height": 800}, device_scale_factor=1.5, color_scheme="light"
        )
        await page.goto(url)
        await page.get_by_text("Events per second").wait_for()
        # The lines of the overview begin when the page is opened.
        await asyncio.sleep(seconds)
        await page.screenshot(path=output)
        await browser.close()


async def show(dsn: str, url: str, output: Path, seconds: float) -> None:
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        publishing = group.create_task(publish_for_ever(dsn))
        readers = [
            group.create_task(read_for_ever(dsn, topic, cursor))
            for topic, cursor in (("payments", "accounting"), ("customers", "crm-export"))
        ]
        group.create_task(app.run(dsn, stop=stop))
        try:
            await take(url, output, seconds)
        finally:
            for task in (publishing, *readers):
                task.cancel()
            stop.set()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=PICTURE)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to let the server work")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="headwater-", ignore_cleanup_errors=True) as directory,
        Postgres(Path(directory, "postgres")) as server,
    ):
        server.ensure_database("headwater")
        dsn = server.dsn()
        with psycopg.connect(dsn, autocommit=True) as connection:
            schema.upgrade(connection)
        asyncio.run(fill(dsn))
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute("analyze")  # as autovacuum does by itself within a minute
        serving = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "from headwater.cli import main; main()",
                "serve",
                "--json",
                "--http",
                "127.0.0.1:0",
            ],
            env={**os.environ, "HEADWATER_DSN": dsn},
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert serving.stdout is not None
            url = json.loads(serving.stdout.readline())["http"]
            asyncio.run(show(dsn, url, options.output, options.seconds))
        finally:
            serving.terminate()
            serving.wait(60)
    size = options.output.stat().st_size
    print(f"{options.output}: {size:,} bytes")
    return 0 if size < MAX_BYTES else 1


if __name__ == "__main__":
    sys.exit(main())
