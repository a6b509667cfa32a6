"""Webhooks: queues whose events are sent to a URL."""
