"""A rule set's questions put to the engines that are there: prepared, checked, and read under their calibrations."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from worker.core.labels import fit_to_tokenizer
from worker.core.policy import Calibration, NoCalibration, calibration_in_force, reason
from worker.core.rules import RuleSet
from worker.core.turns import Turns
from worker.errors import ConfigError, EngineError
from worker.ports import ScoringEngine
from worker.runtime.canary import Canary, find_canaries
from worker.runtime.question import Question, check_easy_tickets, easy_tickets, prepare_further, prepare_question
from worker.runtime.sent import Sent
from worker.wiring.desk import Desk, further_question
from worker.wiring.engines import Engines, tokenizer

ENGINE_RETRY_S = 2.0


async def ask_once(
    rule_set: RuleSet, engine: ScoringEngine, further: str | None = None, sent: Sent | None = None
) -> Question:
    """Prepares the rule set's own question, or the further one of that id.

    Raises ConfigError, LabelError, and ConfigError too where there is no such question or the engine is away.
    """
    asked = None if further is None else further_question(rule_set, further)
    try:
        question = await prepare_question(rule_set, engine, sent)
        return question if asked is None else await prepare_further(question, asked, engine)
    except EngineError as error:
        raise ConfigError(f"the engine cannot be asked: {error}") from error


async def ask_until_available(
    rule_set: RuleSet, engines: Engines, waiting: Callable[[str], None], sent: Sent | None = None
) -> Question:
    """Prepares the question with the first engine that answers, for as long as they take to come up.

    Raises ConfigError, LabelError, and ConfigError where two engines do not run the same model.
    """
    while True:
        asked: list[tuple[str, Question]] = []
        troubles = []
        for name, engine in engines:
            try:
                asked.append((name, await prepare_question(rule_set, engine, sent)))
            except EngineError as error:
                troubles.append(f"{name}: {error}")
        if asked:
            name, question = asked[0]
            for other, another in asked[1:]:
                if another.fingerprints != question.fingerprints:
                    differ = ", ".join(question.fingerprints.differences(another.fingerprints))
                    raise ConfigError(f"{name} and {other} do not score alike (different: {differ}); use one model")
            return question
        waiting("; ".join(troubles))
        await asyncio.sleep(ENGINE_RETRY_S)


Calibrated = tuple[Question, Calibration | NoCalibration]
"""A question with the calibration under which its answers are read."""


async def further_for(
    desk: Desk, question: Question, engines: Engines, waiting: Callable[[str], None]
) -> tuple[Calibrated, ...]:
    """The rule set's further questions, each with its own calibration, for as long as the engines take to answer.

    Raises LabelError, PromptError.
    """
    found: list[Calibrated] = []
    wanted = desk.rule_set.questions.questions
    while len(found) < len(wanted):
        further = wanted[len(found)]
        for name, engine in engines:
            try:
                asked = await prepare_further(question, further, engine)
            except EngineError as error:
                waiting(f"{name}: {error}")
                continue
            own = Desk(desk.folder, asked.rule_set, desk.further.get(further.id))
            found.append((asked, await calibration_for(own, asked, engines, waiting)))
            break
        else:
            await asyncio.sleep(ENGINE_RETRY_S)
    return tuple(found)


async def calibration_for(
    desk: Desk, question: Question, engines: Engines, waiting: Callable[[str], None]
) -> Calibration | NoCalibration:
    """The calibration in force, if an engine passes the check on easy tickets."""
    floor = desk.rule_set.rules.gates.min_label_mass
    while True:
        for name, engine in engines:
            try:
                problem = (await check_easy_tickets(question, engine)).problem(floor)
            except EngineError as error:
                waiting(f"{name}: {error}")
                continue
            if problem is not None:
                return NoCalibration(reason("labels_untrusted", detail=problem))
            return calibration_in_force(desk.artefact, question.fingerprints)
        await asyncio.sleep(ENGINE_RETRY_S)


async def chat_turns(rule_set: RuleSet, engines: Engines, waiting: Callable[[str], None]) -> Turns | None:
    """The turns that the rule set's prompt has, None where it is one for a base model. Raises PromptError."""
    while True:
        try:
            style = (await fit_to_tokenizer(rule_set.categories, tokenizer(engines))).prompt
        except EngineError as error:
            waiting(str(error))
            await asyncio.sleep(ENGINE_RETRY_S)
        else:
            return style.chat_turns if style.style == "chat" else None


async def canaries_for(question: Question, engines: Engines, waiting: Callable[[str], None]) -> tuple[Canary, ...]:
    """Tickets with known scores, asked about alone with the first engine that answers; () where there are none."""
    texts = [text for _, text in easy_tickets(question.rule_set)]
    while True:
        for name, engine in engines:
            try:
                return await find_canaries(question.primitive, texts, engine)
            except EngineError as error:
                waiting(f"{name}: {error}")
        await asyncio.sleep(ENGINE_RETRY_S)
