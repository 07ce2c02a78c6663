"""Check: everything a worker needs, one finding each, with what to do where something is wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from worker.adapters.files import CALIBRATION_FILE, load_artefact, load_rule_set
from worker.core.policy import NoCalibration, calibration_in_force, decide_override
from worker.core.rules import RuleSet
from worker.errors import ArtefactError, ConfigError, EngineError, LabelError, RouterError
from worker.ports import ScoreCache, ScoringEngine
from worker.runtime.question import Question, check_easy_tickets, prepare_question


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the check. A `warning` lets the worker run, though perhaps without routing anything."""

    part: str
    state: Literal["ok", "warning", "wrong"]
    what: str
    todo: str = ""


def check_rules(folder: Path) -> tuple[Finding, RuleSet | None]:
    """Rule set files."""
    try:
        rules = load_rule_set(folder)
    except ConfigError as error:
        return Finding("rules", "wrong", str(error)), None
    failed = failing_tests(rules)
    if failed:
        return Finding("rules", "wrong", f"{folder}: {'; '.join(failed)}", "mend the override or its test"), rules
    promise = f"alpha {rules.rules.alpha:.3g}, delta {rules.rules.delta:.3g}"
    return Finding("rules", "ok", f"{rules.id}: {len(rules.categories.categories)} categories, {promise}"), rules


def failing_tests(rules: RuleSet) -> list[str]:
    """The rule set's own tests that do not come out as they say, a sentence each."""
    tests = [test for rule in rules.rules.overrides for test in rule.tests] + list(rules.rules.tests)
    failed = []
    for test in tests:
        decision = decide_override(test.ticket(), rules)
        found = ("score", None) if decision is None else (decision.action, decision.category)
        if found != (test.expect.action, test.expect.category):
            wanted, got = _words(test.expect.action, test.expect.category), _words(*found)
            failed.append(f"test '{test.name}': expected {wanted}, got {got}")
    return failed


def _words(action: str, category: str | None) -> str:
    return action if category is None else f"{action} to {category}"


def check_topics(rules: RuleSet, input_topic: str, lookup: Callable[[Sequence[str]], Mapping[str, int]]) -> Finding:
    """`lookup` gives the partitions of those topics that exist. It raises ConfigError where no broker answers."""
    names = (input_topic, *rules.output_topics)
    try:
        found = lookup(names)
    except RouterError as error:
        return Finding(
            "topics", "wrong", str(error), "check ROUTER_KAFKA_BOOTSTRAP_SERVERS and ROUTER_KAFKA_PROPERTIES"
        )
    missing = [name for name in names if name not in found]
    if missing:
        todo = "create them (`ticket-router topics --create --rules ...`)"
        return Finding("topics", "wrong", f"missing: {', '.join(missing)}", todo)
    return Finding("topics", "ok", f"{input_topic} with {found[input_topic]} partitions, {len(names) - 1} outputs")


async def check_engine(rules: RuleSet, engine: ScoringEngine) -> tuple[list[Finding], Question | None]:
    """Engine, labels behind the real prompt, label mass on easy tickets."""
    try:
        identity = await engine.identity()
    except (EngineError, ConfigError) as error:
        return [Finding("engine", "wrong", str(error), "check ROUTER_ENGINE and ROUTER_ENGINE_URL")], None
    known = f"{identity.engine}, model {identity.model}, {identity.context_tokens} tokens"
    findings = [Finding("engine", "ok", known)]
    findings += [Finding("engine", "warning", note) for note in identity.notes]
    try:
        question = await prepare_question(rules, engine)
    except LabelError as error:
        findings.append(Finding("labels", "wrong", str(error), "choose other label words in categories.yaml"))
        return findings, None
    words = question.primitive.labels.words
    findings.append(Finding("labels", "ok", f"{len(words)} single tokens behind the prompt: {', '.join(words[:12])}"))
    try:
        easy = await check_easy_tickets(question, engine)
    except EngineError as error:
        findings.append(Finding("scoring", "wrong", str(error), "look at the engine's log"))
        return findings, None
    problem = easy.problem(rules.rules.gates.min_label_mass)
    if problem is not None:
        findings.append(Finding("scoring", "wrong", problem, "choose the prompt style that fits the model"))
        return findings, question
    shown = f"{easy.right} of {len(easy.masses)} easy tickets right, median label mass {easy.median_mass:.3f}"
    findings.append(Finding("scoring", "ok", shown))
    return findings, question


def check_calibration(folder: Path, question: Question | None) -> Finding:
    """The artefact: present, unedited, and fitted on what runs now."""
    path = folder / CALIBRATION_FILE
    todo = f"run `ticket-router calibrate --rules {folder} --labelled FILE`"
    try:
        artefact = load_artefact(path)
    except ArtefactError as error:
        return Finding("calibration", "wrong", str(error), todo)
    if artefact is None:
        return Finding("calibration", "warning", f"no {path}: every ticket goes to people", todo)
    if question is None:
        return Finding("calibration", "warning", "not compared, since the engine could not be asked")
    state = calibration_in_force(artefact, question.fingerprints)
    if isinstance(state, NoCalibration):
        return Finding("calibration", "warning", f"{state.reason.sentence} Every ticket goes to people.", todo)
    certified = [member for c in artefact.certificates if c.certified for member in c.members]
    if not certified:
        return Finding(
            "calibration", "warning", "nothing is certified: every ticket goes to people", "label more tickets"
        )
    return Finding("calibration", "ok", f"certified: {', '.join(certified)} (fitted {artefact.created_at})")


async def check_cache(cache: ScoreCache | None) -> Finding:
    """None stands for a worker without Redis."""
    if cache is None:
        return Finding("cache", "ok", "no ROUTER_REDIS_URL: each worker remembers by itself")
    problem = await cache.probe()
    if problem is not None:
        return Finding("cache", "warning", f"{problem}; tickets are scored again each time", "check ROUTER_REDIS_URL")
    return Finding("cache", "ok", "Redis answers")
