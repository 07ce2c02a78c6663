"""How long an event loop was held up by what ran in it, on a machine that others keep busy."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import TracebackType

TICK_S = 0.005
STATISTICS = Path("/proc/thread-self/schedstat")


class LoopLag:
    """Between entering and leaving: `latest_s`, the longest time by which a turn of the loop was late, and `longest_s`,
    the same less the time in which the kernel ran others instead (Linux: time on the run queue)."""

    def __init__(self) -> None:
        self.latest_s = self.longest_s = 0.0

    async def __aenter__(self) -> LoopLag:
        self._task = asyncio.create_task(self._tick())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _tick(self) -> None:
        before, waited_s = time.perf_counter(), _on_run_queue_s()
        while True:
            await asyncio.sleep(TICK_S)
            now, waited_now_s = time.perf_counter(), _on_run_queue_s()
            late_s = now - before - TICK_S
            self.latest_s = max(self.latest_s, late_s)
            self.longest_s = max(self.longest_s, late_s - (waited_now_s - waited_s))
            before, waited_s = now, waited_now_s


def _on_run_queue_s() -> float:
    try:
        return int(STATISTICS.read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0
