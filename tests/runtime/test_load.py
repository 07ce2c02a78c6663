"""Under load: never more at once than asked for, each timed from its own beginning, and a failure ends the rest."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from worker.errors import EngineUnavailable
from worker.runtime.load import under_load


def silent(done: int, total: int) -> None: ...


async def test_so_many_are_under_way_and_never_more() -> None:
    under_way, most = 0, 0

    async def piece(number: int) -> int:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        for _ in range(3):
            await asyncio.sleep(0)
        under_way -= 1
        return number

    timed = await under_load([partial(piece, n) for n in range(20)], 4, lambda: 0.0, silent)
    assert [one.done for one in timed] == list(range(20))
    assert most == 4


async def test_waiting_for_a_turn_is_no_latency() -> None:
    now = 0.0

    async def piece() -> None:
        nonlocal now
        await asyncio.sleep(0)
        now += 1.0

    timed = await under_load([piece] * 5, 1, lambda: now, silent)
    assert [one.seconds for one in timed] == [1.0] * 5


async def test_a_failure_is_raised_as_it_is_and_nothing_goes_on() -> None:
    ended: list[str] = []

    async def fails() -> None:
        raise EngineUnavailable("away")

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")

    with pytest.raises(EngineUnavailable):
        await under_load([waits, fails, waits], 3, lambda: 0.0, silent)
    assert ended == ["cancelled"] * 2
