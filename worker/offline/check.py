"""Check: everything a worker needs, one finding each, with what to do where something is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from worker.adapters.files import calibration_file, load_artefact, load_rule_set
from worker.core.answers import failed_test
from worker.core.modes import MODES, Mode
from worker.core.policy import NoCalibration, calibration_in_force, why_never
from worker.core.rules import RuleSet
from worker.errors import ArtefactError, ConfigError, EngineError, LabelError, PromptError, RouterError
from worker.ports import ScoreCache, ScoringEngine
from worker.runtime.question import (
    Question,
    check_easy_tickets,
    prepare_further,
    prepare_question,
    served_template_problem,
)
from worker.runtime.sent import Sent

NAMED = 8
"""Categories of one mode that a finding names."""

LABELS_TODO = (
    "every label is tokenized behind the prompt: look at the engine's log and load, then have fewer categories in one "
    "question, or more departments (docs/questions.md)"
)

_TODO_GATE = "run `ticket-router selftest`: the engine changes its mind when asked again (docs/engines.md)"


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


def check_modes(rules: RuleSet, brake: Mode) -> Finding:
    """Which categories are in which mode, `brake` being the operator's: the strictest first."""
    held = rules.at_most(brake)
    by_mode = {mode: [c.id for c in rules.categories.routable if held.mode_of(c.id) == mode] for mode in MODES}
    said = "; ".join(f"{mode}: {_some(names)}" for mode, names in by_mode.items() if names)
    lifted = [c.id for c in rules.categories.routable if held.mode_of(c.id) != rules.mode_of(c.id)]
    if lifted:
        what = f"{said} (held back by ROUTER_MODE={brake}: {_some(lifted)})"
        return Finding("modes", "warning", what, "unset ROUTER_MODE to let the rule set decide")
    return Finding("modes", "ok", said)


def _some(names: Sequence[str]) -> str:
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")


def failing_tests(rules: RuleSet) -> list[str]:
    """The rule set's own tests that do not come out as they say, a sentence each."""
    all_rules = (*rules.rules.overrides, *rules.rules.answers)
    tests = [test for rule in all_rules for test in rule.tests] + list(rules.rules.tests)
    return [failed for test in tests if (failed := failed_test(test, rules)) is not None]


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


async def check_engine(
    rules: RuleSet, engine: ScoringEngine, sent: Sent | None = None
) -> tuple[list[Finding], Question | None]:
    """Engine, labels behind the real prompt, label mass on easy tickets."""
    try:
        identity = await engine.identity()
    except (EngineError, ConfigError) as error:
        return [Finding("engine", "wrong", str(error), "check ROUTER_ENGINE and ROUTER_ENGINE_URL")], None
    known = f"{identity.engine}, model {identity.model}, {identity.context_tokens} tokens"
    findings = [Finding("engine", "ok", known)]
    findings += [Finding("engine", "warning", note) for note in identity.notes]
    try:
        question = await prepare_question(rules, engine, sent)
    except LabelError as error:
        findings.append(Finding("labels", "wrong", str(error), "choose other label words in categories.yaml"))
        return findings, None
    except PromptError as error:
        findings.append(Finding("prompt", "wrong", str(error), "change prompt or examples in categories.yaml"))
        return findings, None
    except ConfigError as error:
        findings.append(Finding("tokenizer", "wrong", str(error), "set ROUTER_TOKENIZER_FILE to the model's own"))
        return findings, None
    except EngineError as error:
        findings.append(Finding("labels", "wrong", str(error), LABELS_TODO))
        return findings, None
    if question.sent.tokenizer is not None:
        sent_as = "token ids" if question.sent.as_ids else "text without control tokens"
        findings.append(Finding("tokenizer", "ok", f"the engine's own is here too: tickets are sent as {sent_as}"))
    words = question.primitive.labels.words
    findings.append(Finding("labels", "ok", f"{len(words)} single tokens behind the prompt: {', '.join(words[:12])}"))
    try:
        if problem := await served_template_problem(rules, engine):
            findings.append(Finding("prompt", "warning", problem))
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
    if easy.partial:
        missing = f"on {easy.partial} of {len(easy.masses)} easy tickets the engine does not return every label"
        todo = "nothing can be calibrated: let the server return more, or ask about fewer categories (docs/engines.md)"
        findings.append(Finding("scoring", "warning", missing, todo))
    return findings, question


async def check_further(folder: Path, question: Question, engine: ScoringEngine) -> list[Finding]:
    """The further questions of the rule set whose own is `question`: labels, label mass, calibration; a line each."""
    findings = []
    for further in question.rule_set.questions.questions:
        part = f"question {further.id}"
        try:
            asked = await prepare_further(question, further, engine)
            easy = await check_easy_tickets(asked, engine)
        except (EngineError, ConfigError) as error:
            findings.append(Finding(part, "wrong", str(error), "change it in questions.yaml"))
            continue
        words = ", ".join(asked.primitive.labels.words)
        problem = easy.problem(question.rule_set.rules.gates.min_label_mass)
        if problem is not None:
            todo = "rules take it as unknown: change what is asked in questions.yaml, or the model"
            findings.append(Finding(part, "warning", f"labels {words}; {problem}", todo))
            continue
        findings.append(_of_question(folder, further.id, asked, words))
    return findings


def _of_question(folder: Path, question_id: str, asked: Question, words: str) -> Finding:
    part, path = f"question {question_id}", folder / calibration_file(question_id)
    todo = f"run `ticket-router calibrate --rules {folder} --question {question_id} --labelled FILE`"
    try:
        state = calibration_in_force(load_artefact(path), asked.fingerprints)
    except ArtefactError as error:
        return Finding(part, "wrong", str(error), todo)
    if isinstance(state, NoCalibration):
        return Finding(part, "warning", f"labels {words}; rules take it as unknown. {state.reason.sentence}", todo)
    return Finding(part, "ok", f"labels {words}; calibrated {state.artefact.created_at}")


def check_calibration(folder: Path, question: Question | None) -> Finding:
    """The artefact: present, unedited, and fitted on what runs now."""
    path = folder / calibration_file()
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
    gate = artefact.margin_gate
    if gate is not None and not gate.passes(math.inf):
        what = f"certified: {_some(certified)}; but no ticket passes the stability gate ({gate.summary()})"
        return Finding("calibration", "warning", f"{what}: every ticket goes to people", _TODO_GATE)
    # A certificate states what was shown; whether that suffices, the rules of today say.
    never = {c: why for c in certified if (why := why_never(c, question.rule_set, state)) is not None}
    routing = [c for c in certified if c not in never]
    said = f"certified: {_some(routing)} (fitted {artefact.created_at})" if routing else "every ticket goes to people"
    if never:
        reasons = f"{_some([*never])}. {next(iter(never.values())).sentence}"
        what = f"{said}; certified, and never routed under the rules as they are: {reasons}"
        return Finding("calibration", "warning", what, f"{todo}, or demand less in rules.yaml: alpha, delta, target")
    return Finding("calibration", "ok", said)


async def check_cache(cache: ScoreCache | None) -> Finding:
    """None stands for a worker without Redis."""
    if cache is None:
        return Finding("cache", "ok", "no ROUTER_REDIS_URL: each worker remembers by itself")
    problem = await cache.probe()
    if problem is not None:
        return Finding("cache", "warning", f"{problem}; tickets are scored again each time", "check ROUTER_REDIS_URL")
    return Finding("cache", "ok", "Redis answers")
