"""What a rule may cost: nobody's keywords, however many and whatever is in them, hold up the worker."""

from __future__ import annotations

import time

import pytest

from worker.core.rule_kinds import KeywordRule
from worker.core.ticket import Ticket

CATASTROPHIC = r"^(\w+\s?)*$"
"""As a regular expression, `re` takes 53 s for it at 26 characters that do not match."""


def rule(*words: str, whole_word: bool = True) -> KeywordRule:
    return KeywordRule(kind="keyword", name="x", any=words, whole_word=whole_word)


@pytest.mark.parametrize("whole_word", [True, False])
def test_a_keyword_is_a_literal_and_never_a_regular_expression(whole_word: bool) -> None:
    found = rule(CATASTROPHIC, whole_word=whole_word)
    started = time.process_time()
    assert not found.matches(Ticket(id=None, text="aaaa " * 100_000 + "!"))
    assert time.process_time() - started < 1.0
    assert rule(r"a.c (x+)+", whole_word=whole_word).matches(Ticket(id=None, text=r"an a.c (x+)+ here"))


@pytest.mark.parametrize("whole_word", [True, False])
def test_a_thousand_words_over_the_largest_ticket_take_a_moment(whole_word: bool) -> None:
    words = ["".join(chr(97 + (n * 7 + i * (n % 5)) % 26) for i in range(8)) + str(n) for n in range(1_000)]
    found = rule(*words, whole_word=whole_word)
    text = "wordy words are words and " * 19_000
    started = time.process_time()
    assert not found.matches(Ticket(id=None, text=text))
    assert time.process_time() - started < 1.0  # 0.1 s; one pattern of all words takes two seconds
    assert found.matches(Ticket(id=None, text=f"{text} {words[-1]} {text}"))
