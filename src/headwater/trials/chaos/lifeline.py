"""A process of a trial ends with it: its standard input is a pipe that closes when the trial's process is gone."""

from __future__ import annotations

import os
import threading


def watch() -> None:
    """End this process as soon as its standard input ends. Nothing is ever written to it."""

    def wait() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
