"""Cross-fitting: no ticket's own label speaks for it."""

from __future__ import annotations

import numpy as np
import pytest

from worker.core.selection import Candidate
from worker.offline.cross_fitting import cross_fitted_correctness, cross_fitted_probabilities


def test_no_ticket_has_a_say_in_its_own_probabilities() -> None:
    generator = np.random.default_rng(1)
    z, y = generator.normal(size=(60, 3)), generator.integers(0, 3, 60)
    kind = Candidate("bias_temperature", 1.0)
    found = cross_fitted_probabilities(z, y, kind, 5)
    for row in (0, 17, 59):
        other = y.copy()
        other[row] = (other[row] + 1) % 3
        again = cross_fitted_probabilities(z, other, kind, 5)
        assert np.array_equal(found[row], again[row])
        assert not np.array_equal(found, again)


@pytest.mark.parametrize("kind", ["platt", "venn_abers"])
def test_no_ticket_has_a_say_in_its_own_chance_of_being_right(kind: str) -> None:
    generator = np.random.default_rng(2)
    p = generator.uniform(0.3, 1, 80).tolist()
    right = [int(generator.random() < value) for value in p]
    found = cross_fitted_correctness(p, right, kind, 5)  # type: ignore[arg-type]
    for row in (0, 40, 79):
        other = [*right]
        other[row] = 1 - other[row]
        assert cross_fitted_correctness(p, other, kind, 5)[row] == found[row]  # type: ignore[arg-type]


@pytest.mark.parametrize("n", [1, 2, 4])
def test_fewer_tickets_than_folds_are_answered_too(n: int) -> None:
    z, y = np.zeros((n, 2)), np.zeros(n, dtype=np.int64)
    assert cross_fitted_probabilities(z, y, Candidate("temperature"), 0).shape == (n, 2)
