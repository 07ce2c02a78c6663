"""Commands that study: calibrate, evaluate, self-test, benchmarks, demo and trials; they need the offline or embedded
extras.
"""

from __future__ import annotations

import asyncio
import os
import platform
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import orjson

from worker import wiring
from worker.adapters.choices_file import load_choices
from worker.adapters.decision_log import read_decision_lines
from worker.adapters.embedded import EmbeddedBroker, EmbeddedCache
from worker.adapters.files import (
    CALIBRATION_FILE,
    SAMPLES_FILE,
    Labelled,
    calibration_file,
    load_labelled,
    load_rule_set,
    write_atomically,
)
from worker.adapters.llama_cpp import LICENCE_NOTICE
from worker.adapters.memory import MemoryCache
from worker.adapters.writing import Way
from worker.core.artefact import Artefact
from worker.core.canonicalisers import scored_text
from worker.core.normalise import canonical
from worker.core.policy import NoCalibration, reason
from worker.core.rules import RuleSet
from worker.core.ticket import Ticket
from worker.core.turns import TEMPLATES, ChatTemplate, fit_turns
from worker.errors import ConfigError, EngineError
from worker.offline.attack_corpus import load_corpus
from worker.offline.attack_trial import AttackTable, draw_attacks, try_attacks
from worker.offline.backtest import Backtest, backtest
from worker.offline.backtest_report import backtest_report, limits
from worker.offline.benchmark import CertifyingTime, GuaranteesTable, benchmark_calibration, benchmark_guarantees
from worker.offline.calibration_run import (
    CalibrateOptions,
    CalibrationRun,
    Scorer,
    require_labels_of_each,
    run_calibration,
)
from worker.offline.choices import ChoiceEvaluation, evaluate_choices, put_choices
from worker.offline.demo import DeskResult, Progress, in_calibration_part, run_desk, summarise
from worker.offline.demo_summary import DemoSummary
from worker.offline.evaluate import Evaluation, evaluate
from worker.offline.labelling import Labelling, as_csv, label, read_texts
from worker.offline.prior import match_history
from worker.offline.question_cost import QuestionCost, measure_question_costs
from worker.offline.report import Report, calibration_report, demo_report, evaluation_report, selftest_report
from worker.offline.rules_diff import Side
from worker.offline.selftest import SelfTest, selftest
from worker.offline.splits import SplitRow, repeat_splits
from worker.offline.traffic import load_shares, load_unlabelled
from worker.offline.trial import MAX_ROWS, Trial, labelled_csv, load_spec, prepare
from worker.offline.writing import WrittenAnswers, compare_writing
from worker.runtime.asking import Patience
from worker.runtime.loop import Worker
from worker.settings import Settings
from worker.telemetry import Metrics, NoTracing
from worker.wiring import Assembly, Desk

SEED = 20261130
"""Of everything that is drawn in calibration; any number would do, but always the same one."""
MEASURING_DEADLINE_S = 3_600.0
"""A ticket that is given up is none that was measured."""
DEMO_SETS = ("helpdesk", "civil_complaints")
SCORES_FILE = "scores.jsonl"
"""The journal of a trial, beside its rule set."""
SPLIT_RATES = ((0.05, 0.05), (0.10, 0.10))
"""(alpha, delta) at which splits are certified."""
DEMO_SESSION_MS = 6_000
"""librdkafka's mock cluster assigns nothing with less (2.16)."""

Start = Callable[[str], Progress]
"""Makes a progress bar of that name, and gives the function that moves it."""


@asynccontextmanager
async def _scorer(
    settings: Settings, rule_set: RuleSet, journal: Path | None, start: Start, question_id: str | None = None
) -> AsyncIterator[Scorer]:
    """A rule set's own question, or a further one, put to the first engine of the settings."""
    (_, engine), *_ = wiring.make_engines(settings)
    items = wiring.batch_items(settings)  # where there are no batches, a progress bar loses by them
    try:
        question = await wiring.ask_once(rule_set, engine, question_id, wiring.make_sent(settings))
        yield Scorer(question, engine, journal, items, start, asyncio.sleep)
    finally:
        await engine.aclose()


def _labelled(desk: Desk, file: Path | None, part: str, question_id: str | None = None) -> tuple[Labelled, ...]:
    """Raises ConfigError, also where there is no such question."""
    answers = desk.rule_set.categories.ids
    if question_id is not None:
        answers = tuple(option.id for option in desk.question(question_id).options)
    tickets = load_labelled(file or desk.folder / SAMPLES_FILE, answers, question_id)
    if part == "all":
        return tickets
    return tuple(t for t in tickets if in_calibration_part(t.id) == (part == "calibration"))


async def calibrate_command(
    settings: Settings,
    folder: Path,
    labelled: Path | None,
    part: str,
    unlabelled: Path | None,
    options: CalibrateOptions,
    journal: Path | None,
    start: Start,
    question_id: str | None = None,
) -> CalibrationRun:
    """Score the tickets (or read them from the journal), fit and certify. Raises ConfigError, EngineError."""
    desk = Desk.load(folder)
    tickets = _labelled(desk, labelled, part, question_id)
    if question_id is not None:
        require_labels_of_each(tickets, [option.id for option in desk.question(question_id).options])
    traffic = load_unlabelled(unlabelled) if unlabelled else ()
    async with _scorer(settings, desk.rule_set, journal, start, question_id) as scorer:
        return await run_calibration(scorer, tickets, traffic, options, seed=SEED, created_at=_now())


async def history_command(
    settings: Settings, folder: Path, shares: Path, unlabelled: Path, replace: bool, journal: Path | None, start: Start
) -> Artefact:
    """Probabilities for a desk without labels. Raises ConfigError, EngineError."""
    desk = Desk.load(folder)
    if not replace and desk.artefact is not None and any(c.certified for c in desk.artefact.certificates):
        raise ConfigError(
            f"{folder / CALIBRATION_FILE} has certificates, and historical shares certify nothing: every ticket would "
            "go to people; add --write to replace it"
        )
    history, traffic = load_shares(shares), load_unlabelled(unlabelled)
    async with _scorer(settings, desk.rule_set, journal, start) as scorer:
        scored = await scorer.score("unlabelled tickets", traffic)
    return match_history(scorer.question, scored, history, created_at=_now())


async def evaluate_command(
    settings: Settings,
    folder: Path,
    labelled: Path | None,
    part: str,
    journal: Path | None,
    start: Start,
    question_id: str | None = None,
) -> Evaluation:
    """Held-out tickets against an artefact of the rule set. Raises ConfigError, EngineError."""
    desk = Desk.load(folder)
    artefact = desk.artefact if question_id is None else desk.further[desk.question(question_id).id]
    if artefact is None:
        path = folder / calibration_file(question_id)
        raise ConfigError(f"{path}: no calibration to evaluate; run `ticket-router calibrate`")
    tickets = _labelled(desk, labelled, part, question_id)
    async with _scorer(settings, desk.rule_set, journal, start, question_id) as scorer:
        scored = await scorer.score("labelled tickets", tickets)
    return evaluate(scorer.question, artefact, scored, seed=SEED)


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


async def selftest_command(
    settings: Settings,
    folder: Path,
    labelled: Path | None,
    unlabelled: Path | None,
    repeat: int,
    orders: int,
    start: Start,
    question_id: str | None = None,
) -> SelfTest:
    """Is this engine usable for this rule set? Raises ConfigError, EngineError."""
    desk = Desk.load(folder)
    tickets = load_unlabelled(unlabelled) if unlabelled else _labelled(desk, labelled, "all", question_id)
    async with _scorer(settings, desk.rule_set, None, start, question_id) as scorer:
        return await selftest(
            scorer.question,
            scorer.engine,
            tickets,
            repeat=repeat,
            orders=orders,
            batch_items=scorer.batch_items,
            progress=start("self-test"),
            sleep=asyncio.sleep,
        )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def today() -> str:
    return _now()[:10]


def machine() -> str:
    """What a number was measured on."""
    return f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"


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
    tickets = _labelled(desk, labelled, part)[:count]
    async with _scorer(settings, desk.rule_set, None, start) as scorer:
        writer = await wiring.make_writer(settings, scorer.engine)
        try:
            began = time.perf_counter()
            scored = await replace(scorer, batch_items=1).score("scoring", tickets)
            each_s = (time.perf_counter() - began) / max(1, len(tickets))
            return await compare_writing(scorer.question, writer, scored, each_s, time.perf_counter, start)
        finally:
            await writer.aclose()


async def attack_command(
    settings: Settings, folder: Path, part: str, each: int, kinds: Sequence[str], every: int, start: Start
) -> AttackTable:
    """The attack corpus, or every so manyth template of it, on tickets of the rule set's own samples. Raises
    ConfigError, EngineError.
    """
    desk = Desk.load(folder)
    honest = _labelled(desk, None, part)
    corpus = [template for template in load_corpus() if not kinds or template.kind in kinds][::every]
    engines = wiring.make_engines(settings)
    try:
        question = await wiring.ask_once(desk.rule_set, engines[0][1], sent=wiring.make_sent(settings))
        calibration = await wiring.calibration_for(desk, question, engines, lambda _: None)
        async with wiring.Routing(
            settings,
            question,
            calibration,
            engines=engines,
            cache=MemoryCache(),
            secret=secrets.token_bytes(32),
            journal=wiring.make_journal(settings, Metrics()),
            patience=Patience(deadline_s=MEASURING_DEADLINE_S),
        ) as routing:
            return await try_attacks(
                routing.router,
                desk.rule_set,
                calibration,
                draw_attacks(desk.rule_set, calibration, honest, corpus, each, SEED),
                at_once=wiring.EMBEDDED_IN_FLIGHT if settings.engine == "llama_cpp" else settings.max_in_flight,
                progress=start("attacking"),
            )
    finally:
        for _, engine in engines:
            await engine.aclose()


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
        async with wiring.Routing(
            settings,
            question,
            none,
            engines=engines,
            cache=MemoryCache(),
            secret=secrets.token_bytes(32),
            journal=wiring.make_journal(settings, Metrics()),
            patience=Patience(deadline_s=MEASURING_DEADLINE_S),
        ) as routing:
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
                at_once=wiring.EMBEDDED_IN_FLIGHT if settings.engine == "llama_cpp" else settings.max_in_flight,
                # The embedded engine works in this process: CPU time counts it alone, whoever else uses the cores.
                clock=time.process_time if settings.engine == "llama_cpp" else time.perf_counter,
                progress=start("asking"),
            )
    finally:
        for _, engine in engines:
            await engine.aclose()


async def splits(
    settings: Settings, name: str, data: Path, folder: Path, rows: int, sizes: Sequence[int], count: int, start: Start
) -> tuple[SplitRow, ...]:
    """A data set of somebody else's, scored once and split anew `count` times. Raises ConfigError, EngineError."""
    alpha, delta = SPLIT_RATES[-1]
    prepared = prepare(load_spec(name), data, folder, rows=min(rows, MAX_ROWS), alpha=alpha, delta=delta)
    desk = Desk.load(folder)
    async with _scorer(settings, desk.rule_set, folder / SCORES_FILE, start) as scorer:
        scored = await scorer.score(f"{name}: scoring", [*prepared.calibration, *prepared.routing])
    return repeat_splits(
        scorer.question,
        scored,
        sizes=sizes,
        rates=SPLIT_RATES,
        splits=count,
        seed=SEED,
        created_at=_now(),
        progress=start(f"{name}: splits"),
    )


def write_artefact(artefact: Artefact, folder: Path, question_id: str | None = None) -> Path:
    """calibration.json of the rule set, or that of one of its further questions."""
    path = folder / calibration_file(question_id)
    write_atomically(path, artefact.to_bytes())
    return path


def write_report(report: Report, folder: Path) -> Path:
    """report.html with its figures beside it as PNG."""
    for figure in report.figures:
        write_atomically(folder / f"{figure.name}.png", figure.png)
    path = folder / "report.html"
    write_atomically(path, report.html.encode())
    return path


def backtest_command(log: Path, new: Path, old: Path | None, progress: Progress) -> Backtest:
    """Recorded decisions again under the rules in `new`; no engine is asked. Raises ConfigError."""
    return backtest(read_decision_lines(log, progress), _side(new), None if old is None else _side(old))


def labels_command(
    folder: Path, answers: Path, log: Path, tickets: Path, to: Path, include: Sequence[str], progress: Progress
) -> Labelling:
    """Writes the labelled file that people's answers make. Raises ConfigError; then nothing is written."""
    for read in (answers, log, tickets):
        if to.exists() and read.exists() and to.samefile(read):
            raise ConfigError(f"{to}: is read from, and would be written over: name another file as --out")
    rule_set = load_rule_set(folder)
    found = label(rule_set, answers, read_decision_lines(log, progress), read_texts(tickets), include)
    write_atomically(to, as_csv(found))
    return found


def backtest_limits(result: Backtest) -> tuple[str, ...]:
    """What was refused or kept, and what a log cannot tell."""
    return limits(result)


def _side(folder: Path) -> Side:
    desk = Desk.load(folder)
    return Side(desk.rule_set, desk.artefact, desk.further)


def write_backtest_report(result: Backtest, folder: Path) -> Path:
    """The page, and everything in it as backtest.json."""
    write_atomically(folder / "backtest.json", orjson.dumps(result.to_dict(), option=orjson.OPT_INDENT_2) + b"\n")
    return write_report(backtest_report(result), folder)


def write_choices(result: ChoiceEvaluation, file: Path) -> Path:
    """Figures and a row for each question, as JSON."""
    data = {"date": _now(), "machine": machine(), **result.to_dict()}
    write_atomically(file, orjson.dumps(data, option=orjson.OPT_INDENT_2) + b"\n")
    return file


def write_calibration_report(run: CalibrationRun, folder: Path) -> Path:
    return write_report(calibration_report(run.result, run.selftest), folder)


def write_evaluation_report(result: Evaluation, folder: Path) -> Path:
    return write_report(evaluation_report(result), folder)


def write_selftest_report(result: SelfTest, folder: Path) -> Path:
    return write_report(selftest_report(result), folder)


def write_demo_report(summary: DemoSummary, folder: Path) -> Path:
    return write_report(demo_report(summary), folder)


# -- demo and trials -----------------------------------------------------------------------------------------------


def licence_notice() -> str:
    return LICENCE_NOTICE


async def demo(
    settings: Settings, rule_sets: Path, count: int, start: Start
) -> tuple[tuple[DeskResult, ...], DemoSummary]:
    """Both rule sets' demo parts through an embedded broker, cache and model, twice."""
    began = time.monotonic()
    results = []
    with EmbeddedBroker() as broker, EmbeddedCache() as cache:
        local = _embedded(settings, broker.bootstrap_servers, cache.url)
        engines = wiring.make_engines(local)
        try:
            for name in DEMO_SETS:
                desk = Desk.load(rule_sets / name)
                _create_topics(broker, desk)
                samples = load_labelled(desk.folder / SAMPLES_FILE, desk.rule_set.categories.ids)
                tickets = [t for t in samples if not in_calibration_part(t.id)][:count]
                results.append(await _route(local, desk, engines, tickets, passes=2, progress=start(name)))
        finally:
            for _, engine in engines:
                await engine.aclose()
    summary = summarise(
        results,
        created_at=_now(),
        hardware=machine(),
        seconds=time.monotonic() - began,
    )
    return tuple(results), summary


async def trial(
    settings: Settings, name: str, data: Path, folder: Path, rows: int, alpha: float, delta: float, start: Start
) -> tuple[Trial, CalibrationRun, DeskResult]:
    """A data set of somebody else's: calibrate on one part, route the other through Kafka. Raises ConfigError."""
    prepared = prepare(load_spec(name), data, folder, rows=min(rows, MAX_ROWS), alpha=alpha, delta=delta)
    labelled = folder / "calibration.csv"
    write_atomically(labelled, labelled_csv(prepared.calibration))
    local = settings.model_copy(update={"engine": "llama_cpp"})
    calibrated = await calibrate_command(
        local, folder, labelled, "all", None, CalibrateOptions(), folder / SCORES_FILE, start
    )
    write_artefact(calibrated.result.artefact, folder)
    with EmbeddedBroker() as broker, EmbeddedCache() as cache:
        local = _embedded(settings, broker.bootstrap_servers, cache.url)
        engines = wiring.make_engines(local)
        try:
            desk = Desk.load(folder)
            _create_topics(broker, desk)
            bar = start(f"{name}: routing")
            routed = await _route(local, desk, engines, prepared.routing, passes=1, progress=bar)
        finally:
            for _, engine in engines:
                await engine.aclose()
    return prepared, calibrated, routed


def _embedded(settings: Settings, bootstrap_servers: str, redis_url: str | None) -> Settings:
    """These settings on the embedded parts; checked again as any others."""
    return Settings(
        **settings.model_dump(exclude={"kafka_properties", "redis_url", "cache_secret", "engine_api_key"})
        | {
            "kafka_bootstrap_servers": bootstrap_servers,
            "delivery": "at_least_once",
            "kafka_assignment_strategy": "range",
            "kafka_session_timeout_ms": DEMO_SESSION_MS,
            "redis_url": redis_url,
            "cache_secret": secrets.token_hex(32),
            "engine": "llama_cpp",
            "max_in_flight": 4,  # the engine scores one after the other: more would only lengthen the latencies shown
            "settle_interval_ms": 50,
        }
    )


def _create_topics(broker: EmbeddedBroker, desk: Desk) -> None:
    for name in (desk.rule_set.input_topic, *desk.rule_set.output_topics):
        broker.create_topic(name)


async def _route(
    settings: Settings,
    desk: Desk,
    engines: wiring.Engines,
    tickets: Sequence[Labelled],
    *,
    passes: int,
    progress: Progress,
) -> DeskResult:
    secret = wiring.cache_secret(settings)
    cache = wiring.make_cache(settings, secret)

    @asynccontextmanager
    async def open_worker() -> AsyncIterator[Worker]:
        question = await wiring.ask_once(desk.rule_set, engines[0][1], sent=wiring.make_sent(settings))
        calibration = await wiring.calibration_for(desk, question, engines, lambda _: None)
        async with Assembly(
            settings,
            question,
            calibration,
            further=await wiring.further_for(desk, question, engines, lambda _: None),
            engines=engines,
            cache=cache,
            stream=wiring.make_stream(settings, desk.rule_set),
            secret=secret,
            journal=wiring.make_journal(settings, Metrics()),
            tracing=NoTracing(),
        ) as assembly:
            yield assembly.worker

    try:
        return await run_desk(
            desk.rule_set,
            desk.artefact,
            tickets,
            bootstrap_servers=str(settings.kafka_bootstrap_servers),
            open_worker=open_worker,
            passes=passes,
            progress=progress,
        )
    finally:
        await cache.aclose()
