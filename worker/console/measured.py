"""Measured values in one form."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # these need numpy, which a worker does not
    from worker.offline.measures import Measured


def percent(measured: Measured) -> str:
    return f"{measured.value:.1%} ({100 * measured.lower:.1f} to {100 * measured.upper:.1f} %)"


def measured_between(measured: Measured) -> str:
    """A share with its 95 % interval; a dash where there was nothing to measure."""
    if not math.isfinite(measured.value):
        return "–"
    return f"{measured.value:.1%} ({100 * measured.lower:.1f} to {100 * measured.upper:.1f} %)"


def rate(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"
