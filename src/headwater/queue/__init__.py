"""Queues: claim and settle leases, and run handlers on them."""
