"""SQL subscriptions: their API, and the reader that feeds handlers."""
