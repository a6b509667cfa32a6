"""The call that notes what an administrator did, in the transaction of the act."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from headwater.calls.call import Call, only_value
from headwater.calls.encoding import checked_text


def audit(actor: str, action: str, subject: str, detail: Mapping[str, Any]) -> Call[int]:
    """Note that somebody did something to something; what changed is in `detail`, and never a secret."""
    return Call(
        "select headwater.audit(%s, %s, %s, %s::jsonb)",
        (
            checked_text(actor, "account name"),
            action,
            checked_text(subject, "name"),
            checked_text(json.dumps(detail, ensure_ascii=False, default=str), "detail").replace("\\u0000", ""),
        ),
        only_value,
    )
