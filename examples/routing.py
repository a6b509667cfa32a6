"""Route events to groups: by the words of a routing key, by headers, by type. Each is stored once."""

import os

import headwater


def drain(log: headwater.Headwater, group: str) -> list[str | None]:
    """Work on all that a group has now, as a loop of one's own does it: claim, work, settle and claim again."""
    done: list[str | None] = []
    lease = log.claim(group, worker="example", batch_size=10)
    while lease is not None:
        done += [event.routing_key for event in lease.events]
        lease = log.settle_and_claim(lease, worker="example", batch_size=10)
    return done


def main() -> None:
    with headwater.connect(os.environ["HEADWATER_DSN"]) as log:
        log.create_topic("deliveries", if_missing=True)
        for group in ("europe", "express", "complaints"):
            log.create_group(group, if_missing=True)
        # * is one word, # is any number of them.
        log.bind("europe", topic="deliveries", pattern="parcel.eu.#")
        log.bind("express", topic="deliveries", headers={"speed": "express"})
        # Several bindings: what fits any of them.
        log.bind("complaints", topic="deliveries", type="Lost")
        log.bind("complaints", topic="deliveries", pattern="parcel.*.*.late")

        publish = log.publish
        publish("deliveries", {"n": 1}, routing_key="parcel.eu.de.sent", headers={"speed": "express"})
        publish("deliveries", {"n": 2}, routing_key="parcel.us.ny.late", headers={"speed": "standard"})
        publish("deliveries", {"n": 3}, routing_key="parcel.eu.fr.sent", type="Lost")

        for group in ("europe", "express", "complaints"):
            print(f"{group}: {drain(log, group)}")


if __name__ == "__main__":
    main()
