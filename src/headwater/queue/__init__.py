"""Queues: the API for leases and dead letters, and workers that run handlers."""
