"""Batcher: neighbours are joined, equals are asked once, and the ticket at fault ends up alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from tests.runtime.engines import ScriptedEngine
from tests.runtime.virtual_time import in_virtual_time, run
from worker.core.scores import LabelScores, ScoreRequest
from worker.errors import EngineDropped, EngineError, EngineSilent, EngineUnavailable, InvalidAnswer, RequestRefused
from worker.runtime.batcher import Batcher, OutOfTime
from worker.runtime.limiter import BatchSize
from worker.runtime.suspects import ALONE, Suspects


def request(text: str, prefix: str = "p") -> ScoreRequest:
    return ScoreRequest(prefix, text, (1, 2, 3))


@in_virtual_time
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


@in_virtual_time
async def test_prefixes_are_never_mixed() -> None:
    engine = ScriptedEngine()
    batcher = Batcher(engine.score, max_items=8, max_wait_s=0.005, concurrency=2)
    await asyncio.gather(batcher.score(request("a", "one")), batcher.score(request("a", "two")))
    assert len(engine.calls) == 2


@in_virtual_time
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


@in_virtual_time
async def test_cancelling_one_waiter_does_not_disturb_an_equal_one() -> None:
    batcher = Batcher(ScriptedEngine(delay_s=0.05).score, max_items=1, max_wait_s=0, concurrency=1)
    first = asyncio.create_task(batcher.score(request("a")))
    second = asyncio.create_task(batcher.score(request("a")))
    await asyncio.sleep(0.01)
    first.cancel()
    assert isinstance(await second, LabelScores)


@in_virtual_time
async def test_one_who_runs_out_of_time_does_not_disturb_an_equal_one() -> None:
    engine = ScriptedEngine(delay_s=0.1)
    batcher = Batcher(engine.score, max_items=1, max_wait_s=0, concurrency=1)
    hasty = asyncio.create_task(batcher.score(request("a"), 0.01))
    patient = asyncio.create_task(batcher.score(request("a"), 60.0))
    with pytest.raises(OutOfTime):
        await hasty
    assert not patient.done()
    assert isinstance(await patient, LabelScores)
    assert len(engine.calls) == 1


def test_everyone_runs_out_of_their_own_time_whoever_came_first() -> None:
    """One alarm serves all: it has to go off for the next when one was answered, gave up, or came later with less."""

    class Quick(ScriptedEngine):
        async def score(self, requests: Sequence[ScoreRequest]) -> Sequence[LabelScores]:
            await asyncio.sleep(1.0 if requests[0].item == "answered" else 1_000.0)
            return await super().score(requests)

    async def main() -> None:
        batcher = Batcher(Quick().score, max_items=1, max_wait_s=0, concurrency=16)
        loop = asyncio.get_running_loop()
        ended: dict[str, float] = {}

        async def ask(name: str, within_s: float) -> None:
            try:
                await batcher.score(request(name), within_s)
            except OutOfTime:
                ended[name] = loop.time()

        asking = [asyncio.create_task(ask(name, s)) for name, s in (("a", 50.0), ("answered", 3.0), ("b", 20.0))]
        asking.append(asyncio.create_task(ask("a", 7.0)))
        await asyncio.sleep(10.0)
        assert ended == {"a": 7.0}
        asking.append(asyncio.create_task(ask("c", 5.0)))
        asking.append(asyncio.create_task(ask("d", 0.0)))
        await asyncio.gather(*asking)
        assert ended == {"d": 10.0, "c": 15.0, "b": 20.0, "a": 50.0}
        await batcher.aclose()

    run(main())


def test_looking_for_who_ran_out_of_time_takes_little_time_however_many_deadlines_there_are() -> None:
    looks = 0

    class Counting(Batcher):
        def _end_the_overdue(self) -> None:
            nonlocal looks
            looks += 1
            super()._end_the_overdue()

    async def main() -> None:
        batcher = Counting(ScriptedEngine(delay_s=1_000.0).score, max_items=1, max_wait_s=0, concurrency=1)
        loop = asyncio.get_running_loop()
        late: list[float] = []

        async def ask(number: int, within_s: float) -> None:
            with pytest.raises(OutOfTime):
                await batcher.score(request(f"{number}"), within_s)
            late.append(loop.time() - within_s)

        await asyncio.gather(*(ask(number, 1.0 + number / 2_000) for number in range(2_000)))
        assert max(late) < 0.02
        await batcher.aclose()

    run(main())
    assert looks <= 101


@in_virtual_time
async def test_whoever_waits_for_a_call_that_has_not_begun_is_cancelled_by_the_end() -> None:
    batcher = Batcher(ScriptedEngine(delay_s=60.0).score, max_items=1, max_wait_s=0, concurrency=1)
    asking = [asyncio.create_task(batcher.score(request(text), 60.0)) for text in ("under way", "waiting", "waiting")]
    await asyncio.sleep(0.01)
    await batcher.aclose()
    done, pending = await asyncio.wait(asking, timeout=5.0)
    assert not pending
    assert all(task.cancelled() for task in done)


def test_another_question_about_a_ticket_is_another_suspect() -> None:
    suspects = Suspects()
    suspects.dropped([request("a text", "one prefix")])
    assert suspects.most(request("a text", "one prefix")) == ALONE
    assert suspects.most(request("a text", "another")) is None
    suspects.cleared([request("a text", "another")])
    assert suspects.most(request("a text", "one prefix")) == ALONE


async def test_an_adapter_bug_reaches_the_caller() -> None:
    def answer(requests: Sequence[ScoreRequest]) -> None:
        raise KeyError("bug")

    batcher = Batcher(ScriptedEngine(answer).score, max_items=1, max_wait_s=0, concurrency=1)
    async with asyncio.timeout(5):
        with pytest.raises(KeyError):
            await batcher.score(request("a"))


@in_virtual_time
async def test_a_batch_grows_while_every_call_is_under_way() -> None:
    engine = ScriptedEngine(delay_s=0.2)
    batcher = Batcher(engine.score, max_items=32, max_wait_s=0.001, concurrency=1)
    scoring = [asyncio.create_task(batcher.score(request("0")))]
    while not engine.calls:
        await asyncio.sleep(0.001)
    for number in range(1, 41):  # each comes later than the longest wait of the one before
        scoring.append(asyncio.create_task(batcher.score(request(str(number)))))
        await asyncio.sleep(0.002)
    await asyncio.gather(*scoring)
    assert [len(call) for call in engine.calls] == [1, 32, 8]
    assert [int(text) for call in engine.calls for text in call] == list(range(41))


@in_virtual_time
async def test_a_call_has_no_more_items_than_the_size_of_the_moment() -> None:
    engine = ScriptedEngine()
    size = 4
    batcher = Batcher(engine.score, max_items=32, max_wait_s=0.005, concurrency=1, size=lambda: size)
    await asyncio.gather(*(batcher.score(request(str(n))) for n in range(10)))
    size = 8
    await asyncio.gather(*(batcher.score(request(f"later {n}")) for n in range(10)))
    assert [len(call) for call in engine.calls] == [4, 4, 2, 8, 2]


async def test_what_an_engine_did_not_outlive_comes_back_in_smaller_calls_and_in_the_end_alone() -> None:
    down = False

    def end(requests: Sequence[ScoreRequest]) -> None:
        nonlocal down
        if down:
            raise EngineUnavailable("restarting")
        if any(r.item == "poison" for r in requests):
            down = True
            raise EngineDropped("gone")

    engine, alone = ScriptedEngine(end), ScriptedEngine(end)
    batcher = Batcher(engine.score, 32, max_wait_s=0.005, concurrency=1, ask_alone=alone.score)
    waiting = {f"t{n}" for n in range(31)} | {"poison"}
    dropped: list[str] = []
    deaths = 0
    while waiting:
        assert deaths < 10
        asked = sorted(waiting)
        answers = await asyncio.gather(*(batcher.score(request(text)) for text in asked), return_exceptions=True)
        waiting = {text for text, answer in zip(asked, answers, strict=True) if isinstance(answer, EngineError)}
        dropped += [text for text, answer in zip(asked, answers, strict=True) if isinstance(answer, EngineDropped)]
        if len(dropped) == 2:  # then it is given up
            waiting.discard("poison")
        deaths += down
        down = False
    assert dropped == ["poison"] * 2
    assert alone.calls == [["poison"]], "nobody else was ever the only suspect"
    assert deaths <= 4
    await batcher.score(request("fresh"))
    assert engine.calls[-1] == ["fresh"]


def test_the_size_of_a_call_follows_the_engine_up_and_down() -> None:
    """200 tickets a second, one call at once. A call takes 50 ms and 1 ms for each ticket in it; then 60 ms for each
    ticket, so that a full one would take 7.7 s; then as before."""
    target_s = 4.0
    spells = {"quick": (0.0, 0.001), "calm": (0.05, 0.001), "slow": (0.05, 0.06), "calm again": (0.05, 0.001)}

    async def main() -> dict[str, list[tuple[int, float]]]:
        size = BatchSize(128, target_s)
        calls: dict[str, list[tuple[int, float]]] = {name: [] for name in spells}
        now = "quick"

        async def ask(requests: Sequence[ScoreRequest]) -> Sequence[LabelScores]:
            fixed_s, each_s = spells[now]
            taken_s = fixed_s + each_s * len(requests)
            calls[now].append((len(requests), taken_s))
            await asyncio.sleep(taken_s)
            size.answered(len(requests), taken_s)
            return [LabelScores.from_logprobs((-0.1, -3.0, -4.0))] * len(requests)

        batcher = Batcher(ask, 128, max_wait_s=0.005, concurrency=1, size=lambda: size.limit)
        waiting = []
        for number in range(12_000):
            if number % 3_000 == 0:
                now = list(spells)[number // 3_000]
            waiting.append(asyncio.create_task(batcher.score(request(str(number)))))
            await asyncio.sleep(0.005)
        await asyncio.gather(*waiting)
        return calls

    calls = run(main())
    usual = {name: sorted(count for count, _ in found)[len(found) // 2] for name, found in calls.items()}
    assert usual["quick"] <= 3, "nobody waits for neighbours longer than `max_wait_s`"
    assert 8 <= usual["calm"] <= 20, "the slower the engine, the more share a call"
    assert sum(taken_s > target_s for _, taken_s in calls["slow"]) <= 1, "the first tells"
    assert 20 <= usual["slow"] <= 66, "then as many as take half of the target, and no fewer"
    assert max(count for count, _ in calls["calm again"]) == 128, "the backlog goes in full calls"


@in_virtual_time
async def test_what_was_not_answered_in_time_is_asked_about_one_by_one_until_it_is() -> None:
    def hang(requests: Sequence[ScoreRequest]) -> None:
        if any(r.item == "slow" for r in requests):
            raise EngineSilent("no whole answer")

    engine = ScriptedEngine(hang)
    batcher = Batcher(engine.score, 8, max_wait_s=0.005, concurrency=1)
    texts = ["a", "b", "slow", "c"]
    first = await asyncio.gather(*(batcher.score(request(text)) for text in texts), return_exceptions=True)
    assert [type(answer) for answer in first] == [EngineSilent] * 4
    again = await asyncio.gather(*(batcher.score(request(text)) for text in texts), return_exceptions=True)
    assert [isinstance(answer, EngineSilent) for answer in again] == [False, False, True, False]
    await asyncio.sleep(0.15)  # answers are kept for a moment
    await asyncio.gather(*(batcher.score(request(text)) for text in "abc"))
    assert [len(call) for call in engine.calls] == [4, 1, 1, 1, 1, 3]


@in_virtual_time
async def test_no_prefix_waits_for_all_of_another() -> None:
    engine = ScriptedEngine(delay_s=0.001)
    batcher = Batcher(engine.score, max_items=2, max_wait_s=0.001, concurrency=1)
    await asyncio.gather(
        *(batcher.score(request(f"one {n}", "one")) for n in range(20)), batcher.score(request("two", "two"))
    )
    assert ["two"] in engine.calls[:4]


def test_calls_that_take_too_long_carry_fewer_and_grow_back_when_they_are_quick() -> None:
    size = BatchSize(32, target_s=4.0)
    for _ in range(8):  # of one slow moment
        size.answered(32, 16.0)
    assert size.limit == 4
    size.answered(4, 3.0)
    assert size.limit == 4, "quick enough to stay, not to grow"
    size.answered(2, 0.1)
    assert size.limit == 4, "a call that was not full proves nothing"
    for _ in range(30):
        size.answered(size.limit, 0.5)
    assert size.limit == 32
    size.answered(32, 10_000.0)
    assert size.limit == 1
