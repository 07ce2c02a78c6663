"""How long an event loop was held up by what ran in it, on a machine that others keep busy."""

from __future__ import annotations

import asyncio
import threading
import time
from types import TracebackType

TICK_S = 0.005


class LoopLag:
    """Between entering and leaving: `latest_s`, the longest time by which a turn of the loop was late, and `longest_s`,
    the same less the time by which a thread that only sleeps was late meanwhile.

    What keeps both late is the machine and the interpreter (other processes, other threads' work); a call that waits
    in the loop keeps only the loop late. In seconds."""

    def __init__(self) -> None:
        self.latest_s = self.longest_s = 0.0
        self._control = _Control()

    async def __aenter__(self) -> LoopLag:
        self._control.start()
        self._task = asyncio.create_task(self._tick())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
        self._control.leave()

    async def _tick(self) -> None:
        before, others_s = time.perf_counter(), self._control.late_s()
        while True:
            await asyncio.sleep(TICK_S)
            now, others_now_s = time.perf_counter(), self._control.late_s()
            late_s = now - before - TICK_S
            self.latest_s = max(self.latest_s, late_s)
            self.longest_s = max(self.longest_s, late_s - (others_now_s - others_s))
            before, others_s = now, others_now_s


class _Control(threading.Thread):
    """Sleeps, tick by tick, and sums up by how much it was late."""

    def __init__(self) -> None:
        super().__init__(name="loop-lag-control", daemon=True)
        self._left = threading.Event()
        self._seen = (time.perf_counter(), 0.0)
        """When it last woke, and the sum until then; one tuple, since two threads read it."""

    def run(self) -> None:
        while not self._left.is_set():
            before, late_s = self._seen
            time.sleep(TICK_S)
            now = time.perf_counter()
            self._seen = (now, late_s + max(0.0, now - before - TICK_S))

    def late_s(self) -> float:
        """Seconds since the start, with the sleep that goes on."""
        woke, late_s = self._seen
        return late_s + max(0.0, time.perf_counter() - woke - TICK_S)

    def leave(self) -> None:
        self._left.set()
        self.join()
