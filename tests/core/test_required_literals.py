"""Required literals: what a pattern matches holds them, so leaving out a search that they rule out changes nothing."""

from __future__ import annotations

import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from worker.core.required_literals import required_literals
from worker.core.suspicion import Flagger

FLAGGER = Flagger(["billing", "login", "민원"], ["Answer:", "Ticket:"])
PATTERNS = [each.pattern.pattern for each in (*FLAGGER._whole, *FLAGGER._onwards)]


@pytest.mark.parametrize(
    ("pattern", "clauses"),
    [
        ("abc", [("abc",)]),
        (r"\babc\b\d", [("abc",)]),
        ("a(?:b|cd)e", [("abe", "acde")]),
        ("ab?c", [("a",), ("c",)]),
        ("(?:ab)*", []),
        ("(?:abc){2}x", [("abc",), ("x",)]),
        ("abc|de", [("abc", "de")]),
        (r"abc|\d", []),
        ("[ab]c", [("ac", "bc")]),
        ("[a-c]d", [("d",)]),
        ("[^a]", []),
        ("(?=abc)", []),
        ("(?!abc)d", [("d",)]),
        ("(?i)abc", []),
        ("x(?i:abc)y", [("x",), ("y",)]),
        (r"(ab)\1", [("ab",)]),
        ("(?:ab.*cd|ef.*gh)", [("ab", "ef"), ("cd", "gh")]),
    ],
)
def test_what_a_pattern_requires(pattern: str, clauses: list[tuple[str, ...]]) -> None:
    found = required_literals(pattern)
    assert sorted(map(sorted, found)) == sorted(map(sorted, clauses))


@pytest.mark.parametrize("pattern", PATTERNS, ids=range(len(PATTERNS)))
def test_nothing_that_a_pattern_matches_is_ruled_out(pattern: str) -> None:
    clauses = required_literals(pattern)
    assert clauses, "a pattern that every ticket has to be searched for"

    @settings(max_examples=30, deadline=None, database=None, suppress_health_check=[HealthCheck.filter_too_much])
    @given(st.from_regex(pattern))
    def holds(text: str) -> None:
        match = re.search(pattern, text)
        assert match is not None
        assert all(any(literal in match[0] for literal in clause) for clause in clauses)

    holds()
