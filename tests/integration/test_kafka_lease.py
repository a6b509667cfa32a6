"""Does a broker keep its lease, whatever else it is busy with?"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from headwater import aio
from headwater.servers.kafka import broker as broker_module
from headwater.servers.kafka.broker import Broker, BrokerSettings
from patience import PATIENCE_SECONDS

POOL_SIZE = 4


def test_the_lease_is_renewed_while_maintenance_hangs_and_every_other_connection_is_busy(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_module, "RENEW_SECONDS", 0.02)
    monkeypatch.setattr(broker_module, "REAP_SECONDS", 0.02)

    async def run() -> None:
        hangs = asyncio.Event()

        async def maintenance(log: aio.AsyncHeadwater) -> None:
            hangs.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(aio.AsyncHeadwater, "run_maintenance", maintenance)
        async with await aio.connect(dsn, pool_size=POOL_SIZE) as log, asyncio.timeout(PATIENCE_SECONDS):
            broker = Broker(log, BrokerSettings("127.0.0.1", 9092))
            await broker.start()
            await hangs.wait()
            async with AsyncExitStack() as busy:
                for _ in range(POOL_SIZE - 1):
                    await busy.enter_async_context(log.connection())
                ends = broker._lease_ends
                for _ in range(3):
                    while broker._lease_ends == ends:  # noqa: ASYNC110
                        await asyncio.sleep(0.002)
                    ends = broker._lease_ends
            await broker.stop()

    asyncio.run(run())
