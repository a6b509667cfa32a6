"""The limit of open files, which includes connections, of a process."""

from __future__ import annotations

import resource


def raise_limit(wanted: int) -> int:
    """Raise the limit of this process and its children as far as the system allows; returns the new limit.

    Without a hard limit, the limit becomes `wanted`, since some systems reject an unlimited value.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft == unlimited:
        return wanted
    reachable = max(soft, wanted) if hard == unlimited else hard
    if reachable > soft:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (reachable, hard))
        except (OSError, ValueError):
            # The system enforces a lower limit; the old one stays in effect.
            return soft
    return reachable
