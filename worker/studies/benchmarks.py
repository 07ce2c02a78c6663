"""What answers cost and what they are worth: choices, writing, attacks, further questions, guarantees, splits."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import orjson

from worker import wiring
from worker.adapters.choices_file import load_choices
from worker.adapters.files import SAMPLES_FILE, load_labelled, load_rule_set, write_atomically
from worker.adapters.memory import MemoryCache
from worker.adapters.writing import Way
from worker.core.canonicalisers import scored_text
from worker.core.normalise import canonical
from worker.core.policy import Calibration, NoCalibration, reason
from worker.core.ticket import Ticket
from worker.core.turns import TEMPLATES, ChatTemplate, fit_turns
from worker.errors import ConfigError, EngineError
from worker.offline.attack_corpus import load_corpus
from worker.offline.attack_trial import AttackTable, draw_attacks, try_attacks
from worker.offline.benchmark import CertifyingTime, GuaranteesTable, benchmark_calibration, benchmark_guarantees
from worker.offline.choices import ChoiceEvaluation, evaluate_choices, put_choices
from worker.offline.demo import Progress
from worker.offline.question_cost import QuestionCost, measure_question_costs
from worker.offline.splits import SplitRow, repeat_splits
from worker.offline.trial import MAX_ROWS, load_spec, prepare
from worker.offline.writing import WrittenAnswers, compare_writing
from worker.runtime.asking import Patience
from worker.runtime.question import Question
from worker.settings import Settings
from worker.studies.scored import SCORES_FILE, SEED, Start, labelled_tickets, machine, open_scorer, timestamp
from worker.telemetry import Metrics
from worker.wiring import Desk

MEASURING_DEADLINE_S = 3_600.0
"""A ticket that is given up is none that was measured."""
SPLIT_RATES = ((0.05, 0.05), (0.10, 0.10))
"""(alpha, delta) at which splits are certified."""


async def choices_command(
    settings: Settings,
    file: Path,
    style_of: Path | None,
    chat_template: ChatTemplate | None,
    at_once: int,
    ways: Sequence[Way],
    limit: int,
    start: Start,
) -> ChoiceEvaluation:
    """Multiple-choice questions, each with its own options, in the turns of a rule set's prompt or of a chat template.

    Raises ConfigError, EngineError.
    """
    choices = load_choices(file)
    rule_set = None if style_of is None else load_rule_set(style_of)
    (_, engine), *_ = wiring.make_engines(settings)
    try:
        turns = None if chat_template is None else TEMPLATES[chat_template]
        if rule_set is not None and rule_set.categories.prompt.style == "chat":
            turns = rule_set.categories.prompt.chat_turns
        try:
            turns = None if turns is None else await fit_turns(turns, engine.tokenize)
        except EngineError as error:
            raise ConfigError(f"the engine cannot be asked: {error}") from error
        asked = await put_choices(choices, turns, engine, wiring.make_sent(settings))
        writer = await wiring.make_writer(settings, engine) if ways else None
        try:
            return await evaluate_choices(
                asked,
                engine,
                at_once=at_once,
                seed=SEED,
                clock=time.perf_counter,
                sleep=asyncio.sleep,
                start=start,
                writer=writer,
                ways=ways,
                limit=limit,
            )
        finally:
            if writer is not None:
                await writer.aclose()
    finally:
        await engine.aclose()


def guarantees(draws: int, progress: Progress) -> GuaranteesTable:
    return benchmark_guarantees(draws, SEED, progress)


def certifying_times(tickets: int, categories: int, progress: Progress) -> tuple[CertifyingTime, ...]:
    """At a quarter, a half and all of the tickets: what is linear shows."""
    sizes = [tickets // 4, tickets // 2, tickets]
    return benchmark_calibration(sizes, categories, SEED, time.perf_counter, progress)


async def writing_command(
    settings: Settings, folder: Path, labelled: Path | None, part: str, count: int, start: Start
) -> tuple[WrittenAnswers, ...]:
    """The first `count` labelled tickets, scored one by one and answered in writing. Raises as the others do."""
    desk = Desk.load(folder)
    tickets = labelled_tickets(desk, labelled, part)[:count]
    async with open_scorer(settings, desk.rule_set, None, start) as scorer:
        writer = await wiring.make_writer(settings, scorer.engine)
        try:
            began = time.perf_counter()
            scored = await replace(scorer, batch_items=1).score("scoring", tickets)
            each_s = (time.perf_counter() - began) / max(1, len(tickets))
            return await compare_writing(scorer.question, writer, scored, each_s, time.perf_counter, start)
        finally:
            await writer.aclose()


def _measured_routing(
    settings: Settings, question: Question, calibration: Calibration | NoCalibration, engines: wiring.Engines
) -> wiring.Routing:
    """With a cache of its own, and without a ticket that is given up."""
    return wiring.Routing(
        settings,
        question,
        calibration,
        engines=engines,
        cache=MemoryCache(),
        secret=secrets.token_bytes(32),
        journal=wiring.make_journal(settings, Metrics()),
        patience=Patience(deadline_s=MEASURING_DEADLINE_S),
    )


def _at_once(settings: Settings) -> int:
    return wiring.EMBEDDED_IN_FLIGHT if settings.engine == "llama_cpp" else settings.max_in_flight


async def attack_command(
    settings: Settings, folder: Path, part: str, each: int, kinds: Sequence[str], every: int, start: Start
) -> AttackTable:
    """The attack corpus, or every so manyth template of it, on tickets of the rule set's own samples. Raises
    ConfigError, EngineError.
    """
    desk = Desk.load(folder)
    honest = labelled_tickets(desk, None, part)
    corpus = [template for template in load_corpus() if not kinds or template.kind in kinds][::every]
    engines = wiring.make_engines(settings)
    try:
        question = await wiring.ask_once(desk.rule_set, engines[0][1], sent=wiring.make_sent(settings))
        calibration = await wiring.calibration_for(desk, question, engines, lambda _: None)
        async with _measured_routing(settings, question, calibration, engines) as routing:
            return await try_attacks(
                routing.router,
                desk.rule_set,
                calibration,
                draw_attacks(desk.rule_set, calibration, honest, corpus, each, SEED),
                at_once=_at_once(settings),
                progress=start("attacking"),
            )
    finally:
        await wiring.close_engines(engines)


async def question_costs(
    settings: Settings, folder: Path, count: int, rounds: int, start: Start
) -> tuple[QuestionCost, ...]:
    """What each further question of a rule set adds, on its own samples. Raises ConfigError, EngineError."""
    desk = Desk.load(folder)
    samples = load_labelled(desk.folder / SAMPLES_FILE, desk.rule_set.categories.ids)[:count]
    left_out = desk.rule_set.categories.prompt.canonicalise
    tickets = [
        Ticket(t.id, canonical(t.text), language=t.language, shortened=scored_text(t.text, left_out)) for t in samples
    ]
    # Overrides would decide without asking anything.
    rules = desk.rule_set.rules.model_copy(update={"overrides": ()})
    bare = replace(desk, rule_set=desk.rule_set.model_copy(update={"rules": rules}))
    engines = wiring.make_engines(settings)
    try:
        question = await wiring.ask_once(bare.rule_set, engines[0][1], sent=wiring.make_sent(settings))
        further = await wiring.further_for(bare, question, engines, lambda _: None)
        none = NoCalibration(reason("uncalibrated", detail="this is a measurement"))
        async with _measured_routing(settings, question, none, engines) as routing:
            asked = [question, *(one for one, _ in further)]
            items = [" x", *(one.primitive.longest_prompt.item("x") for one in asked)]
            ticket, *whole = map(len, await engines[0][1].tokenize(items))
            routers = [
                (
                    "category" if number == 0 else asked[number].rule_set.id.removeprefix(f"{bare.rule_set.id}_"),
                    whole[number] - ticket,
                    routing.router_for(question, none, further[:number]),
                )
                for number in range(len(asked))
            ]
            return await measure_question_costs(
                routers,
                tickets,
                rounds=rounds,
                at_once=_at_once(settings),
                # The embedded engine works in this process: CPU time counts it alone, whoever else uses the cores.
                clock=time.process_time if settings.engine == "llama_cpp" else time.perf_counter,
                progress=start("asking"),
            )
    finally:
        await wiring.close_engines(engines)


async def splits(
    settings: Settings, name: str, data: Path, folder: Path, rows: int, sizes: Sequence[int], count: int, start: Start
) -> tuple[SplitRow, ...]:
    """A data set of somebody else's, scored once and split anew `count` times. Raises ConfigError, EngineError."""
    alpha, delta = SPLIT_RATES[-1]
    prepared = prepare(load_spec(name), data, folder, rows=min(rows, MAX_ROWS), alpha=alpha, delta=delta)
    desk = Desk.load(folder)
    async with open_scorer(settings, desk.rule_set, folder / SCORES_FILE, start) as scorer:
        scored = await scorer.score(f"{name}: scoring", [*prepared.calibration, *prepared.routing])
    return repeat_splits(
        scorer.question,
        scored,
        sizes=sizes,
        rates=SPLIT_RATES,
        splits=count,
        seed=SEED,
        created_at=timestamp(),
        progress=start(f"{name}: splits"),
    )


def write_choices(result: ChoiceEvaluation, file: Path) -> Path:
    """Figures and a row for each question, as JSON."""
    data = {"date": timestamp(), "machine": machine(), **result.to_dict()}
    write_atomically(file, orjson.dumps(data, option=orjson.OPT_INDENT_2) + b"\n")
    return file
