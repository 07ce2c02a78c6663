"""DecideServer: decisions and typed answers over HTTP; alone knows what each path answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime

import orjson
from aiohttp import web

from worker.core.http_ticket import WHAT_TO_DO
from worker.core.rules import RuleSet
from worker.core.systemone import ALIAS, Distribution, SystemOneRequest, answer, parse_request, response
from worker.errors import (
    EngineError,
    EngineUnavailable,
    InvalidQuestions,
    InvalidTicket,
    LabelError,
    Problem,
    RequestRefused,
    TooLong,
)
from worker.runtime.deciding import Decider, not_asked
from worker.runtime.endpoints import EnginePool, degraded
from worker.runtime.http import said_ready
from worker.runtime.http_edge import OWN_NAME, RETRY_S, HttpEdge, Refusal, ServeLimits
from worker.runtime.journal import Journal
from worker.runtime.listener import Listener
from worker.runtime.outputs import Outputs
from worker.runtime.router import Router
from worker.runtime.typed_questions import Crowded, Prepared, TypedQuestions

RETRY_DOWN_S = 2
SPARE_CONNECTIONS = 256
"""Beyond four for each request at once: clients keep connections open, and probes need some too."""


@dataclass(frozen=True, slots=True)
class ServeStatus:
    """The server's condition at one moment."""

    in_flight: int
    most_in_flight: int
    """Since the start."""
    answered: int
    turned_away: int
    """Told to come again since the start."""
    engine_up: bool
    engine_trouble: str | None
    engine_alarm: str | None
    """Which engines have mixed up rows and are not trusted again yet."""
    listening: bool
    """Its port is open; the health port, which tells this, opened before."""
    draining: bool

    @property
    def ready(self) -> bool:
        return self.engine_up and self.listening and not self.draining

    def why_not(self) -> str:
        if self.draining:
            return "draining"
        return "its port is not open yet" if not self.listening else f"engine is down: {self.engine_trouble}"

    def degraded(self) -> str | None:
        """What is wrong while it is ready: engines that are out beside others, or not trusted."""
        return degraded(self.engine_trouble, self.engine_alarm)

    def shown(self) -> Mapping[str, object]:
        return asdict(self)


class DecideServer:
    """`run` serves until `stop`, then finishes what is in flight."""

    def __init__(
        self,
        *,
        rule_set: RuleSet,
        router: Router,
        outputs: Outputs,
        typed: TypedQuestions,
        pool: EnginePool,
        model: str,
        limits: ServeLimits,
        token: str | None,
        journal: Journal,
        clock: Callable[[], float],
        now: Callable[[], datetime],
    ) -> None:
        """`model` is how the engine names what it runs; without a `token` everybody who can connect may ask."""
        self._decider = Decider(
            rule_set=rule_set, router=router, outputs=outputs, max_bytes=limits.max_body_bytes, clock=clock, now=now
        )
        self._typed = typed
        self._pool = pool
        self._model = model
        self._limits = limits
        self._journal = journal
        self._since = now().date().isoformat()
        self._listening = False
        self._edge = HttpEdge(limits, token, journal)
        app = web.Application(middlewares=[self._edge.around], client_max_size=limits.max_body_bytes)
        app.router.add_get("/livez", self._livez)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/decide", self._edge.post(self._decide))
        app.router.add_post("/v1/systemone", self._edge.post(self._systemone))
        self._listener = Listener(
            app,
            max_connections=4 * limits.max_requests + SPARE_CONNECTIONS,
            head_s=limits.head_s,
            setting="ROUTER_SERVE_PORT",
        )

    async def run(self, host: str, port: int) -> None:
        """Raises ConfigError where the port is taken."""
        self._journal.listening(await self._listener.start(host, port))
        self._listening = True
        try:
            await self._edge.stopping.wait()
            self._journal.stopping()
            # The port stays open: who comes now is told to go elsewhere, and /readyz says so.
            await self._edge.drained()
        finally:
            await self._listener.aclose()
            await self._typed.aclose()

    def stop(self) -> None:
        """Take no more requests, finish those in flight (at most `drain_s`)."""
        self._edge.stopping.set()

    def status(self) -> ServeStatus:
        return ServeStatus(
            in_flight=self._edge.in_flight,
            most_in_flight=self._edge.most_in_flight,
            answered=self._edge.answered,
            turned_away=self._edge.turned_away,
            engine_up=self._pool.is_up,
            engine_trouble=self._pool.trouble,
            engine_alarm=self._pool.alarm,
            listening=self._listening,
            draining=self._edge.stopping.is_set(),
        )

    # -- what is answered ------------------------------------------------------------------------------------------

    async def _livez(self, _: web.Request) -> web.Response:
        return web.Response(text="alive\n")

    async def _readyz(self, _: web.Request) -> web.Response:
        status = self.status()
        if status.ready:
            return web.Response(text=said_ready(status))
        return web.Response(status=503, text=f"not ready: {status.why_not()}\n")

    async def _models(self, request: web.Request) -> web.Response:
        self._edge.authorise(request)
        described = f"{self._model}, asked by ticket-router; uncalibrated"
        names = (ALIAS, OWN_NAME, self._model)
        models = [{"name": name, "description": described, "release_date": self._since} for name in names]
        return web.Response(body=orjson.dumps({"models": models}), content_type="application/json")

    async def _decide(self, body: bytes) -> bytes:
        try:
            decided = await self._decider.decide(body)
        except InvalidTicket as error:
            todo = WHAT_TO_DO[error.code]
            raise Refusal(400, error.code, error.detail, where="body", what_to_do=todo) from error
        except EngineUnavailable as error:
            raise _unavailable(str(error)) from error
        self._journal.decided(decided.delivery, decided.ticket, decided.envelope)
        return decided.envelope.to_bytes()

    async def _systemone(self, body: bytes) -> bytes:
        try:
            asked = parse_request(body, self._limits.max_body_bytes)
        except InvalidQuestions as error:
            raise Refusal.of(error.problems) from error
        if asked.model not in (ALIAS, OWN_NAME, self._model):
            raise Refusal(400, "api_usage_error", f"unknown model: send '{ALIAS}', or a name of GET /v1/models")
        request = object()  # equal requests are two
        asking = [asyncio.create_task(self._ask(asked, name, request)) for name in asked.questions]
        counting = asyncio.create_task(self._typed.tokens_of(asked.text))
        try:
            found = await asyncio.gather(*asking)
            text_tokens = await counting
        except EngineError as error:
            raise _unavailable(str(error)) from error
        except Crowded as error:
            self._edge.turned_away += 1
            raise Refusal(503, "busy", f"{error}: ask again", retry_after_s=RETRY_S) from error
        finally:
            for task in (*asking, counting):
                task.cancel()
        answers = {
            name: answer(question, distribution)
            for (name, question), (distribution, _) in zip(asked.questions.items(), found, strict=True)
        }
        tokens = sum(prepared.tokens + text_tokens for _, prepared in found)
        return response(self._model, answers, tokens)

    async def _ask(self, asked: SystemOneRequest, name: str, request: object) -> tuple[Distribution, Prepared]:
        """Raises Refusal, EngineError, Crowded."""
        question = asked.questions[name]
        place = ("body", "questions", name)
        try:
            prepared = await self._typed.prepared(question, request)
        except LabelError as error:
            message = f"{error}: ask with fewer options"
            raise Refusal.of([Problem((*place, "criteria"), message, "too_long")]) from error
        except TooLong as error:
            message = f"the question alone is too long for the model ({error}): shorten it"
            raise Refusal.of([Problem(place, message, "too_long")]) from error
        except RequestRefused as error:
            raise Refusal.of([Problem(place, f"the engine refuses it: {error}", "refused")]) from error
        routed = await prepared.ask(asked.text)
        if (trouble := not_asked(routed)) is not None:
            raise _unavailable(trouble)
        scores = routed.decision.scores
        if scores is None:
            why = routed.decision.reasons[0]
            if why.code in ("too_long", "engine_refused"):
                message = f"{why.sentence} Send a shorter text." if why.code == "too_long" else why.sentence
                raise Refusal.of([Problem(("body", "state"), message, why.code)])
            raise Refusal(502, why.code, why.sentence)
        if scores.unknown:
            message = f"the engine returned {len(scores.logprobs) - len(scores.unknown)} of {len(scores.logprobs)} "
            raise Refusal.of([Problem((*place, "criteria"), message + "labels: ask with fewer options", "too_long")])
        return Distribution.over(scores.logprobs, scores.mass), prepared


def _unavailable(sentence: str) -> Refusal:
    return Refusal(503, "engine_unavailable", f"{sentence} Ask again.", retry_after_s=RETRY_DOWN_S)
