"""A server that a browser looks at."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from serve_process import serve_process


@dataclass(frozen=True, slots=True)
class Serving:
    """A `headwater serve`, and where it is."""

    process: subprocess.Popen[str]
    url: str
    kafka: str


Serve = Callable[..., AbstractContextManager[Serving]]


@contextmanager
def serving(dsn: str, *options: str, http: str = "127.0.0.1:0") -> Iterator[Serving]:
    with serve_process("--http", http, *options, dsn=dsn) as started:
        yield Serving(started.process, started.told["http"], ",".join(started.told.get("kafka", ())))
