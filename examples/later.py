"""Scheduled events: one is delivered later, one is cancelled; and idempotent publishing by event id."""

import os
from datetime import timedelta

import headwater


def main() -> None:
    with headwater.connect(os.environ["HEADWATER_DSN"]) as log:
        log.create_topic("reminders", if_missing=True)
        log.schedule("reminders", {"text": "stretch"}, delay=timedelta(milliseconds=50))
        unwanted = log.schedule("reminders", {"text": "never mind"}, delay=timedelta(days=3650))
        assert unwanted is not None
        print(f"waiting: {len(log.scheduled('reminders'))}")
        log.cancel_scheduled(unwanted)
        # Any follower publishes due events.
        event = next(log.follow("reminders"))
        print(f"came: {event.data['text']}")
        positions = {log.publish("reminders", {"text": "once"}, event_id="reminder-1") for _ in range(3)}
        print(f"three tries, {len(positions)} event")


if __name__ == "__main__":
    main()
