"""Calls of the Kafka client that may never return, made so that they can be left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future


def returns_within(call: Callable[[], object], seconds: float, name: str) -> bool:
    """Makes the call on a thread of its own; False where it has not returned by then. Raises what the call raises.

    A call that is left behind keeps what it works on alive. Its thread does not keep the process from ending.
    """
    answer: Future[None] = Future()

    def run() -> None:
        try:
            call()
        except Exception as problem:  # noqa: BLE001  # raised where it is waited for
            answer.set_exception(problem)
        else:
            answer.set_result(None)

    threading.Thread(target=run, name=name, daemon=True).start()  # noqa: TID251  # as said above
    try:
        answer.result(seconds)
    except TimeoutError:
        if answer.done():
            raise
        return False
    return True
