"""An event loop whose clock jumps: minutes of sleeps and timeouts take milliseconds, and one seed is one course."""

from __future__ import annotations

import asyncio
import functools
import heapq
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Time passes only while nothing is ready to run: then it is the time of the next timer. No sockets, no threads."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        if not self._ready:
            while self._scheduled and self._scheduled[0]._cancelled:
                self._timer_cancelled_count -= 1
                heapq.heappop(self._scheduled)._scheduled = False
            if not self._scheduled:
                raise RuntimeError("everything waits for something that will never happen")
            self._now = max(self._now, self._scheduled[0]._when)
        super()._run_once()


def run(main: Coroutine[Any, Any, T]) -> T:
    """What `main` returns, in virtual time from 0 on."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """The test whose body runs by `run`: its delays and deadlines keep their order however slow the machine is."""

    @functools.wraps(test)
    def timeless(*args: P.args, **kwargs: P.kwargs) -> None:
        run(test(*args, **kwargs))

    return timeless
