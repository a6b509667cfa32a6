"""The call that writes an audit event, in the transaction of the audited change."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from headwater.calls.call import Call, only_value
from headwater.calls.encoding import checked_text


def audit(actor: str, action: str, subject: str, detail: Mapping[str, Any]) -> Call[int]:
    """Write an audit event. `detail` contains what changed, but no secrets."""
    return Call(
        "select headwater_internal.audit(%s, %s, %s, %s::jsonb)",
        (
            checked_text(actor, "account name"),
            action,
            checked_text(subject, "name"),
            checked_text(json.dumps(detail, ensure_ascii=False, default=str), "detail").replace("\\u0000", ""),
        ),
        only_value,
    )
