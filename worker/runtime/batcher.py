"""Batcher: joins requests that share a prefix into one engine call, and equal ones into one request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from worker.core.scores import LabelScores, ScoreRequest
from worker.errors import EngineDropped, EngineError, InvalidAnswer, RequestRefused, TooLong

Ask = Callable[[Sequence[ScoreRequest]], Awaitable[Sequence[LabelScores]]]
"""As ScoringEngine.score."""

Group = tuple[str, tuple[int, ...]]


@dataclass(slots=True)
class _Waiting:
    requests: dict[ScoreRequest, asyncio.Future[LabelScores]] = field(default_factory=dict)
    timer: asyncio.TimerHandle | None = None


class Batcher:
    """Collects for `max_wait_s` or until `max_items`, whichever is first; at most `concurrency` calls at once.

    A call that the engine refuses, drops or answers with nonsense is halved until the one ticket at fault is alone:
    its neighbours are scored. An engine that is away fails the whole call; asking again is the caller's business.
    """

    def __init__(self, ask: Ask, max_items: int, max_wait_s: float, concurrency: int) -> None:
        self._engine_ask = ask
        self._max_items = max_items
        self._max_wait_s = max_wait_s
        self._slots = asyncio.Semaphore(concurrency)
        self._waiting: dict[Group, _Waiting] = {}
        self._in_flight: dict[ScoreRequest, asyncio.Future[LabelScores]] = {}
        self._calls: set[asyncio.Task[None]] = set()

    async def score(self, request: ScoreRequest) -> LabelScores:
        """Raises EngineError, TooLong. Being cancelled does not disturb others that wait for an equal request."""
        future = self._in_flight.get(request)
        if future is None:
            future = asyncio.get_running_loop().create_future()
            future.add_done_callback(_retrieve)
            self._in_flight[request] = future
            self._enqueue(request, future)
        return await asyncio.shield(future)

    async def aclose(self) -> None:
        """Cancel what is still being asked."""
        for waiting in self._waiting.values():
            if waiting.timer is not None:
                waiting.timer.cancel()
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)

    def _enqueue(self, request: ScoreRequest, future: asyncio.Future[LabelScores]) -> None:
        group = (request.prefix, request.label_token_ids)
        waiting = self._waiting.setdefault(group, _Waiting())
        waiting.requests[request] = future
        if len(waiting.requests) >= self._max_items:
            self._flush(group)
        elif waiting.timer is None:
            waiting.timer = asyncio.get_running_loop().call_later(self._max_wait_s, self._flush, group)

    def _flush(self, group: Group) -> None:
        waiting = self._waiting.pop(group, None)
        if waiting is None:
            return
        if waiting.timer is not None:
            waiting.timer.cancel()
        call = asyncio.create_task(self._call(waiting.requests))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def _call(self, requests: dict[ScoreRequest, asyncio.Future[LabelScores]]) -> None:
        try:
            async with self._slots:
                await self._ask(tuple(requests), requests)
        finally:
            for request, future in requests.items():
                self._in_flight.pop(request, None)
                if not future.done():  # only where this call itself was cancelled
                    future.cancel()

    async def _ask(
        self, asked: Sequence[ScoreRequest], futures: dict[ScoreRequest, asyncio.Future[LabelScores]]
    ) -> None:
        try:
            rows = await self._engine_ask(asked)
            if len(rows) != len(asked):
                raise InvalidAnswer(f"{len(rows)} rows for {len(asked)} requests")
        except (RequestRefused, EngineDropped, InvalidAnswer, TooLong) as error:
            if len(asked) == 1:
                self._settle(asked[0], futures, error)
                return
            middle = len(asked) // 2
            await self._ask(asked[:middle], futures)
            await self._ask(asked[middle:], futures)
        except EngineError as error:
            for request in asked:
                self._settle(request, futures, error)
        except Exception as error:  # noqa: BLE001 - a bug in an adapter must not leave tickets waiting for ever
            for request in asked:
                self._settle(request, futures, error)
        else:
            for request, row in zip(asked, rows, strict=True):
                self._settle(request, futures, row)

    def _settle(
        self,
        request: ScoreRequest,
        futures: dict[ScoreRequest, asyncio.Future[LabelScores]],
        result: LabelScores | Exception,
    ) -> None:
        # Out of the way first: an equal ticket that comes now must ask again, not get this failure.
        self._in_flight.pop(request, None)
        future = futures[request]
        if future.done():
            return
        if isinstance(result, LabelScores):
            future.set_result(result)
        else:
            future.set_exception(result)


def _retrieve(future: asyncio.Future[LabelScores]) -> None:
    """Marks the exception as seen: everybody who waited may have been cancelled."""
    if not future.cancelled():
        future.exception()
