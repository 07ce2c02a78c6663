"""What a process costs while it works: its CPU seconds and memory, as Linux accounts for them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
PAGE_MIB = os.sysconf("SC_PAGE_SIZE") / 2**20
LOOK_S = 0.05
WARM_UP = 0.1
"""Share of the work that is not counted: imports, the first connections, caches that fill."""
STANDSTILL_S = 90.0


@dataclass(frozen=True, slots=True)
class Sight:
    """One look at a process: seconds by the clock, CPU seconds since its start, resident MiB, units of work done."""

    at_s: float
    cpu_s: float
    rss_mib: float
    done: int


@dataclass(frozen=True, slots=True)
class Cost:
    """Between two looks: what a ticket cost, and how many there were."""

    tickets: int
    seconds: float
    cpu_us: float
    """CPU microseconds a ticket, all threads, user and system."""
    rss_mib: float
    """Most at any look."""

    @property
    def per_second(self) -> float:
        """By the wall clock: it depends on whatever else the machine does."""
        return self.tickets / self.seconds

    @property
    def per_core_second(self) -> float:
        """What a core of its own would do, if the process were never short of work."""
        return 1e6 / self.cpu_us


class StoodStill(Exception):
    """The process ended, or did nothing more, before its work was done."""


def look(pid: int, done: int) -> Sight:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    cpu_s = (int(fields[11]) + int(fields[12])) * TICK_S
    return Sight(time.monotonic(), cpu_s, int(fields[21]) * PAGE_MIB, done)


def watch(
    pid: int,
    done: Callable[[], int],
    total: int,
    *,
    at_most_s: float = 600.0,
    settle_s: float = 0.0,
    settle_units: int = 1,
) -> list[Sight]:
    """Looks until `total` units are done, or for `at_most_s` once they go steadily. Raises StoodStill.

    They do `settle_s` after the first, when `settle_units` are done; then as many are seen at least, however long that
    takes. What was seen before is left out, if there is anything else.
    """
    sights: list[Sight] = []
    began: float | None = None
    steady_at: float | None = None
    enough = total
    moved_at, before = time.monotonic(), -1
    while True:
        try:
            sight = look(pid, done())
        except FileNotFoundError:
            raise StoodStill(f"the process has ended after {max(before, 0)} of {total}") from None
        now = sight.at_s
        if sight.done != before:
            before, moved_at = sight.done, now
        if began is None and sight.done > 0:
            began = now
        if steady_at is None and began is not None and now - began >= settle_s and sight.done >= settle_units:
            steady_at, enough = now, sight.done + settle_units
        sights.append(sight)
        if sight.done >= total or (steady_at is not None and now - steady_at >= at_most_s and sight.done >= enough):
            steady = [each for each in sights if steady_at is not None and each.at_s >= steady_at]
            return steady if steady and steady[-1].done > steady[0].done else sights
        if now - moved_at > STANDSTILL_S:
            raise StoodStill(f"nothing moved for {STANDSTILL_S:g} s, after {sight.done} of {total}")
        time.sleep(LOOK_S)


def cost_of(sights: list[Sight]) -> Cost:
    """From the moment that a tenth was done (or of the first progress after) to the last progress."""
    first, last = sights[0], sights[-1]
    # Work shows in steps: the looks right after one stand for as much work as was done by then.
    steps = [after for before, after in pairwise(sights) if after.done > before.done]
    enough = first.done + WARM_UP * (last.done - first.done)
    counted = [step for step in steps if step.done >= enough]
    if len(counted) < 2:
        counted = [first, last]
    begin, end = counted[0], counted[-1]
    tickets = max(1, end.done - begin.done)
    seconds = max(end.at_s - begin.at_s, 1e-9)
    cpu_us = max(end.cpu_s - begin.cpu_s, TICK_S) / tickets * 1e6
    return Cost(tickets, seconds, cpu_us, max(sight.rss_mib for sight in sights))
