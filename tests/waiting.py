"""Waiting until something is so, instead of sleeping for as long as it usually takes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

PATIENCE_S = 60.0
"""What is awaited takes a fraction of it even on a machine that others keep busy: a limit for what never comes."""


async def until(condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    """Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S) -> None:
    """For conditions that ask another process or thread. Raises AssertionError, which says `what` did not come."""
    give_up_at = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up_at, f"timed out waiting for {what}"
        time.sleep(0.05)
