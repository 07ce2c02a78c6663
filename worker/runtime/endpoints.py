"""EnginePool: which engine endpoint is asked next, which is out, and what happens while all of them are."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from worker.core.scores import LabelScores, ScoreRequest
from worker.errors import (
    EngineDropped,
    EngineError,
    EngineSilent,
    EngineUnavailable,
    InvalidAnswer,
    RequestRefused,
    RouterError,
    TooLong,
)
from worker.ports import EngineIdentity, ScoringEngine
from worker.runtime.canary import Canaries, MixedUp, RowWatch
from worker.runtime.limiter import ConcurrencyLimit
from worker.runtime.probing import Probe
from worker.telemetry import Attribute, mark

OnChange = Callable[[str, bool, str], None]
"""(endpoint, whether it is up now, why)."""
OnCall = Callable[[str, float], None]
"""(outcome, seconds): after every call but probes."""
OnAnswer = Callable[[int, float], None]
"""(requests, seconds at the engine): after every call that was answered."""
OnRows = Callable[[str, bool, str | None], None]
"""(endpoint, whether known tickets got their own rows, its alarm): after every answer that held such."""


@dataclass(frozen=True, slots=True)
class Health:
    """When an endpoint counts as down, and how it comes back."""

    failures_to_open: int = 5
    """Consecutive calls that met an unavailable engine (Envoy's default for ejection)."""
    probe_interval_s: float = 2.0
    probe_timeout_s: float = 5.0
    """So long a ticket waits for a probe, unless calls take that long too (`Probe`)."""
    idle_probe_s: float = 10.0
    """An endpoint that answered nothing for so long is probed, so that its death is known before a ticket finds it."""
    identity_check_s: float = 60.0
    """So often every endpoint is asked whether it still runs the model that the calibration is about."""
    latency_target_s: float = 2.0
    """A call that takes longer than this is too much load, whatever the engine's usual latency."""
    concurrency: int = 16
    """Most calls at once, for each endpoint."""


class AnotherModel(EngineUnavailable):
    """The endpoint works, but not with what the calibration was checked against."""


class Endpoint:
    """One engine with its breaker: opened by failures, closed by a scoring probe, never by a customer's ticket."""

    def __init__(self, name: str, engine: ScoringEngine, health: Health, rows: RowWatch, probe: Probe) -> None:
        self.name = name
        self.engine = engine
        self.rows = rows
        self.probe = probe
        self.suspicion: asyncio.Task[bool] | None = None
        """Whether it cannot score; done where nobody is finding out."""
        self.outstanding = 0
        self.turn = 0
        """Of its last call, so that equals take turns."""
        self.failures = 0
        """Calls in a row that met an unavailable engine."""
        self.drops = 0
        """Calls in a row that ended without an answer; nobody knows yet whether by the engine's fault."""
        self.reserved = False
        """For one call that has to be alone."""
        self.answered_at = self.identified_at = float("-inf")
        self.up = True
        self.outages = 0
        self.trouble: str | None = None
        self.limit = ConcurrencyLimit(health.concurrency, health.latency_target_s)

    @property
    def has_room(self) -> bool:
        return self.up and not self.reserved and self.outstanding < self.limit.limit

    @property
    def is_doubtful(self) -> bool:
        """Whether its last call failed."""
        return self.failures > 0 or self.drops > 0


class EnginePool:
    """Balances calls over endpoints that are up, by least outstanding; all must run the same model. One whose last call
    failed gets tickets only where the others are full, until it answers again.

    `probe_request` is scored to find out whether an endpoint works: that proves scoring, and generates nothing.
    """

    def __init__(
        self,
        engines: Sequence[tuple[str, ScoringEngine]],
        probe_request: ScoreRequest,
        expected: EngineIdentity,
        health: Health,
        *,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]],
        on_change: OnChange,
        on_call: OnCall,
        on_rows: OnRows = lambda *_: None,
        on_answer: OnAnswer = lambda *_: None,
    ) -> None:
        self._endpoints = []
        for name, engine in engines:
            rows = RowWatch(engine, clock, partial(on_rows, name))
            probe = Probe(engine, rows, probe_request, clock, health.probe_timeout_s)
            self._endpoints.append(Endpoint(name, engine, health, rows, probe))
        self._expected = expected
        self._health = health
        self._clock = clock
        self._sleep = sleep
        self._on_change = on_change
        self._on_call = on_call
        self._on_answer = on_answer
        self._turns = 0
        self.outages = 0
        """How often all endpoints have been down together."""
        self._up = asyncio.Event()
        self._up.set()
        self._room = asyncio.Event()
        """Never stays set: it wakes whoever waits at that moment."""
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._idle_watches: list[asyncio.Task[None]] = []

    def watch_rows(self, canaries: Canaries) -> None:
        """From now on answers have to prove that their rows are in order."""
        for endpoint in self._endpoints:
            endpoint.rows.canaries = canaries

    def start(self) -> None:
        """Begin to probe endpoints that are idle, and to ask now and then what they run."""
        self._idle_watches = [asyncio.create_task(self._watch_over(endpoint)) for endpoint in self._endpoints]

    @property
    def is_up(self) -> bool:
        """Whether any endpoint is."""
        return self._up.is_set()

    @property
    def trouble(self) -> str | None:
        """What the endpoints that are down said last."""
        down = [f"{e.name}: {e.trouble}" for e in self._endpoints if not e.up]
        return "; ".join(down) or None

    @property
    def alarm(self) -> str | None:
        """Which endpoints have been found to mix up rows and are not trusted again yet."""
        return "; ".join(f"{e.name}: {e.rows.alarm}" for e in self._endpoints if e.rows.alarm) or None

    @property
    def names(self) -> tuple[str, ...]:
        """Of the endpoints."""
        return tuple(endpoint.name for endpoint in self._endpoints)

    def endpoint_is_up(self, name: str) -> bool:
        """Whether this endpoint's breaker is closed."""
        return any(endpoint.up for endpoint in self._endpoints if endpoint.name == name)

    async def wait_until_up(self) -> None:
        await self._up.wait()

    async def score(self, requests: Sequence[ScoreRequest]) -> Sequence[LabelScores]:
        """As ScoringEngine.score, on the endpoint with the fewest calls; EngineUnavailable where all are down."""
        endpoint = await self._acquire()
        return await self._call(endpoint, requests)

    async def score_alone(self, requests: Sequence[ScoreRequest]) -> Sequence[LabelScores]:
        """As `score`, with no other call at that endpoint: where it is dropped then, no neighbour was the cause."""
        endpoint = await self._reserve()
        try:
            return await self._call(endpoint, requests)
        finally:
            endpoint.reserved = False
            self._announce_room()

    async def _call(self, endpoint: Endpoint, requests: Sequence[ScoreRequest]) -> Sequence[LabelScores]:
        """Gives back what was acquired."""
        mark(Attribute.ENDPOINT, endpoint.name)
        started, outages = self._clock(), endpoint.outages
        outcome = "cancelled"
        try:
            rows = await endpoint.rows.score(requests)
            outcome = "answered"
        except EngineSilent as error:
            outcome = "unavailable"
            if len(requests) > 1:  # one ticket that is never answered is no sign of too many calls
                endpoint.limit.refused()
            silent_at = self._clock()
            works = await self._works(endpoint, outages)
            raise EngineSilent(str(error), works=works, probed_s=self._clock() - silent_at) from error
        except EngineUnavailable as error:
            outcome = "unavailable"
            endpoint.limit.refused()
            self._failed(endpoint, str(error))
            raise
        except EngineDropped:
            outcome = "dropped"
            await self._dropped(endpoint)
            raise
        except MixedUp as error:
            outcome = "mixed_up"
            self._distrust(endpoint, error)
            raise
        except (EngineError, TooLong):
            outcome = "refused"
            self._answered(endpoint)  # a definite no is an answer
            raise
        else:
            self._answered(endpoint)
            taken_s = self._clock() - started
            endpoint.limit.answered(taken_s, endpoint.outstanding)
            endpoint.probe.answered(taken_s)
            self._on_answer(len(requests), taken_s)
            return rows
        finally:
            endpoint.outstanding -= 1
            self._on_call(outcome, self._clock() - started)
            self._announce_room()

    async def suspect(self) -> bool:
        """Probe every endpoint that is up (once for all who ask); True where one of them cannot score, and is out now.

        Then it need not be the ticket that failed: while other endpoints are up, it may try them.
        """
        if not self.is_up:
            return True
        found = await asyncio.gather(*(self._suspect(endpoint) for endpoint in self._endpoints if endpoint.up))
        return any(found)

    async def aclose(self) -> None:
        """End the probes; the engines belong to whoever made them."""
        suspicions = [endpoint.suspicion for endpoint in self._endpoints if endpoint.suspicion is not None]
        tasks = [*suspicions, *self._idle_watches, *self._watches.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for endpoint in self._endpoints:
            await endpoint.probe.aclose()

    async def _acquire(self) -> Endpoint:
        while True:
            if not self.is_up:
                raise EngineUnavailable(f"every engine is down: {self.trouble}")
            free = [endpoint for endpoint in self._endpoints if endpoint.has_room]
            if free:
                return self._take(free)
            await self._room.wait()

    async def _reserve(self) -> Endpoint:
        """As `_acquire`; whoever does so meanwhile goes elsewhere, or waits."""
        while True:
            if not self.is_up:
                raise EngineUnavailable(f"every engine is down: {self.trouble}")
            free = [endpoint for endpoint in self._endpoints if endpoint.up and not endpoint.reserved]
            if not free:
                await self._room.wait()
                continue
            endpoint = self._take(free)
            endpoint.reserved = True
            try:
                while endpoint.up and endpoint.outstanding > 1:
                    await self._room.wait()
                if endpoint.up:
                    return endpoint
            except BaseException:
                self._give_back(endpoint)
                raise
            self._give_back(endpoint)

    def _take(self, free: Sequence[Endpoint]) -> Endpoint:
        # One that fails has few calls outstanding, since it fails fast: by that alone it would get most.
        endpoint = min(free, key=lambda e: (e.is_doubtful, e.outstanding, e.turn))
        endpoint.outstanding += 1
        endpoint.turn = self._turns = self._turns + 1
        return endpoint

    def _give_back(self, endpoint: Endpoint) -> None:
        endpoint.outstanding -= 1
        endpoint.reserved = False
        self._announce_room()

    def _announce_room(self) -> None:
        self._room.set()
        self._room.clear()

    def _answered(self, endpoint: Endpoint) -> None:
        endpoint.failures = endpoint.drops = 0
        endpoint.answered_at = self._clock()

    def _failed(self, endpoint: Endpoint, why: str) -> None:
        endpoint.failures += 1
        if endpoint.failures >= self._health.failures_to_open:
            self._open(endpoint, why)

    async def _dropped(self, endpoint: Endpoint) -> None:
        """Tickets that end their own connection are no outage: where drops come in a row, a probe tells."""
        endpoint.drops += 1
        if endpoint.drops >= self._health.failures_to_open:
            await self.suspect()

    async def _works(self, endpoint: Endpoint, outages: int) -> bool:
        """The same of tickets that are never answered, where one call has cost all of its time: a probe tells at once.

        Where the endpoint has been out since, as `outages` of before the call tells, it hung, even if it is back.
        """
        endpoint.drops += 1
        return not await self._suspect(endpoint) and endpoint.outages == outages

    def _distrust(self, endpoint: Endpoint, error: MixedUp) -> None:
        if endpoint.rows.is_hopeless:
            self._open(endpoint, str(error))

    def _open(self, endpoint: Endpoint, why: str) -> None:
        endpoint.trouble = why
        if not endpoint.up:
            return
        endpoint.up = False
        endpoint.outages += 1
        self._on_change(endpoint.name, False, why)
        if not any(e.up for e in self._endpoints):
            self._up.clear()
            self.outages += 1
        self._watches[endpoint.name] = asyncio.create_task(self._until_up(endpoint))

    async def _until_up(self, endpoint: Endpoint) -> None:
        self._announce_room()  # whoever waits for room on it must learn that there will be none
        while True:
            if not endpoint.probe.is_outstanding:
                await self._sleep(self._health.probe_interval_s)
            try:
                await endpoint.probe.proves()
                await self._identify(endpoint)
            except RouterError as error:
                endpoint.trouble = str(error)
                continue
            self._answered(endpoint)
            endpoint.limit.start_slowly()
            endpoint.rows.readmitted()
            endpoint.up, endpoint.trouble = True, None
            self._up.set()
            self._on_change(endpoint.name, True, "a scoring probe succeeded")
            self._announce_room()
            return

    async def _watch_over(self, endpoint: Endpoint) -> None:
        while True:
            await self._sleep(self._health.probe_interval_s)
            idle_since = self._clock() - self._health.idle_probe_s
            if endpoint.up and endpoint.identified_at < self._clock() - self._health.identity_check_s:
                await self._look_for_another_model(endpoint)
            idle = not endpoint.outstanding and (endpoint.answered_at < idle_since or endpoint.is_doubtful)
            if endpoint.up and (idle or endpoint.rows.is_overdue):
                try:  # no ticket waits for this: it may take as long as the adapter allows
                    await (endpoint.probe.proves() if endpoint.rows.is_overdue else endpoint.probe.scores())
                except MixedUp as error:
                    self._distrust(endpoint, error)
                except RouterError as error:
                    self._failed(endpoint, str(error))
                else:
                    self._answered(endpoint)

    async def _look_for_another_model(self, endpoint: Endpoint) -> None:
        try:
            await self._identify(endpoint)
        except AnotherModel as error:
            self._open(endpoint, str(error))
        except RouterError:
            return  # whether it works at all is found out by scoring

    async def _identify(self, endpoint: Endpoint) -> None:
        """Raises AnotherModel: scores of another model must never meet this calibration's thresholds."""
        now = await endpoint.engine.identity()
        endpoint.identified_at = self._clock()
        expected = self._expected
        if (now.engine, now.model, now.tokenizer) != (expected.engine, expected.model, expected.tokenizer):
            raise AnotherModel(
                "it runs another model or tokenizer than when the worker started; restart the worker to judge it anew"
            )

    def _suspect(self, endpoint: Endpoint) -> Awaitable[bool]:
        """Whether it cannot score, found out once for all who ask meanwhile; who is cancelled leaves that to them."""
        if endpoint.suspicion is None or endpoint.suspicion.done():
            endpoint.suspicion = asyncio.create_task(self._cannot_score(endpoint))
        return asyncio.shield(endpoint.suspicion)

    async def _cannot_score(self, endpoint: Endpoint) -> bool:
        try:
            await endpoint.probe.scores_soon()
        except (EngineUnavailable, EngineDropped, InvalidAnswer) as error:
            self._open(endpoint, str(error))
            return True
        except (RequestRefused, TooLong):
            pass  # a definite no is an answer
        endpoint.drops = 0
        return False


def degraded(trouble: str | None, alarm: str | None) -> str | None:
    """One line on a pool that works, by its `trouble` and `alarm`; None where nothing is wrong."""
    out = None if trouble is None else f"engine is down: {trouble}"
    distrusted = None if alarm is None else f"engine mixes up rows: {alarm}"
    return "; ".join(each for each in (out, distrusted) if each is not None) or None
