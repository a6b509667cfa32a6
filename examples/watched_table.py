"""Watch a table: every change is published as an event, in the transaction that makes it."""

import os

import headwater

TABLE = "create table if not exists stock (item text primary key, pieces integer not null, note text)"


def main() -> None:
    with headwater.connect(os.environ["HEADWATER_DSN"]) as log:
        with log.connection() as connection:
            connection.execute(TABLE)
        # Publish updates only if the pieces changed, and leave out the notes.
        topic = log.watch_table("public.stock", columns=["item", "pieces"], when_changed=["pieces"])

        with log.transaction() as connection:
            connection.execute("insert into stock values ('apple', 10, 'from the garden')")
            connection.execute("update stock set note = 'ripe'")
            connection.execute("update stock set pieces = 7 where item = 'apple'")
            connection.execute("delete from stock where item = 'apple'")

        for event in log.read(topic):
            print(f"{event.type}: {event.data['before']} -> {event.data['after']}")
        print(f"{topic}: {[event.type for event in log.read(topic)]}")
        log.unwatch_table("public.stock")


if __name__ == "__main__":
    main()
