"""SQL subscriptions: one filter, many subscribers with their own parameters, matched together."""

import asyncio
import os

import headwater

MINE = "e.topic = 'chat' and s.params @> jsonb_build_object('room', e.data -> 'room')"

app = headwater.App()
stop = asyncio.Event()
heard: dict[str, list[str]] = {"kitchen": [], "garden": []}


def hear(room: str, event: headwater.Event) -> None:
    heard[room].append(event.data["text"])
    if sum(map(len, heard.values())) == 3:
        stop.set()


@app.subscriber("chat-rooms", MINE, {"room": "kitchen"})
async def kitchen(event: headwater.Event) -> None:
    hear("kitchen", event)


@app.subscriber("chat-rooms", MINE, {"room": "garden"})
async def garden(event: headwater.Event) -> None:
    hear("garden", event)


async def main() -> None:
    dsn = os.environ["HEADWATER_DSN"]
    with headwater.connect(dsn) as log:
        log.create_topic("chat", if_missing=True)
        # A new subscription gets events that are published from now on. Otherwise the app creates it when it starts.
        log.subscribe("chat-rooms", MINE, {"room": "kitchen"}, topics="chat")
        log.subscribe("chat-rooms", MINE, {"room": "garden"}, topics="chat")
        for room, text in (("kitchen", "soup?"), ("cellar", "dark"), ("garden", "rain"), ("kitchen", "yes")):
            log.publish("chat", {"room": room, "text": text})
        await app.run(dsn, stop=stop)
    print(heard)


if __name__ == "__main__":
    asyncio.run(main())
