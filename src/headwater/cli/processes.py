"""Several processes that serve the same: started, started again when one ends, stopped together."""

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
# What a process tells once it serves: the address of each of its doors.
Tell = Callable[[dict[str, str]], object]
Run = Callable[[P, Connection], None]

START_SECONDS: Final = 180.0
"""A process that ends is noticed at once. One that lives may be slow where many start on a busy machine."""
RESTART_SECONDS: Final = 1.0


@dataclass(slots=True)
class _Child(Generic[P]):
    plan: P
    process: BaseProcess
    # Its end tells the addresses once, perhaps an error, and closes with the process that holds the other.
    pipe: Connection


def supervise(
    plans: Sequence[P],
    run: Run[P],
    again: Callable[[P, dict[str, str]], P],
    tell: Callable[[list[dict[str, str]]], object],
    *,
    stop_seconds: float,
) -> None:
    """Keep a process for each plan running, until a signal. `again` is the plan for one that takes another's place.

    Told to stop, all of them have `stop_seconds`; then they are killed.
    """
    stopping = False

    def stop(number: int, frame: object) -> None:
        nonlocal stopping
        stopping = True

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    children: list[_Child[P]] = []
    try:
        children = [_start(plan, run) for plan in plans]
        addresses = [_first_word(child, lambda: stopping) for child in children]
        tell(addresses)
        while not stopping:
            ended = wait([child.process.sentinel for child in children], timeout=RESTART_SECONDS)
            for place, child in enumerate(children):
                if child.process.sentinel not in ended or stopping:
                    continue
                if (error := _last_word(child)) is not None:
                    output.report(error, as_json=False)
                child.pipe.close()
                output.note(f"a process ended with code {child.process.exitcode} and is started again")
                children[place] = _start(again(child.plan, addresses[place]), run)
                try:
                    _first_word(children[place], lambda: stopping)
                except HeadwaterError as error:
                    output.note(error.message)
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


def _first_word(child: _Child[P], is_stopping: Callable[[], bool]) -> dict[str, str]:
    deadline = time.monotonic() + START_SECONDS
    try:
        while not (spoke := child.pipe.poll(RESTART_SECONDS)) and time.monotonic() < deadline:
            if is_stopping():
                raise LogUnavailable("told to stop before all processes served")
        if spoke:
            told: dict[str, str] | HeadwaterError = child.pipe.recv()
            if isinstance(told, HeadwaterError):
                raise told
            return told
    except EOFError:
        raise LogUnavailable(
            "a process ended before it served", hint="Its own message is above, if it had time for one."
        ) from None
    raise LogUnavailable(
        f"a process does not serve after {START_SECONDS:g} seconds",
        hint="Look whether the machine is overloaded and whether Postgres answers; start fewer processes.",
    )


def _last_word(child: _Child[P]) -> HeadwaterError | None:
    """Why a process ended, if it said so."""
    try:
        told: object = child.pipe.recv() if child.pipe.poll() else None
    except EOFError:
        return None
    return told if isinstance(told, HeadwaterError) else None


def _in_child(run: Run[P], plan: P, parent: Connection) -> None:
    # Ctrl-C in a terminal goes to all; the parent decides, and says so by closing the pipe.
    os.setpgrp()
    try:
        run(plan, parent)
    except HeadwaterError as error:
        # The parent says it as it says its own.
        with suppress(OSError):
            parent.send(error)
        sys.exit(exit_codes.code_for(type(error)))
