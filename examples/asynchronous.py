"""Use the log from asyncio: one task publishes, another follows."""

import asyncio
import os

from headwater import aio


async def publish(log: aio.AsyncHeadwater) -> None:
    for number in range(3):
        await log.publish("ticks", {"n": number})


async def follow(log: aio.AsyncHeadwater) -> list[int]:
    seen: list[int] = []
    async for event in log.follow("ticks"):
        seen.append(event.data["n"])
        if len(seen) == 3:
            break
    return seen


async def main() -> None:
    async with await aio.connect(os.environ["HEADWATER_DSN"]) as log:
        await log.create_topic("ticks", if_missing=True)
        seen, _ = await asyncio.gather(follow(log), publish(log))
        print(f"seen: {seen}")


if __name__ == "__main__":
    asyncio.run(main())
