"""Random splits: every split is another one, and a promise that is broken is counted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.offline.populations import question, scored
from worker.errors import ConfigError
from worker.offline import splits
from worker.offline.calibrate import CalibrationResult
from worker.offline.scoring import ScoredTicket
from worker.offline.splits import SplitRow, repeat_splits

NOW = "2026-02-03T04:05:06Z"


def rows(tickets: list[ScoredTicket], **changes: object) -> tuple[SplitRow, ...]:
    asked: dict[str, object] = {"sizes": (200, 400), "rates": ((0.1, 0.1),), "splits": 6, "seed": 3}
    return repeat_splits(question(), tickets, **(asked | changes), created_at=NOW, progress=lambda d, t: None)  # type: ignore[arg-type]


def test_the_promise_holds_on_held_out_tickets_and_more_labels_route_more() -> None:
    few, many = rows(scored(900, 1))
    assert (few.n, many.n, many.splits) == (200, 400, 6)
    assert (few.held_out, many.held_out) == (700, 500)
    for row in (few, many):
        assert row.over_beyond_chance <= 1
        assert row.error is not None and row.error < 0.1
        assert row.certificates > 0
    assert many.coverage > few.coverage - 0.05
    assert many.ece_after < many.ece_before
    assert few.nothing_certified < 6 and many.split_form > 0


def test_no_two_splits_are_alike_and_the_same_seed_gives_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[CalibrationResult] = []
    kept = splits.calibrate

    def watched(*args: object, **options: object) -> CalibrationResult:
        seen.append(kept(*args, **options))  # type: ignore[arg-type]
        return seen[-1]

    monkeypatch.setattr(splits, "calibrate", watched)
    tickets = scored(600, 2, low_mass=0.0)
    first = rows(tickets, sizes=(400,), splits=4)
    texts = [frozenset(row.ticket.text for row in result.certifying) for result in seen]
    assert len(set(texts)) == 4
    # Of the tickets that are labelled in two splits, some fit in one and certify in the other.
    labelled = [frozenset(t.text for t in result.screened.usable) for result in seen]
    assert labelled[0] & labelled[1] & (texts[0] ^ texts[1])
    assert rows(tickets, sizes=(400,), splits=4) == first


def test_a_promise_that_is_broken_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = splits.evaluate

    def spoiled(asked: object, artefact: object, held_out: list[ScoredTicket], **options: object) -> object:
        """Traffic in which every label means something else than when it was calibrated."""
        changed = [replace(t, label=(t.label + 1) % 8 if t.label >= 0 else -1) for t in held_out]
        return kept(asked, artefact, changed, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(splits, "evaluate", spoiled)
    (row,) = rows(scored(900, 1), sizes=(400,))
    assert row.over == row.over_beyond_chance == 6
    assert row.certificates_over == row.certificates > 0


def test_too_few_tickets_to_hold_against_are_refused() -> None:
    with pytest.raises(ConfigError, match="at most 250"):
        rows(scored(300, 1), sizes=(260,))
