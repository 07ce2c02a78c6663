"""Commands about a rule set's folder: is everything there that a worker needs, what is asked, what differs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from worker import wiring
from worker.adapters.chat_template import load_turns
from worker.adapters.kafka_topics import describe_topics
from worker.core.rules import RuleSet
from worker.core.turns import Turns
from worker.errors import ConfigError, EngineError
from worker.offline.check import (
    Finding,
    check_cache,
    check_calibration,
    check_engine,
    check_further,
    check_modes,
    check_rules,
    check_topics,
)
from worker.offline.prompt_view import PromptView, view_prompt
from worker.offline.rule_tests import RuleTestRun, run_rule_tests
from worker.offline.rules_diff import RulesDiff, diff_rules
from worker.runtime.question import Question
from worker.settings import Settings
from worker.wiring import Desk


async def check(settings: Settings, folder: Path) -> list[Finding]:
    """Everything a worker with these settings needs."""
    finding, rule_set = check_rules(folder)
    findings = [finding]
    if rule_set is None:
        return findings
    findings.append(check_modes(rule_set, settings.mode))
    try:
        config = wiring.kafka_config(settings, rule_set)
    except ConfigError as error:
        findings.append(Finding("topics", "wrong", str(error), "set it"))
    else:
        findings.append(check_topics(rule_set, config.input_topic, lambda names: describe_topics(config, names)))
    try:
        engines, sent = wiring.make_engines(settings), wiring.make_sent(settings)
    except ConfigError as error:
        findings.append(Finding("engine", "wrong", str(error)))
        findings.append(check_calibration(folder, None))
    else:
        question: Question | None = None
        further: list[Finding] = []
        for name, engine in engines:
            more, asked = await check_engine(rule_set, engine, sent)
            findings += [replace(f, part=f"{f.part} {name}") if len(engines) > 1 else f for f in more]
            if question is None and asked is not None:
                question = asked
                further = await check_further(folder, question, engine)
            await engine.aclose()
        findings.append(check_calibration(folder, question))
        findings += further
    try:
        cache = wiring.make_cache(settings, wiring.cache_secret(settings))
    except ConfigError as error:
        findings.append(Finding("cache", "wrong", str(error)))
    else:
        findings.append(await check_cache(cache if settings.redis_url is not None else None))
        await cache.aclose()
    return findings


async def prompt_view(settings: Settings, folder: Path, text: str | None) -> PromptView:
    """What the first engine is sent for this text, or for the first example. Raises ConfigError."""
    rule_set = Desk.load(folder).rule_set
    first = rule_set.categories.categories[0]
    engines = wiring.make_engines(settings)
    try:
        question = await wiring.ask_once(rule_set, engines[0][1], sent=wiring.make_sent(settings))
        return await view_prompt(question, engines[0][1], text or (*first.examples, first.description)[0])
    except EngineError as error:
        raise ConfigError(f"the engine cannot be asked: {error}") from error
    finally:
        await wiring.close_engines(engines)


def turns(file: Path) -> Turns:
    """The turns of a model's chat template. Raises PromptError, ConfigError."""
    return load_turns(file)


def rules_test(folder: Path) -> RuleTestRun:
    """The rule set's own tests. Raises ConfigError."""
    return run_rule_tests(Desk.load(folder).rule_set)


def rules_diff(old: Path, new: Path) -> RulesDiff:
    """What differs, and what expires. Raises ConfigError."""
    return diff_rules(Desk.load(old).side, Desk.load(new).side)


def load_rules(folder: Path) -> RuleSet:
    """Raises ConfigError."""
    return Desk.load(folder).rule_set
