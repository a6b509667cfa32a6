"""The name and meaning of every log field, on one page. Log lines are constant; what varies is a field."""

from __future__ import annotations

import logging
from typing import Final

logger: Final = logging.getLogger("headwater")

CURSOR: Final = "cursor"  # the cursor's name
GROUP: Final = "group"  # the group's name
WEBHOOK: Final = "webhook"  # the webhook's name
POSITION: Final = "position"  # a place in the log
WAIT_SECONDS: Final = "wait_seconds"  # how long until the next try
ERROR: Final = "error"  # what went wrong, as text
SLOT: Final = "slot"  # the replication slot's name
RETAINED_BYTES: Final = "retained_bytes"  # what a slot keeps of the server's log
