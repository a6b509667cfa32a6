"""SQL subscriptions: their API, and the reader that passes matched events to handlers."""
