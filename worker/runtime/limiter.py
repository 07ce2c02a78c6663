"""How many calls an engine is given at once, and how many retries all tickets may make together."""

from __future__ import annotations

import math
from collections.abc import Callable

LEAST_WAIT_S = 0.001
"""What rounding leaves of a wait may be too short to move a clock: whoever waits for that asks for ever."""


class ConcurrencyLimit:
    """Follows the engine, so that a call takes no longer than `target_s`, and about half of that where calls queue.

    What a call takes grows with the number of calls beside it (Little's law). So where one took longer than the target,
    the limit becomes the number that would have taken half of it: once for all calls under way together, since they
    tell of the same moment. While calls take no longer than the engine needs for few at once, give or take, the limit
    grows by about its root in each round. A limit that is not used is given back: else an engine that turns slow would
    meet a whole backlog before its first slow answer tells of it.
    """

    TOLERANCE = 1.5
    """Latency may be this many times that of few calls at once before growth stops."""
    FREE_SHARE = 0.25
    """... and this share of the target in any case."""
    FEW = 4
    """Only calls with so few beside them say that the engine itself has become slower."""
    DRIFT = 0.05
    """Weight of such a call in the latency of few calls at once."""

    def __init__(self, most: int, target_s: float, least: int = 1) -> None:
        self._most = float(most)
        self._least = float(least)
        self._target_s = target_s
        self._limit = float(most)
        self._base_s = math.inf
        self._used = 0.0
        self._old_news = 0
        """Answers to come that were under way when the limit was lowered last."""

    @property
    def limit(self) -> int:
        return int(self._limit)

    def answered(self, latency_s: float, in_flight: int) -> None:
        """A call was answered; `in_flight` counts it."""
        if latency_s < self._base_s:
            self._base_s = latency_s
        elif in_flight <= self.FEW:
            self._base_s += self.DRIFT * (latency_s - self._base_s)
        self._used = max(float(in_flight), 0.98 * self._used)
        self._old_news = max(0, self._old_news - 1)
        free_s = min(self._target_s, max(self.FREE_SHARE * self._target_s, self.TOLERANCE * self._base_s))
        if latency_s > self._target_s and not self._old_news:
            self._set(min(self._limit, in_flight) * self._target_s / (2 * latency_s))
            self._old_news = in_flight
        elif latency_s <= free_s and in_flight >= self._limit / 2:
            self._set(self._limit + 1 / math.sqrt(self._limit))
        else:
            self._set(min(self._limit, 2 * self._used + 2))

    def refused(self) -> None:
        """The engine said it has too much (429, 503) or did not answer in time."""
        self._set(self._limit * 0.8)

    def start_slowly(self) -> None:
        """The engine is back after an outage: one call at first, more as they are answered (16 after some 40)."""
        self._limit = self._least

    def _set(self, value: float) -> None:
        self._limit = max(self._least, min(self._most, value))


class BatchSize:
    """How many tickets a call may carry: fewer where one takes longer than `target_s`, so that none waits that long for
    its neighbours. Then as many as would have taken half of it, and more again while full calls take no longer than
    that.

    The concurrency limit comes first: its target is to be lower, for fewer calls at once cost the engine nothing, and
    smaller ones do.
    """

    def __init__(self, most: int, target_s: float) -> None:
        self._most = float(most)
        self._target_s = target_s
        self._limit = float(most)

    @property
    def limit(self) -> int:
        return int(self._limit)

    def answered(self, items: int, latency_s: float) -> None:
        """A call with so many items was answered. Calls of one slow moment together lower the limit once."""
        half_s = self._target_s / 2
        if latency_s > self._target_s:
            self._limit = max(1.0, min(self._limit, items * half_s / latency_s))
        elif latency_s <= half_s and items >= self.limit:
            self._limit = min(self._most, self._limit * 1.125 + 1)


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
        return max(LEAST_WAIT_S, (1.0 - self._tokens) / self._per_second)
