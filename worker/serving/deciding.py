"""One ticket of somebody's own through all that decides in a worker, without Kafka, Redis or a server."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

from worker import wiring
from worker.adapters.llama_cpp import LICENCE_NOTICE
from worker.core.envelope import CARD_HEADER
from worker.core.rules import RuleSet
from worker.errors import ConfigError, EngineError, EngineUnavailable, InvalidTicket
from worker.offline.sending import as_ticket
from worker.runtime.asking import Patience
from worker.runtime.deciding import Decided, Decider, read_ticket
from worker.runtime.question import Question
from worker.settings import Settings
from worker.telemetry import Metrics
from worker.wiring import Desk, Routing


@dataclass(frozen=True, slots=True)
class OwnDecision:
    """A decision with what a person needs to read it."""

    rule_set: RuleSet
    decided: Decided
    card: bytes | None
    """What people would get with the ticket, as JSON; None where it is routed."""


@dataclass(frozen=True, slots=True)
class OwnTicket:
    """A ticket as it would come in, and the desk that reads it."""

    desk: Desk
    body: bytes


def model_notice(settings: Settings) -> str | None:
    """Under which terms the model of these settings may be used, where it is the packaged one."""
    return LICENCE_NOTICE if settings.engine == "llama_cpp" and settings.engine_model_path is None else None


def own_ticket(
    settings: Settings, folder: Path, parts: Mapping[str, str], metadata: Mapping[str, object] | None
) -> OwnTicket:
    """A ticket of these parts, by the names of `intake`. Raises ConfigError where the rule set is wrong, or where a
    worker would take it for no ticket; the model is not needed to say so."""
    desk = Desk.load(folder).at_most(settings.mode)
    body = as_ticket(parts, metadata, desk.rule_set)
    try:
        read_ticket(body, desk.rule_set, settings.max_ticket_bytes)
    except InvalidTicket as error:
        dead = desk.rule_set.dead_letter_topic
        raise ConfigError(f"that is no ticket ({error}): a worker would send it to {dead}") from error
    return OwnTicket(desk, body)


async def decide(settings: Settings, ticket: OwnTicket, tell: Callable[[str], None]) -> OwnDecision:
    """What a worker with these settings would publish of it. `tell` hears what is being waited for.

    Raises ConfigError where the engine cannot be asked.
    """
    # One ticket gains nothing by what workers remember, and theirs is not to be written to from here.
    local = settings.model_copy(update={"redis_url": None})
    engines, sent = wiring.make_engines(local), wiring.make_sent(local)
    try:
        tell("loading the model …" if local.engine == "llama_cpp" else "asking the engine …")
        asked = await _first_to_answer(engines)
        question = await wiring.ask_once(ticket.desk.rule_set, asked[0][1], sent=sent)
        return await _decide(local, ticket, asked, question, tell)
    except EngineUnavailable as error:
        _cannot_ask(str(error))
    finally:
        await wiring.close_engines(engines)


async def _first_to_answer(engines: wiring.Engines) -> wiring.Engines:
    """The one that the ticket is put to, since all run the same model; the last where none answers, to say why."""
    for number, (_, engine) in enumerate(engines):
        try:
            await engine.probe()
        except EngineError:
            continue
        return engines[number : number + 1]
    return engines[-1:]


async def _decide(
    settings: Settings,
    ticket: OwnTicket,
    engines: wiring.Engines,
    question: Question,
    tell: Callable[[str], None],
) -> OwnDecision:
    secret = wiring.cache_secret(settings)
    cache = wiring.make_cache(settings, secret)
    try:
        tell("checking the model on easy tickets …")
        calibration = await wiring.calibration_for(ticket.desk, question, engines, _cannot_ask)
        further = await wiring.further_for(ticket.desk, question, engines, _cannot_ask)
        tell("deciding …")
        async with Routing(
            settings,
            question,
            calibration,
            further=further,
            engines=engines,
            cache=cache,
            secret=secret,
            journal=wiring.make_journal(settings, Metrics()),
            patience=Patience(
                attempts=settings.engine_attempts,
                deadline_s=settings.ticket_deadline_s,
                on_engine_down="escalate",  # somebody waits for the answer: "ask again" is one, silence is none
                max_wait_s=0.0,
            ),
        ) as routing:
            decider = Decider(
                rule_set=question.rule_set,
                router=routing.router,
                outputs=routing.outputs,
                max_bytes=settings.max_ticket_bytes,
                clock=time.monotonic,
                now=lambda: datetime.now(UTC),
            )
            decided = await decider.decide(ticket.body)
            to_its_topic, *_ = decider.messages(decided)
            return OwnDecision(question.rule_set, decided, dict(to_its_topic.headers).get(CARD_HEADER))
    finally:
        await cache.aclose()


def _cannot_ask(what: str) -> NoReturn:
    raise ConfigError(f"the engine cannot be asked: {what}")
