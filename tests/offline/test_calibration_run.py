"""A calibration run: what is asked once, what twice, and which answers serve which purpose."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.core.sets import rule_set
from tests.offline.populations import name_of
from tests.servers.stub_engine import StubEngine
from worker.adapters.files import Labelled
from worker.adapters.sglang import SGLangEngine
from worker.errors import ConfigError
from worker.offline.calibration_run import (
    CalibrateOptions,
    CalibrationRun,
    Scorer,
    require_labels_of_each,
    run_calibration,
)
from worker.offline.scoring import Progress
from worker.runtime.question import prepare_question

LABELS = ("billing", "login", "bug")


@dataclass
class Desk:
    stub: StubEngine
    scorer: Scorer
    bars: list[str] = field(default_factory=list)

    async def run(self, labelled: int, unlabelled: int = 0, **options: object) -> CalibrationRun:
        return await run_calibration(
            self.scorer,
            tickets(labelled),
            [Labelled(t.id, t.text, "") for t in tickets(unlabelled, first=50_000)],
            CalibrateOptions(**options),  # type: ignore[arg-type]
            seed=1,
            created_at="2026-02-03T04:05:06Z",
        )


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    async def no_sleep(_: float) -> None:
        return None

    async with StubEngine() as stub:
        stub.behaviour.keywords = {label: f" {label}" for label in LABELS}
        engine = SGLangEngine(stub.url)
        asked = await prepare_question(rule_set(*LABELS), engine)
        bars: list[str] = []

        def start(what: str) -> Progress:
            bars.append(what)
            return lambda done, total: None

        yield Desk(stub, Scorer(asked, engine, tmp_path / "scores.jsonl", 32, start, no_sleep), bars)
        await engine.aclose()


def tickets(n: int, first: int = 0) -> list[Labelled]:
    return [
        Labelled(f"t{i}", f"ticket {name_of(i)} about {LABELS[i % 3]}", LABELS[i % 3]) for i in range(first, first + n)
    ]


async def test_labelled_tickets_are_asked_about_once_and_nothing_is_repeated(desk: Desk) -> None:
    before = desk.stub.counters.items
    run = await desk.run(120)
    assert desk.stub.counters.items == before + 120
    assert desk.bars == ["labelled tickets"]
    assert run.selftest is None and run.result.artefact.margin_gate is None


async def test_the_margin_gate_comes_from_tickets_scored_twice(desk: Desk) -> None:
    before = desk.stub.counters.items
    run = await desk.run(310, repeat=True)
    assert desk.stub.counters.items == before + 620
    gate = run.result.artefact.margin_gate
    assert gate is not None and gate.measured and gate.n == 310


async def test_unlabelled_tickets_are_repeated_in_place_of_labelled_ones(desk: Desk) -> None:
    before = desk.stub.counters.items
    run = await desk.run(120, 510, repeat=True)
    assert desk.stub.counters.items == before + 120 + 2 * 510
    gate = run.result.artefact.margin_gate
    assert gate is not None and gate.n == 510
    assert {c.procedure for c in run.result.certificates} == {"frozen"}


async def test_the_self_test_takes_a_sample_of_many_tickets(desk: Desk) -> None:
    run = await desk.run(330, selftest=True)
    assert run.selftest is not None and run.selftest.n == 300
    assert desk.bars == ["labelled tickets", "self-test"]


def test_whatever_departs_from_the_rules_is_a_what_if() -> None:
    assert not CalibrateOptions(joint=True, repeat=True, selftest=True).what_if
    for options in (
        CalibrateOptions(alpha=0.1),
        CalibrateOptions(delta=0.1),
        CalibrateOptions(form="raw_margin"),
        CalibrateOptions(target="error_among_routed"),
    ):
        assert options.what_if


class TestLabelsOfEachAnswer:
    def labelled(self, **counts: int) -> list[Labelled]:
        return [Labelled(f"{a}{n}", f"text {a} {n}", a) for a, count in counts.items() for n in range(count)]

    def test_ten_different_texts_of_each_are_enough(self) -> None:
        require_labels_of_each(self.labelled(yes=10, no=10), ["yes", "no"])

    def test_too_few_are_refused_with_their_counts(self) -> None:
        with pytest.raises(ConfigError, match="no 9"):
            require_labels_of_each(self.labelled(yes=30, no=9), ["yes", "no"])

    def test_copies_and_contradictions_do_not_count(self) -> None:
        copies = [Labelled(str(n), "the same", "no") for n in range(30)]
        contradicted = [Labelled(f"c{n}", f"text yes {n}", "no") for n in range(30)]
        for extra in (copies, contradicted):
            with pytest.raises(ConfigError, match="too few"):
                require_labels_of_each([*self.labelled(yes=20), *extra], ["yes", "no"])
