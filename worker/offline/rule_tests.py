"""Rule tests: every test that a rule set carries, run against its own rules; no engine, no broker."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from worker.core.answers import failed_test
from worker.core.rule_kinds import RuleTest
from worker.core.rules import RuleSet


@dataclass(frozen=True, slots=True)
class RuleTestResult:
    """One test. `rule` is whose it is, None for those of all rules together; `failure` a sentence, None where held."""

    rule: str | None
    name: str
    failure: str | None


@dataclass(frozen=True, slots=True)
class RuleTestRun:
    """What came of the tests of one rule set, in the order in which they stand."""

    rule_set: str
    results: tuple[RuleTestResult, ...]
    untested: tuple[str, ...]
    """Rules that carry no test."""

    @property
    def failed(self) -> tuple[RuleTestResult, ...]:
        return tuple(result for result in self.results if result.failure is not None)


def run_rule_tests(rule_set: RuleSet) -> RuleTestRun:
    """Overrides and rules over answers, each against the whole set: an earlier rule may take a later one's ticket."""
    results = tuple(RuleTestResult(rule, test.name, failed_test(test, rule_set)) for rule, test in _tests_of(rule_set))
    rules = (*rule_set.rules.overrides, *rule_set.rules.answers)
    return RuleTestRun(rule_set.id, results, tuple(rule.name for rule in rules if not rule.tests))


def _tests_of(rule_set: RuleSet) -> Iterator[tuple[str | None, RuleTest]]:
    for rule in (*rule_set.rules.overrides, *rule_set.rules.answers):
        yield from ((rule.name, test) for test in rule.tests)
    yield from ((None, test) for test in rule_set.rules.tests)
