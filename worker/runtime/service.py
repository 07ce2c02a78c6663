"""Running a worker as a process: as a task beside others, and under the signals that end it."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Protocol

from worker.runtime.loop import Worker

FORCED_EXIT_CODE = 130

YOUNG_OBJECTS = 50_000
"""So many more objects than before, and the young ones are looked at. By default it is 700: a few dozen tickets."""
KEPT_BYTES = 64 * 1024 * 1024
"""So much freed memory stays with the process."""
_M_TRIM_THRESHOLD, _M_TOP_PAD = -1, -2  # glibc's malloc.h


class Stoppable(Protocol):
    """What drains when it is told to."""

    def stop(self) -> None: ...


@asynccontextmanager
async def running(worker: Worker) -> AsyncIterator[asyncio.Task[None]]:
    """The worker consumes inside the block and drains at its end. Raises what ended the worker."""
    task = asyncio.create_task(worker.run())
    try:
        yield task
    finally:
        worker.stop()
        await task


async def until_signalled(
    start: Callable[[Callable[[Stoppable], None]], Awaitable[None]], forced: Callable[[], None]
) -> None:
    """Runs `start` until it returns or SIGTERM or SIGINT ends it.

    `start` is handed a function to announce its worker or server with. The first signal drains that (or cancels the
    start-up before there is one); a second one ends the process at once, after `forced`.
    """
    loop = asyncio.get_running_loop()
    announced: list[Stoppable] = []
    signalled = False
    main = asyncio.create_task(_awaited(start(announced.append)))

    def on_signal() -> None:
        nonlocal signalled
        if signalled:
            forced()
            # Nothing graceful is left to do, and threads of the clients could keep an orderly exit waiting.
            os._exit(FORCED_EXIT_CODE)
        signalled = True
        if announced:
            announced[-1].stop()
        else:
            main.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    try:
        await main
    except asyncio.CancelledError:
        if not signalled:
            raise
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def spare_the_collector() -> None:
    """What the start made lives as long as the process: the collector of cycles need not look at it again, nor as often
    at what comes and goes with each ticket. It took a sixth of the worker's CPU."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 20, 20)


def keep_freed_memory() -> None:
    """What one batch of tickets frees, the next one takes. glibc would give the end of its heap back in between, and
    the kernel would make it anew, page by page: some 5 % of the worker's CPU. Elsewhere nothing happens."""
    try:
        tune = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    tune(_M_TRIM_THRESHOLD, KEPT_BYTES)
    tune(_M_TOP_PAD, KEPT_BYTES // 4)


async def _awaited(awaitable: Awaitable[None]) -> None:
    await awaitable
