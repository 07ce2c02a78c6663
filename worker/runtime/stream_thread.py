"""StreamThread: the one thread that owns the stream, and how it and the event loop hand things to each other.

It polls, asks the loop what may be settled, settles it, and answers rebalances. It asks and waits rather than being
sent commands: a settlement that queued behind the poll that waits for it would stand still until its deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, TypeVar

from worker.errors import StreamFatal, StreamRetriable
from worker.ports import Delivery, Gap, Partition, Paused, Settled, Settlement, TicketStream

T = TypeVar("T")

POLL_S = 0.02
SOON_S = 0.005
EARLY = 0.75
"""Where much is finished, at most this share of the interval between two settlements is left out."""
ANSWER_S = 5.0
"""How long the thread waits for the loop before it goes on polling (the loop should answer in a millisecond)."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What the loop wants of the next poll."""

    max_records: int
    """0: do not poll, ask again soon."""
    paused: Paused
    settle: bool = False
    """Without waiting for the end of the interval."""


class LoopSide(Protocol):
    """What the thread asks of the loop; every method runs on the loop."""

    def admit(self, deliveries: Sequence[Delivery]) -> None:
        """New deliveries, in order."""

    def demand(self) -> Demand: ...

    def ready(self) -> Settlement: ...

    def settled(self, settlement: Settlement, settled: Settled, seconds: float) -> None: ...

    def settling_failed(self, settlement: Settlement, error: StreamRetriable, seconds: float) -> None: ...

    def assigned(self, epochs: Mapping[Partition, int]) -> None: ...

    def drained(self, partitions: Sequence[Partition]) -> Coroutine[None, None, Settlement]:
        """Wait (within a limit) for these partitions' tickets; what may be settled then."""

    def forget(self, partitions: Sequence[Partition], committed: Mapping[Partition, int] | None = None) -> None:
        """`committed` is what was settled on the way out."""

    def gap(self, gap: Gap) -> None: ...

    def observe(self, lags: Mapping[Partition, int | None], trouble: str | None) -> None: ...


class _Gone(Exception):
    """The event loop does not answer any more."""


class StreamThread:
    """Runs a TicketStream until told to leave. `wait` raises what ended it."""

    def __init__(
        self,
        stream: TicketStream,
        side: LoopSide,
        loop: asyncio.AbstractEventLoop,
        *,
        settle_interval_s: float,
        revoke_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._stream = stream
        self._side = side
        self._loop = loop
        self._settle_interval_s = settle_interval_s
        self._revoke_s = revoke_s
        self._clock = clock
        self._leave = threading.Event()
        self._failing = False
        self._opened: asyncio.Future[None] = loop.create_future()
        self._ended: asyncio.Future[None] = loop.create_future()
        self._thread = threading.Thread(target=self._main, name="ticket-stream", daemon=True)

    async def start(self) -> None:
        """Joins the group. Raises ConfigError, StreamFatal."""
        self._thread.start()
        await asyncio.wait([self._opened, self._ended], return_when=asyncio.FIRST_COMPLETED)
        if self._ended.done():
            self._ended.result()

    def leave(self) -> None:
        """Settle what is ready, leave the group, end."""
        self._leave.set()

    async def wait(self) -> None:
        """Until the thread has ended. Raises StreamFatal where that ended it."""
        await asyncio.shield(self._ended)

    # -- on the thread --------------------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            self._stream.open(self)
            try:
                self._tell(_resolve, self._opened, None)
                self._cycle()
            finally:
                self._stream.close()
        except BaseException as error:  # noqa: BLE001 - whatever ends this thread must end the worker, with its reason
            self._end(error)
        else:
            self._end(None)

    def _end(self, error: BaseException | None) -> None:
        with contextlib.suppress(_Gone):  # then nobody is left to be told
            self._tell(_resolve, self._ended, error)

    def _cycle(self) -> None:
        settle_at = observe_at = self._clock()
        while not self._leave.is_set():
            demand = self._ask(self._side.demand)
            if demand is not None:
                self._stream.set_paused(demand.paused)
                if demand.max_records == 0:
                    self._leave.wait(SOON_S)
                elif deliveries := self._stream.poll(demand.max_records, POLL_S):
                    # Not `_ask`: these must be admitted exactly once, also where the loop is slow to answer.
                    self._wait(self._call(self._side.admit, deliveries))
            now = self._clock()
            early = demand is not None and demand.settle and not self._failing
            if now >= (settle_at - EARLY * self._settle_interval_s if early else settle_at):
                self._settle_ready()
                settle_at = self._clock() + self._settle_interval_s
            if now >= observe_at:
                self._tell(self._side.observe, self._stream.lag(), self._stream.trouble())
                observe_at = now + 1.0
        if not self._failing:  # else closing tries once more, and not for long
            self._settle_ready()

    def _settle_ready(self) -> None:
        settlement = self._ask(self._side.ready)
        if not settlement:
            return
        started = self._clock()
        try:
            settled = self._stream.settle(settlement)
        except StreamRetriable as error:
            self._failing = True
            self._tell(self._side.settling_failed, settlement, error, self._clock() - started)
            return
        self._failing = False
        self._wait(self._call(self._side.settled, settlement, settled, self._clock() - started))

    # AssignmentListener, called from inside poll and close

    def assigned(self, epochs: Mapping[Partition, int]) -> None:
        self._tell(self._side.assigned, dict(epochs))

    def revoking(self, partitions: Sequence[Partition]) -> Settlement:
        try:
            answer = asyncio.run_coroutine_threadsafe(self._side.drained(partitions), self._loop)
        except RuntimeError as error:  # the loop is closed
            raise _Gone from error
        try:
            return answer.result(timeout=self._revoke_s + ANSWER_S)
        except TimeoutError:
            answer.cancel()
            return Settlement()

    def released(self, partitions: Sequence[Partition], settled: Settled) -> None:
        self._tell(self._side.forget, tuple(partitions), settled.committed)

    def lost(self, partitions: Sequence[Partition]) -> None:
        self._tell(self._side.forget, tuple(partitions))

    def gap(self, gap: Gap) -> None:
        self._tell(self._side.gap, gap)

    # Handing over

    def _tell(self, call: Callable[..., object], *arguments: object) -> None:
        """In order with everything else that is told or asked; not waited for."""
        try:
            self._loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError as error:  # the loop is closed
            raise _Gone from error

    def _call(self, call: Callable[..., T], *arguments: object) -> Future[T]:
        answer: Future[T] = Future()

        def run() -> None:
            try:
                answer.set_result(call(*arguments))
            except BaseException as error:  # noqa: BLE001 - raised again on the thread that asked
                answer.set_exception(error)

        self._tell(run)
        return answer

    def _ask(self, call: Callable[[], T]) -> T | None:
        """The loop's answer, or None where it is too busy: then this round is skipped."""
        answer = self._call(call)
        try:
            return answer.result(timeout=ANSWER_S)
        except TimeoutError:
            return None

    def _wait(self, answer: Future[T]) -> T:
        while True:
            try:
                return answer.result(timeout=ANSWER_S)
            except TimeoutError:
                if answer.done():
                    raise
                if not self._loop.is_running():
                    raise StreamFatal("the event loop has ended") from None


def _resolve(future: asyncio.Future[None], error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
