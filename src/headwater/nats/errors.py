"""Errors of the NATS integration."""

from headwater.errors import HeadwaterError, InvalidRequest


class NatsUnavailable(HeadwaterError):
    """The NATS server is not reachable, or did not answer in time. Retrying is safe."""


class NatsRefused(HeadwaterError):
    """The NATS server rejected the request: a permission or stream is missing, or a limit is exceeded."""


class InvalidMessage(InvalidRequest):
    """A message, subject or payload is invalid."""


class ReplicaRefused(HeadwaterError):
    """The table cannot be replicated: it lacks a primary key, a schema document or a snapshot."""
