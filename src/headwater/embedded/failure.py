"""The one error of the embedded server."""

from headwater.errors import HeadwaterError


class EmbeddedError(HeadwaterError):
    """The embedded server could not do what was asked. The text says why and what to do next."""
