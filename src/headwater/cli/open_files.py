"""How many files, connections among them, a process may have open."""

from __future__ import annotations

import resource


def raise_limit(wanted: int) -> int:
    """Let this process and those that it starts open as many as the system allows; returns how many that is.

    Where the system sets no limit, `wanted`: some refuse to be asked for no limit.
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
            # The system has a limit of its own besides; what there was stays.
            return soft
    return reachable
