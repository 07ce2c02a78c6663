"""How many calls an engine is given at once, and how many retries all tickets may make together."""

from __future__ import annotations

import math
from collections.abc import Callable


class ConcurrencyLimit:
    """Follows the engine: more while its latency stays near its base, fewer as soon as it grows (gradient control).

    The base is the slowly moving average latency, capped at `target_s`: without that cap an engine that stays
    slow becomes the new normal and the limit grows back. After Netflix's concurrency-limits (Gradient2), which
    lacks the cap.
    """

    TOLERANCE = 1.5
    """Latency may be this many times the base before anything is taken back."""
    SHORT, LONG = 0.2, 0.01
    """Weights of a new sample in the recent and in the long-run average."""
    SMOOTHING = 0.2

    def __init__(self, most: int, target_s: float, least: int = 1) -> None:
        self._most = float(most)
        self._least = float(least)
        self._target_s = target_s
        self._limit = float(most)
        self._recent_s: float | None = None
        self._long_s: float | None = None

    @property
    def limit(self) -> int:
        return int(self._limit)

    def answered(self, latency_s: float, in_flight: int) -> None:
        """A call was answered; `in_flight` counts it. An idle engine says nothing about a larger limit."""
        latency_s = max(latency_s, 1e-6)  # a clock's tick is no latency
        self._recent_s = _moved(self._recent_s, latency_s, self.SHORT)
        self._long_s = _moved(self._long_s, latency_s, self.LONG)
        base_s = min(self._long_s, self._target_s)
        gradient = max(0.5, min(1.0, self.TOLERANCE * base_s / self._recent_s))
        if gradient == 1.0 and in_flight < self._limit / 2:
            return
        aim = self._limit * gradient + (math.sqrt(self._limit) if gradient == 1.0 else 0.0)
        self._set(self._limit + self.SMOOTHING * (aim - self._limit))

    def refused(self) -> None:
        """The engine said it has too much (429, 503) or did not answer in time."""
        self._set(self._limit * 0.8)

    def _set(self, value: float) -> None:
        self._limit = max(self._least, min(self._most, value))


def _moved(average: float | None, sample: float, weight: float) -> float:
    return sample if average is None else average + weight * (sample - average)


class RetryBudget:
    """Retries may be at most a share of first attempts, plus a trickle, so that they never multiply an overload.

    Ten per cent after Google's SRE book ("Handling overload"); the trickle keeps the tickets of a batch that failed
    as one from starving: twenty a second are less than one batch.
    """

    def __init__(
        self, clock: Callable[[], float], *, share: float = 0.1, per_second: float = 20.0, most: float = 100.0
    ) -> None:
        self._clock = clock
        self._share = share
        self._per_second = per_second
        self._most = most
        self._tokens = most / 10
        self._filled_at = clock()

    def first_attempt(self) -> None:
        """Every request that is not a retry earns a share of one."""
        self._tokens = min(self._most, self._tokens + self._share)

    def wait_s(self) -> float:
        """Takes a retry and returns 0, or takes nothing and says after how many seconds to ask again."""
        now = self._clock()
        self._tokens = min(self._most, self._tokens + (now - self._filled_at) * self._per_second)
        self._filled_at = now
        if self._tokens >= 1.0:
            self._tokens -= 1.0
            return 0.0
        return (1.0 - self._tokens) / self._per_second
