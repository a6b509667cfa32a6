"""What can go wrong with NATS, as errors that say what to do next."""

from headwater.errors import HeadwaterError, InvalidRequest


class NatsUnavailable(HeadwaterError):
    """The NATS server cannot be reached, or does not answer in time. Trying again is safe."""


class NatsRefused(HeadwaterError):
    """The NATS server answered and refused: a right, a stream or a limit is missing."""


class InvalidMessage(InvalidRequest):
    """What was given cannot be sent or is not what it should be: fix whoever made it."""


class ReplicaRefused(HeadwaterError):
    """The table cannot be kept as a replica: it lacks a primary key, a schema document or a snapshot."""
