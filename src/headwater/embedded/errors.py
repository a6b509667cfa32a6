"""The error class of embedded servers."""

from headwater.errors import HeadwaterError


class EmbeddedError(HeadwaterError):
    """An embedded server failed. The message contains the reason and the next step."""
