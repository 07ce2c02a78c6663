"""Batcher: joins requests that share a prefix into one engine call, and equal ones into one request."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextvars import Context
from dataclasses import dataclass, field

from worker.core.scores import LabelScores, Piece, ScoreRequest
from worker.errors import EngineDropped, EngineError, EngineSilent, InvalidAnswer, RequestRefused, TooLong
from worker.runtime.suspects import ALONE, Suspects
from worker.telemetry import Span, Step, current_span, engine_call

Ask = Callable[[Sequence[ScoreRequest]], Awaitable[Sequence[LabelScores]]]
"""As ScoringEngine.score."""

GRACE_S = 0.1
"""So long an answer is kept for equal tickets whose look-up in the cache was under way when it came."""

ALARM_S, ALARM_PER_TICKET_S = 0.01, 1e-6
"""At least between two looks at all that wait for who has run out of time: a look takes a tenth of a microsecond for
each, and so a tenth of the time at most, however many deadlines there are."""

Group = tuple[Piece, tuple[int, ...], int | None]
"""Prefix, labels, and what `Suspects.most` says: suspects come together, apart from all others."""


@dataclass(slots=True)
class _Asked:
    """One request from its first ticket on, until its answer is forgotten. Who waits has a future of its own, so that
    whoever is cancelled disturbs nobody."""

    request: ScoreRequest
    waiting: list[tuple[asyncio.Future[LabelScores], float]] = field(default_factory=list)
    """Each with the time of the loop until which it waits."""
    answer: LabelScores | None = None
    spans: list[Span] = field(default_factory=list)
    """Of those that wait, where they are traced."""
    call: Step | None = None
    """The call that it is part of, where a traced ticket waits for that."""


@dataclass(slots=True)
class _Group:
    """Requests that may share a call, in the order in which they came."""

    requests: list[_Asked] = field(default_factory=list)
    timer: asyncio.TimerHandle | None = None
    is_due: bool = False


class OutOfTime(Exception):
    """Whoever asked did not get an answer within its own time; the call goes on for the others."""


class Batcher:
    """Collects for `max_wait_s` or until `max_items`, whichever is first; at most `concurrency` calls at once.

    While all calls are under way, what is due goes on collecting: the slower the engine, the larger its batches. Where
    it takes too long even so, `size` lowers `max_items`.

    A call that the engine refuses, drops or answers with nonsense is halved until the one ticket at fault is alone:
    its neighbours are scored. An engine that is away fails the whole call; asking again is the caller's business.

    What a dropped call tells of its requests is kept until they are answered: those that come again after an outage go
    on being told apart where they were, and one that was dropped by itself is asked about with nothing beside it.
    """

    def __init__(
        self,
        ask: Ask,
        max_items: int,
        max_wait_s: float,
        concurrency: int,
        size: Callable[[], int] | None = None,
        ask_alone: Ask | None = None,
    ) -> None:
        """`size` says how many items a call may have now; `ask_alone` asks while nothing else is being asked."""
        self._engine_ask = ask
        self._engine_ask_alone = ask_alone or ask
        self._suspects = Suspects()
        self._max_items = max_items
        self._size = size
        self._max_wait_s = max_wait_s
        self._free = concurrency
        self._waiting: dict[Group, _Group] = {}
        self._in_flight: dict[ScoreRequest, _Asked] = {}
        self._calls: set[asyncio.Task[None]] = set()
        self._alarm: asyncio.TimerHandle | None = None
        """Goes off when the first of those that wait runs out of time: a timer for each costs more than all of this."""
        self._alarm_at = math.inf
        self._look_from = 0.0
        """Not before this time of the loop: see ALARM_S."""

    async def score(self, request: ScoreRequest, within_s: float | None = None) -> LabelScores:
        """Raises EngineError, TooLong, and OutOfTime where there is no answer `within_s`. Neither that nor being
        cancelled disturbs others that wait for an equal request."""
        loop = asyncio.get_running_loop()
        asked = self._in_flight.get(request)
        if asked is None:
            asked = self._in_flight[request] = _Asked(request)
            self._enqueue(asked)
        elif asked.answer is not None:
            return asked.answer
        future: asyncio.Future[LabelScores] = loop.create_future()
        until = math.inf if within_s is None else loop.time() + within_s
        asked.waiting.append((future, until))
        if (look_at := max(until, self._look_from)) < self._alarm_at:
            self._wake_at(look_at)
        if (span := current_span()) is not None:
            asked.spans.append(span)
            if asked.call is not None:
                asked.call.link(span)
        return await future

    async def aclose(self) -> None:
        """Cancel what is still being asked, and whoever waits for it."""
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm, self._alarm_at = None, math.inf
        for group in self._waiting.values():
            if group.timer is not None:
                group.timer.cancel()
            _cancel(group.requests)
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)

    def _items(self, key: Group) -> int:
        suspected = key[2]
        most = self._max_items if suspected is None else min(self._max_items, suspected)
        return max(1, most if self._size is None else min(most, self._size()))

    def _wake_at(self, until: float) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm_at = until
        self._alarm = asyncio.get_running_loop().call_at(until, self._end_the_overdue)

    def _end_the_overdue(self) -> None:
        now = asyncio.get_running_loop().time()
        self._alarm, self._alarm_at = None, math.inf
        earliest, looked_at = math.inf, 0
        for asked in self._in_flight.values():
            looked_at += len(asked.waiting)
            asked.waiting = [(future, until) for future, until in asked.waiting if not future.done()]
            for future, until in asked.waiting:
                if until <= now:
                    future.set_exception(OutOfTime())
                else:
                    earliest = min(earliest, until)
        self._look_from = now + ALARM_S + looked_at * ALARM_PER_TICKET_S
        if earliest < math.inf:
            self._wake_at(max(earliest, self._look_from))

    def _enqueue(self, asked: _Asked) -> None:
        request = asked.request
        key = (request.prefix, request.label_token_ids, self._suspects.most(request))
        group = self._waiting.get(key)
        if group is None:
            group = self._waiting[key] = _Group()
        group.requests.append(asked)
        if group.is_due or len(group.requests) >= self._items(key):
            group.is_due = True
            self._start_calls()
        elif group.timer is None:
            group.timer = asyncio.get_running_loop().call_later(self._max_wait_s, self._ripened, group)

    def _ripened(self, group: _Group) -> None:
        group.is_due = True
        self._start_calls()

    def _start_calls(self) -> None:
        """As many as may be under way together, of groups that are due: the one that was served last comes last."""
        while self._free:
            key = next((key for key, group in self._waiting.items() if group.is_due), None)
            if key is None:
                return
            group = self._waiting.pop(key)
            if group.timer is not None:
                group.timer.cancel()
            most = self._items(key)
            if len(group.requests) > most:
                # What is left came while nothing was free: it has waited long enough.
                self._waiting[key] = _Group(group.requests[most:], is_due=True)
            self._free -= 1
            call = asyncio.create_task(
                self._call(group.requests[:most], alone=key[2] == ALONE),
                context=Context(),  # it is no more about the ticket that happens to start it than about the others
            )
            self._calls.add(call)
            call.add_done_callback(self._ended)

    def _ended(self, call: asyncio.Task[None]) -> None:
        self._calls.discard(call)
        self._free += 1
        if not call.cancelled():
            self._start_calls()

    async def _call(self, batch: Sequence[_Asked], *, alone: bool) -> None:
        ask = self._engine_ask_alone if alone else self._engine_ask
        try:
            await self._ask(ask, batch)
        except asyncio.CancelledError:
            self._forget(batch)
            _cancel(batch)
            raise
        asyncio.get_running_loop().call_later(GRACE_S, self._forget, batch)

    async def _ask(self, ask: Ask, batch: Sequence[_Asked]) -> None:
        requests = [asked.request for asked in batch]
        try:
            spans = [span for asked in batch for span in asked.spans]
            with engine_call(spans, len(batch)) as call:
                if spans:
                    for asked in batch:
                        asked.call = call
                rows = await ask(requests)
            if len(rows) != len(batch):
                raise InvalidAnswer(f"{len(rows)} rows for {len(batch)} requests")
        except (RequestRefused, EngineDropped, InvalidAnswer, TooLong) as error:
            if isinstance(error, EngineDropped):
                self._suspects.dropped(requests)
            if len(batch) == 1:
                self._fail(batch, error)
                return
            middle = len(batch) // 2
            await self._ask(ask, batch[:middle])
            await self._ask(ask, batch[middle:])
        except EngineError as error:
            if isinstance(error, EngineSilent):
                self._suspects.silent(requests, hung=error.works is False)
            else:
                self._suspects.outlived(requests)
            self._fail(batch, error)
        except Exception as error:  # noqa: BLE001 - a bug in an adapter must not leave tickets waiting for ever
            self._fail(batch, error)
        else:
            self._suspects.cleared(requests)
            for asked, row in zip(batch, rows, strict=True):
                asked.answer = row
                for future, _ in asked.waiting:
                    if not future.done():
                        future.set_result(row)

    def _fail(self, batch: Sequence[_Asked], error: Exception) -> None:
        for asked in batch:
            # Out of the way first: an equal ticket that comes now must ask again, not get this failure.
            self._in_flight.pop(asked.request, None)
            for future, _ in asked.waiting:
                if not future.done():
                    future.set_exception(error)

    def _forget(self, batch: Sequence[_Asked]) -> None:
        for asked in batch:
            if self._in_flight.get(asked.request) is asked:
                del self._in_flight[asked.request]


def _cancel(batch: Iterable[_Asked]) -> None:
    for asked in batch:
        for future, _ in asked.waiting:
            future.cancel()
