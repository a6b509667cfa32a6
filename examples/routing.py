"""Route events to queues by routing key, headers and type. Each event is stored once."""

import os

import headwater


def drain(log: headwater.Headwater, queue: str) -> list[str | None]:
    """Process all events that a queue has now, in a loop: claim, process, settle and claim again."""
    done: list[str | None] = []
    lease = log.claim(queue, worker="example", batch_size=10)
    while lease is not None:
        done += [event.routing_key for event in lease.events]
        lease = log.settle_and_claim(lease, worker="example", batch_size=10)
    return done


def main() -> None:
    with headwater.connect(os.environ["HEADWATER_DSN"]) as log:
        log.create_topic("deliveries", if_missing=True)
        for queue in ("europe", "express", "complaints"):
            log.create_queue(queue, if_missing=True)
        # * matches one word, # any number of words.
        log.bind("europe", topic="deliveries", pattern="parcel.eu.#")
        log.bind("express", topic="deliveries", headers={"speed": "express"})
        # With several bindings, the queue gets the events that match any of them.
        log.bind("complaints", topic="deliveries", type="Lost")
        log.bind("complaints", topic="deliveries", pattern="parcel.*.*.late")

        publish = log.publish
        publish("deliveries", {"n": 1}, routing_key="parcel.eu.de.sent", headers={"speed": "express"})
        publish("deliveries", {"n": 2}, routing_key="parcel.us.ny.late", headers={"speed": "standard"})
        publish("deliveries", {"n": 3}, routing_key="parcel.eu.fr.sent", type="Lost")

        for queue in ("europe", "express", "complaints"):
            print(f"{queue}: {drain(log, queue)}")


if __name__ == "__main__":
    main()
