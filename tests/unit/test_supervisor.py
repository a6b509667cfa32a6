"""Background tasks: what fails is run again, and only cancelling from outside ends it."""

from __future__ import annotations

import asyncio

import pytest

from headwater import supervisor
from patience import PATIENCE_SECONDS


def test_a_task_that_fails_returns_or_is_cancelled_from_within_is_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "MIN_PAUSE_SECONDS", 0.001)

    async def trial() -> list[int]:
        runs: list[int] = []
        fourth = asyncio.Event()

        async def run() -> None:
            runs.append(len(runs))
            if len(runs) == 1:
                raise ValueError("a failure")
            if len(runs) == 2:
                raise asyncio.CancelledError
            if len(runs) == 4:
                fourth.set()
                await asyncio.Event().wait()

        task = supervisor.supervise("trial", run)
        await asyncio.wait_for(fourth.wait(), PATIENCE_SECONDS)
        task.cancel()
        await asyncio.wait({task}, timeout=PATIENCE_SECONDS)
        assert task.cancelled()
        return runs

    assert asyncio.run(trial()) == [0, 1, 2, 3]


def test_cancelling_the_caller_waits_until_the_work_has_ended() -> None:
    async def trial() -> None:
        began, ended = asyncio.Event(), asyncio.Event()

        async def work() -> None:
            began.set()
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                ended.set()

        caller = asyncio.create_task(supervisor.failure_of(work()))
        await asyncio.wait_for(began.wait(), PATIENCE_SECONDS)
        caller.cancel()
        await asyncio.wait({caller}, timeout=PATIENCE_SECONDS)
        assert caller.cancelled()
        assert ended.is_set()

    asyncio.run(trial())
