"""The numbers that docs/calibration.md gives to people who do not compute them themselves."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from scipy.stats import binom

from worker.core.binomial import clopper_pearson_upper

GUIDE = (Path(__file__).parents[2] / "docs/calibration.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("looked_at", [50, 100, 200])
def test_an_alarm_is_what_chance_brings_about_in_fewer_than_one_look_in_twenty(looked_at: int) -> None:
    row = re.search(rf"^\| {looked_at} \| (\d+) \| (\d+) \|$", GUIDE, re.MULTILINE)
    assert row is not None
    for alarm, alpha in zip(map(int, row.groups()), (0.05, 0.10), strict=True):
        assert binom.sf(alarm - 1, looked_at, alpha) < 0.05 <= binom.sf(alarm - 2, looked_at, alpha)


@pytest.mark.parametrize(
    ("row", "alpha", "delta"),
    [
        ("alpha 10 %, delta 10 %", 0.10, 0.10),
        ("alpha 5 %, delta 5 %", 0.05, 0.05),
        ("alpha 5 %, delta 0.5 %", 0.05, 0.005),
    ],
)
def test_the_labels_that_a_promise_takes_are_the_least_that_do(row: str, alpha: float, delta: float) -> None:
    cells = re.search(rf"^\| {re.escape(row)}[^|]*\|([\d |]+)\|$", GUIDE, re.MULTILINE)
    assert cells is not None
    for errors, n in enumerate(map(int, cells[1].split("|"))):
        assert clopper_pearson_upper(errors, n, delta) <= alpha < clopper_pearson_upper(errors, n - 1, delta)
