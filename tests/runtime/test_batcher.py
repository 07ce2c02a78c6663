"""Batcher: neighbours are joined, equals are asked once, and the ticket at fault ends up alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from tests.runtime.engines import ScriptedEngine
from worker.core.scores import LabelScores, ScoreRequest
from worker.errors import EngineDropped, EngineUnavailable, InvalidAnswer, RequestRefused
from worker.runtime.batcher import Batcher


def request(text: str, prefix: str = "p") -> ScoreRequest:
    return ScoreRequest(prefix, text, (1, 2, 3))


async def test_neighbours_share_a_call_and_get_their_own_row() -> None:
    engine = ScriptedEngine()
    batcher = Batcher(engine.score, max_items=8, max_wait_s=0.005, concurrency=2)
    rows = await asyncio.gather(*(batcher.score(request(f"label {n % 3} {n}")) for n in range(5)))
    assert len(engine.calls) == 1
    assert [max(range(3), key=row.logprobs.__getitem__) for row in rows] == [0, 1, 2, 0, 1]


async def test_a_full_batch_does_not_wait() -> None:
    engine = ScriptedEngine()
    batcher = Batcher(engine.score, max_items=2, max_wait_s=60, concurrency=2)
    async with asyncio.timeout(5):
        await asyncio.gather(*(batcher.score(request(str(n))) for n in range(4)))
    assert sorted(len(call) for call in engine.calls) == [2, 2]


async def test_prefixes_are_never_mixed() -> None:
    engine = ScriptedEngine()
    batcher = Batcher(engine.score, max_items=8, max_wait_s=0.005, concurrency=2)
    await asyncio.gather(batcher.score(request("a", "one")), batcher.score(request("a", "two")))
    assert len(engine.calls) == 2


async def test_equal_requests_in_flight_are_asked_once() -> None:
    engine = ScriptedEngine(delay_s=0.02)
    batcher = Batcher(engine.score, max_items=4, max_wait_s=0.001, concurrency=2)
    rows = await asyncio.gather(*(batcher.score(request("same")) for _ in range(1000)))
    assert engine.calls == [["same"]]
    assert len({row.logprobs for row in rows}) == 1


@pytest.mark.parametrize("error", [RequestRefused("no"), EngineDropped("gone"), InvalidAnswer("NaN")])
async def test_the_poison_ticket_is_alone_and_its_neighbours_are_scored(error: Exception) -> None:
    def answer(requests: Sequence[ScoreRequest]) -> None:
        if any(r.item == "poison" for r in requests):
            raise error

    engine = ScriptedEngine(answer)
    batcher = Batcher(engine.score, max_items=32, max_wait_s=0.005, concurrency=1)
    texts = [f"t{n}" for n in range(31)] + ["poison"]
    rows = await asyncio.gather(*(batcher.score(request(t)) for t in texts), return_exceptions=True)
    assert rows[-1] is error
    assert all(isinstance(row, LabelScores) for row in rows[:-1])
    assert len(engine.calls) <= 2 * 5 + 1


async def test_an_absent_engine_fails_the_call_without_halving() -> None:
    def answer(requests: Sequence[ScoreRequest]) -> None:
        raise EngineUnavailable("refused")

    engine = ScriptedEngine(answer)
    batcher = Batcher(engine.score, max_items=4, max_wait_s=0.005, concurrency=1)
    rows = await asyncio.gather(*(batcher.score(request(str(n))) for n in range(4)), return_exceptions=True)
    assert all(isinstance(row, EngineUnavailable) for row in rows)
    assert len(engine.calls) == 1


async def test_a_failure_is_not_handed_to_the_next_equal_ticket() -> None:
    failing = [True]

    def answer(requests: Sequence[ScoreRequest]) -> None:
        if failing.pop(0) if failing else False:
            raise EngineUnavailable("once")

    batcher = Batcher(ScriptedEngine(answer).score, max_items=1, max_wait_s=0, concurrency=1)
    with pytest.raises(EngineUnavailable):
        await batcher.score(request("a"))
    assert await batcher.score(request("a"))


async def test_cancelling_one_waiter_does_not_disturb_an_equal_one() -> None:
    batcher = Batcher(ScriptedEngine(delay_s=0.05).score, max_items=1, max_wait_s=0, concurrency=1)
    first = asyncio.create_task(batcher.score(request("a")))
    second = asyncio.create_task(batcher.score(request("a")))
    await asyncio.sleep(0.01)
    first.cancel()
    assert isinstance(await second, LabelScores)


async def test_an_adapter_bug_reaches_the_caller() -> None:
    def answer(requests: Sequence[ScoreRequest]) -> None:
        raise KeyError("bug")

    batcher = Batcher(ScriptedEngine(answer).score, max_items=1, max_wait_s=0, concurrency=1)
    async with asyncio.timeout(5):
        with pytest.raises(KeyError):
            await batcher.score(request("a"))
