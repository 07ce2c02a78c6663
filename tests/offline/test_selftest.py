"""The self-test: tells noise from order, and a usable engine from one that is not."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest

from tests.core.sets import category_set
from tests.offline.populations import name_of
from tests.servers.stub_engine import StubEngine, token_id
from worker.adapters.files import Labelled
from worker.adapters.sglang import SGLangEngine
from worker.core.rules import Rules, RuleSet
from worker.core.scores import LabelScores, ScoreRequest
from worker.errors import ConfigError
from worker.offline.selftest import SelfTest, rotated, selftest
from worker.ports import EngineIdentity, ScoringEngine
from worker.runtime.question import prepare_question

IDS = ("billing", "login", "bug", "travel", "network")
Change = Callable[[ScoreRequest, list[float], int], list[float]]


class Changed:
    """An engine whose scores are changed on the way back: by the request, or by how often it was called."""

    def __init__(self, engine: ScoringEngine, change: Change) -> None:
        self._engine = engine
        self._change = change
        self._calls = 0

    async def score(self, requests: Sequence[ScoreRequest]) -> Sequence[LabelScores]:
        self._calls += 1
        rows = await self._engine.score(requests)
        changed = []
        for request, row in zip(requests, rows, strict=True):
            z = self._change(request, list(row.logprobs), self._calls)
            total = math.log(sum(map(math.exp, z)) / row.mass)
            changed.append(LabelScores(tuple(value - total for value in z), row.mass))
        return changed

    async def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        return await self._engine.tokenize(texts)

    async def identity(self) -> EngineIdentity:
        return await self._engine.identity()

    async def probe(self) -> None:
        await self._engine.probe()

    async def aclose(self) -> None:
        await self._engine.aclose()


@pytest.fixture
async def stub() -> AsyncIterator[StubEngine]:
    async with StubEngine() as server:
        server.behaviour.keywords = {f"{name} example": f" {name}" for name in IDS}
        yield server


def tickets(n: int, label: str = "") -> list[Labelled]:
    return [Labelled(f"t{i}", f"ticket {name_of(i)}", label) for i in range(n)]


async def no_sleep(_: float) -> None:
    return None


async def run(stub: StubEngine, change: Change | None = None, n: int = 200, **options: object) -> SelfTest:
    engine: ScoringEngine = SGLangEngine(stub.url)
    if change is not None:
        engine = Changed(engine, change)
    rule_set = RuleSet(
        categories=category_set(*IDS, label=False),
        rules=Rules.model_validate({"version": 1, "alpha": 0.1, "delta": 0.1}, strict=False),
    )
    question = await prepare_question(rule_set, engine)
    asked = options.pop("tickets", tickets(n))
    values = {"batch_items": 16, "progress": lambda done, total: None, "sleep": no_sleep, **options}
    try:
        return await selftest(question, engine, asked, **values)  # type: ignore[arg-type]
    finally:
        await engine.aclose()


def towards_the_first(request: ScoreRequest, z: list[float], _: int) -> list[float]:
    return [z[0] + 0.4, *z[1:]]


def by_the_call(request: ScoreRequest, z: list[float], call: int) -> list[float]:
    return [value + (0.3 if (call + i) % 3 == 0 else 0.0) for i, value in enumerate(z)]


async def test_an_engine_that_minds_neither_order_nor_neighbours_flips_nothing(stub: StubEngine) -> None:
    found = await run(stub, orders=2)
    assert [run.flips for run in (*found.repeats, *found.orders)] == [0, 0, 0]
    assert found.usable and not found.cautions
    assert found.easy.right == len(IDS) and found.easy.median_mass == pytest.approx(0.9)
    assert [(label.category, label.word, label.token_id) for label in found.labels] == [
        (name, name, token_id(f" {name}")) for name in IDS
    ]
    for _, shares in found.shares:
        assert shares[0] == shares[1] == shares[2]


async def test_a_taste_for_the_first_place_shows_in_the_orders_and_not_in_the_control(stub: StubEngine) -> None:
    found = await run(stub, towards_the_first, orders=4)
    assert [run.flips for run in found.repeats] == [0]
    assert len(found.orders) == 4
    assert all(run.rate.value > 0.1 for run in found.orders)
    assert found.by_position[0] > 1.5 * max(found.by_position[1:])
    assert sum(found.by_position) == pytest.approx(1.0)
    assert found.usable


async def test_noise_shows_in_the_control_and_makes_the_engine_unusable(stub: StubEngine) -> None:
    found = await run(stub, by_the_call)
    assert found.repeats[0].rate.lower > 0.05
    assert not found.usable and "when nothing else changes" in found.problems[0]
    assert len(found.repeats[0].margins) == found.repeats[0].flips
    assert list(found.repeats[0].margins) == sorted(found.repeats[0].margins)


async def test_a_journal_keeps_the_identical_runs_apart(stub: StubEngine, tmp_path: Path) -> None:
    found = await run(stub, by_the_call, journal=tmp_path / "scores.jsonl")
    assert found.repeats[0].flips > 0


async def test_scores_come_back_to_the_configured_order(stub: StubEngine) -> None:
    engine = SGLangEngine(stub.url)
    rule_set = RuleSet(
        categories=category_set(*IDS, label=False),
        rules=Rules.model_validate({"version": 1, "alpha": 0.1, "delta": 0.1}, strict=False),
    )
    question = await prepare_question(rule_set, engine)
    turned = await rotated(question, engine, 2)
    assert turned.rule_set.categories.ids == (*IDS[2:], *IDS[:2])
    assert turned.primitive.labels.words == (*IDS[2:], *IDS[:2])
    assert turned.primitive.prompt.prefix.index("bug example") < turned.primitive.prompt.prefix.index("billing example")
    await engine.aclose()


async def test_a_model_that_would_rather_say_something_else_is_not_usable(stub: StubEngine) -> None:
    stub.behaviour.mass = 0.01
    found = await run(stub, n=20)
    assert not found.usable and "the labels together have probability 0.01" in found.problems[0]


async def test_a_model_that_ignores_the_examples_is_not_usable(stub: StubEngine) -> None:
    stub.behaviour.keywords = {
        f"{name} example": f" {other}" for name, other in zip(IDS, IDS[1:] + IDS[:1], strict=True)
    }
    found = await run(stub, n=20)
    assert any("does not follow the prompt" in problem for problem in found.problems)


async def test_labels_give_an_accuracy_and_their_absence_none(stub: StubEngine) -> None:
    assert (await run(stub, n=20)).accuracy is None
    named = await run(stub, tickets=[Labelled(f"t{i}", f"login example {name_of(i)}", "login") for i in range(20)])
    assert named.accuracy is not None and named.accuracy.value == 1.0


async def test_it_goes_on_from_its_journal(stub: StubEngine, tmp_path: Path) -> None:
    first = await run(stub, n=30, journal=tmp_path / "scores.jsonl", orders=2)
    before = stub.counters.items
    again = await run(stub, n=30, journal=tmp_path / "scores.jsonl", orders=2)
    assert stub.counters.items - before <= len(IDS) + 1  # the easy tickets and the trial question
    assert (again.repeats, again.orders, again.shares) == (first.repeats, first.orders, first.shares)


async def test_progress_counts_over_all_runs(stub: StubEngine) -> None:
    seen: list[tuple[int, int]] = []
    await run(stub, n=32, orders=2, progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert {total for _, total in seen} == {128} and seen[-1] == (128, 128)


async def test_the_pairs_are_what_the_margin_gate_takes(stub: StubEngine) -> None:
    found = await run(stub, n=20)
    assert len(found.pairs) == 20 and all(a.id == b.id for a, b in found.pairs)


async def test_an_engine_that_refuses_everything_is_reported(stub: StubEngine) -> None:
    stub.behaviour.refused = "ticket"
    with pytest.raises(ConfigError, match="none of 20 tickets"):
        await run(stub, n=20)
