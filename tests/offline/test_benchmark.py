"""The benchmarks: a broken promise is found, and what is measured is what is claimed."""

from __future__ import annotations

import itertools

import pytest

from worker.offline import guarantee_simulation
from worker.offline.benchmark import OURS, benchmark_calibration, benchmark_guarantees
from worker.offline.guarantee_simulation import POPULATIONS


def nobody(done: int, total: int) -> None:
    """Who watches the progress here."""


def test_the_table_has_every_population_and_procedure_and_no_violation_of_ours() -> None:
    seen: list[tuple[int, int]] = []
    table = benchmark_guarantees(60, 7, lambda done, total: seen.append((done, total)), sizes=(100, 500))
    assert {o.population for o in table.outcomes} == {p.name for p in POPULATIONS}
    assert set(OURS) < {o.procedure for o in table.outcomes}
    assert table.violations == ()
    assert not any(o.holds for o in table.outcomes if o.procedure == "naive")
    assert seen[0] == (0, 13) and seen[-1] == (13, 13)


def test_a_procedure_of_ours_that_breaks_its_promise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    planted = {**guarantee_simulation.PROCEDURES, "rank": guarantee_simulation.naive}
    monkeypatch.setattr(guarantee_simulation, "PROCEDURES", planted)
    table = benchmark_guarantees(60, 7, nobody, sizes=(200,))
    assert {o.procedure for o in table.violations} == {"rank"}
    assert len(table.violations) == len(POPULATIONS)


def test_certifying_is_timed_and_its_memory_grows_no_faster_than_the_tickets() -> None:
    ticks = itertools.count()
    small, large = benchmark_calibration((1_000, 4_000), 6, 7, lambda: float(next(ticks)), nobody)
    assert (small.n, large.n, large.categories) == (1_000, 4_000, 6)
    assert small.deciding_s == small.certifying_s == small.calibrating_s == 1.0
    assert large.peak_mib < 5 * small.peak_mib
