"""Publish in your own transaction: the order and its event are committed atomically."""

import os

import headwater

TABLE = "create table if not exists shop_order (id integer primary key, cents integer not null)"
INSERT = "insert into shop_order (id, cents) values (%s, %s)"


class CardDeclined(Exception):
    """The payment of an order was declined."""


def place_order(log: headwater.Headwater, number: int, cents: int, *, card_ok: bool) -> int | None:
    """Store an order and publish an event for it; return the event's position."""
    with log.transaction() as connection:
        connection.execute(INSERT, (number, cents))
        position = log.publish(
            "shop.orders", {"order": number, "cents": cents}, type="OrderPlaced", connection=connection
        )
        if not card_ok:
            raise CardDeclined
        return position


def main() -> None:
    with headwater.connect(os.environ["HEADWATER_DSN"]) as log:
        log.create_topic("shop.orders", if_missing=True)
        with log.connection() as connection:
            connection.execute(TABLE)
        place_order(log, 1, 1200, card_ok=True)
        try:
            place_order(log, 2, 550, card_ok=False)
        except CardDeclined:
            print("order 2 was declined")
        events = log.read("shop.orders")
        print(f"events: {[event.data['order'] for event in events]}")


if __name__ == "__main__":
    main()
