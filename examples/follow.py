"""Follow a topic with a cursor: each run continues where the last one stopped."""

import os

import headwater


def catch_up(log: headwater.Headwater) -> list[int]:
    """Return the events since the last run. Without stop_when_caught_up the loop waits for new events."""
    # At-least-once: the cursor moves when the next batch is requested, so a crash repeats events and never skips one.
    followed = log.follow("readings", cursor="thermostat", stop_when_caught_up=True)
    return [event.data["celsius"] for event in followed]


def main() -> None:
    with headwater.connect(os.environ["HEADWATER_DSN"]) as log:
        log.create_topic("readings", if_missing=True)
        log.publish_batch("readings", [headwater.NewEvent({"celsius": c}) for c in (19, 20, 21)])
        print(f"first run: {catch_up(log)}")
        log.publish("readings", {"celsius": 22})
        print(f"second run: {catch_up(log)}")
        log.set_cursor("thermostat", position=0)
        print(f"after a rewind: {catch_up(log)}")


if __name__ == "__main__":
    main()
