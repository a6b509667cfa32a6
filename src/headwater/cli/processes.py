"""Supervision of server processes for `headwater serve --processes`.

The parent starts one child process for each plan. A child sends the addresses that it serves, or an error, through its
pipe. A child that exits is restarted after RESTART_SECONDS at most, on the same port. On SIGINT or SIGTERM the parent
closes all pipes, which asks the children to stop, and kills those that are still alive after `stop_seconds`.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Final, Generic, TypeVar

from headwater.cli import exit_codes, output
from headwater.errors import HeadwaterError, LogUnavailable

P = TypeVar("P")
# Called by a process when it serves, with the address of each of its servers.
ReportAddresses = Callable[[dict[str, str]], object]
Run = Callable[[P, Connection], None]

START_SECONDS: Final = 180.0
"""How long a process may take to start. An exit is noticed at once; startup is slow on a busy machine."""
RESTART_SECONDS: Final = 1.0


@dataclass(slots=True)
class _Child(Generic[P]):
    plan: P
    process: BaseProcess
    # Receives the addresses once, or an error; the end of the child closes it.
    pipe: Connection


def supervise(
    plans: Sequence[P],
    run: Run[P],
    restart_plan: Callable[[P, dict[str, str]], P],
    report: Callable[[list[dict[str, str]]], object],
    *,
    stop_seconds: float,
) -> None:
    """Run one process for each plan until a signal. `restart_plan` returns the plan for the replacement of a process
    that served these addresses. After a signal, processes have `stop_seconds` to stop; then they are killed.
    """
    stopping = False

    def stop(number: int, frame: object) -> None:
        nonlocal stopping
        stopping = True

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    children: list[_Child[P]] = []
    try:
        children = [_start(plan, run) for plan in plans]
        addresses = [_wait_until_serving(child, lambda: stopping) for child in children]
        report(addresses)
        while not stopping:
            ended = wait([child.process.sentinel for child in children], timeout=RESTART_SECONDS)
            for index, child in enumerate(children):
                if child.process.sentinel not in ended or stopping:
                    continue
                if (error := _received_error(child)) is not None:
                    output.report_error(error, as_json=False)
                child.pipe.close()
                output.print_status(f"a process exited with code {child.process.exitcode}; restarting it")
                children[index] = _start(restart_plan(child.plan, addresses[index]), run)
                try:
                    _wait_until_serving(children[index], lambda: stopping)
                except HeadwaterError as error:
                    output.print_status(error.message)
    finally:
        for child in children:
            child.pipe.close()
        ends = time.monotonic() + stop_seconds
        for child in children:
            child.process.join(max(0.0, ends - time.monotonic()))
            if child.process.is_alive():
                child.process.kill()
                child.process.join()
        for number, handler in before.items():
            signal.signal(number, handler)


def _start(plan: P, run: Run[P]) -> _Child[P]:
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_in_child, args=(run, plan, there), daemon=False)
    process.start()
    there.close()
    return _Child(plan, process, here)


def _wait_until_serving(child: _Child[P], is_stopping: Callable[[], bool]) -> dict[str, str]:
    deadline = time.monotonic() + START_SECONDS
    try:
        while not (received := child.pipe.poll(RESTART_SECONDS)) and time.monotonic() < deadline:
            if is_stopping():
                raise LogUnavailable("stopped before all processes were serving")
        if received:
            message: dict[str, str] | HeadwaterError = child.pipe.recv()
            if isinstance(message, HeadwaterError):
                raise message
            return message
    except EOFError:
        raise LogUnavailable(
            "a process exited before it was serving", hint="Its error message, if any, is above."
        ) from None
    raise LogUnavailable(
        f"a process was not serving after {START_SECONDS:g} seconds",
        hint="Check the load of the machine and whether Postgres responds, or start fewer processes.",
    )


def _received_error(child: _Child[P]) -> HeadwaterError | None:
    """The error that ended a process, if it sent one."""
    try:
        message: object = child.pipe.recv() if child.pipe.poll() else None
    except EOFError:
        return None
    return message if isinstance(message, HeadwaterError) else None


def _in_child(run: Run[P], plan: P, parent: Connection) -> None:
    # A terminal sends Ctrl-C to the whole process group; only the parent handles it and closes the pipe to stop.
    os.setpgrp()
    try:
        run(plan, parent)
    except HeadwaterError as error:
        # The parent prints it.
        with suppress(OSError):
            parent.send(error)
        sys.exit(exit_codes.code_for(type(error)))
