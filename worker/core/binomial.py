"""Exact binomial bounds: what k errors among n independent answers say about the error rate behind them.

Clopper & Pearson 1934. A one-sided upper bound at level delta lies below the true rate with probability at most delta;
`upper(k, n, delta) <= alpha` is the same statement as `P(Bin(n, alpha) <= k) <= delta`, which is how thresholds are
tested.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]


def binomial_cdf(k: NDArray[Any], n: NDArray[Any], p: float | Floats) -> Floats:
    """P(Bin(n, p) <= k), elementwise over arrays of one shape (p may be one for all): 0 for k < 0, 1 for k >= n."""
    inside = (k >= 0) & (k < n)
    failures = np.where(inside, n - k, 1).astype(np.float64)
    cdf = special.betainc(failures, np.where(inside, k + 1, 1).astype(np.float64), 1.0 - p)
    return np.where(inside, cdf, np.where(k < 0, 0.0, 1.0))


def clopper_pearson_upper(k: int, n: int, delta: float) -> float:
    """One-sided upper bound on the rate at level `delta`; 1 where nothing was observed. Raises ValueError."""
    _check_counts(k, n, delta)
    return 1.0 if k == n else float(special.betainccinv(k + 1, n - k, delta))


def clopper_pearson_lower(k: int, n: int, delta: float) -> float:
    """One-sided lower bound on the rate at level `delta`; 0 where nothing was observed. Raises ValueError."""
    _check_counts(k, n, delta)
    return 0.0 if k == 0 else float(special.betaincinv(k, n - k + 1, delta))


def clopper_pearson(k: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Two-sided interval that covers the rate with at least `confidence`."""
    tail = (1.0 - confidence) / 2.0
    return clopper_pearson_lower(k, n, tail), clopper_pearson_upper(k, n, tail)


def n_min(alpha: float, delta: float) -> int:
    """Fewest accepted items that can certify error rate `alpha` at level `delta`: all of them must be right."""
    check_level("alpha", alpha)
    check_level("delta", delta)
    size = max(1, math.ceil(math.log(delta) / math.log1p(-alpha)))
    while (1.0 - alpha) ** size > delta:
        size += 1
    while size > 1 and (1.0 - alpha) ** (size - 1) <= delta:
        size -= 1
    return size


@lru_cache(maxsize=512)
def critical_sizes(n: int, alpha: float, level: float) -> Integers:
    """For k = 0, 1, ...: the fewest accepted items among which k errors still certify, as far as they are <= n.

    These are the only sizes worth testing: one item fewer allows one error fewer. Shape (kmax(n) + 1,), increasing,
    read-only. At 5 %/5 % they begin 59, 93, 124, 153, 181.
    """
    low, high = -1, max(n, 0)  # kmax(n) lies in [low, high)
    while high - low > 1:
        middle = (low + high) // 2
        certifies = binomial_cdf(np.array([middle]), np.array([n]), alpha)[0] <= level
        low, high = (middle, high) if certifies else (low, middle)
    errors = np.arange(low + 1, dtype=np.int64)
    too_few, enough = errors.copy(), np.full(low + 1, n, dtype=np.int64)  # size k of all errors never certifies
    while np.any(enough - too_few > 1):
        middle_size = (too_few + enough) // 2
        certified = binomial_cdf(errors, middle_size, alpha) <= level
        enough = np.where(certified, middle_size, enough)
        too_few = np.where(certified, too_few, middle_size)
    enough.setflags(write=False)
    return enough


def kmax(m: int, alpha: float, level: float) -> int:
    """Most errors among `m` accepted items that still certify `alpha` at `level`; -1 where even none is too many."""
    return critical_sizes(m, alpha, level).size - 1


def check_level(name: str, value: float) -> None:
    """Raises ValueError unless 0 < value < 1."""
    if not 0.0 < value < 1.0:
        raise ValueError(f"{name} is a rate strictly between 0 and 1, and {value} is not")


def _check_counts(k: int, n: int, delta: float) -> None:
    check_level("delta", delta)
    if not 0 <= k <= n:
        raise ValueError(f"{k} errors among {n} items cannot be")
