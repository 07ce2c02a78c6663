"""What `calibrate` prints: plain words first where there are few labels, and each thing once."""

from __future__ import annotations

import io

from rich.console import Console

from tests.offline.populations import question, scored
from worker.console.calibrations import print_calibration
from worker.offline.calibrate import calibrate


def told(n: int, seed: int = 3) -> list[str]:
    out = io.StringIO()
    result = calibrate(question(), scored(n, seed), seed=7, created_at="2026-02-03T04:05:06Z")
    print_calibration(Console(file=out, width=200), result)
    return [line.strip() for line in out.getvalue().splitlines()]


def test_few_labels_are_said_first_with_how_many_to_begin_with() -> None:
    lines = told(15)
    assert lines[1].startswith("15 labelled tickets are few: begin with 240, taken as they come")
    assert not any(line.startswith("240") or "are few" in line for line in told(240))


def test_what_is_never_routed_is_said_once() -> None:
    lonely = [line for line in told(15) if "a single labelled ticket in the file" in line]
    assert lonely and len(set(lonely)) == len(lonely)
    for line in lonely:
        assert sum(line.split(":")[0] in other for other in told(15) if "never routed" in other) == 1
