"""The token budget: what is kept of a long ticket, and that it is never more than was said."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.core.budget import CHARACTERS_A_TOKEN, GAP, Budget, Fitted, fit_ticket
from worker.core.normalise import canonical


def words(text: str) -> int:
    return len(text.split())


def in_bytes(text: str) -> int:
    return len(text.encode())


def fitted(text: str, budget: Budget, count: Callable[[str], int], counted: list[str] | None = None) -> Fitted:
    plan = fit_ticket(text, budget)
    try:
        asked = next(plan)
        while True:
            if counted is not None:
                counted.append(asked)
            asked = plan.send(count(asked))
    except StopIteration as end:
        found: Fitted = end.value
        return found


BUDGET = Budget(100, 100_000)
LONG = " ".join(f"word{n}" for n in range(1_000))


def test_a_ticket_within_the_budget_is_left_alone_and_mostly_not_even_counted() -> None:
    counted: list[str] = []
    assert fitted("a" * 100, BUDGET, words, counted) == Fitted("a" * 100, cut=False)
    assert counted == []
    sixty = " ".join(["ticket"] * 60)
    assert fitted(sixty, BUDGET, words, counted) == Fitted(sixty, cut=False)
    assert counted == [sixty]


def test_head_and_tail_are_kept_and_the_gap_shows() -> None:
    found = fitted(LONG, BUDGET, words)
    assert found.cut
    head, tail = found.text.split(GAP)
    assert LONG.startswith(head)
    assert LONG.endswith(tail)
    assert 50 <= words(found.text) <= 100
    assert 1.5 * len(tail) < len(head) < 2.5 * len(tail)


def test_no_more_is_ever_tokenized_than_sixteen_characters_a_token() -> None:
    counted: list[str] = []
    fitted("a" * 90_000, BUDGET, in_bytes, counted)
    assert max(map(len, counted)) <= CHARACTERS_A_TOKEN * BUDGET.tokens


TEXTS = st.lists(
    st.sampled_from(["word", "가로등", "<", "|", "[", "é", "\u0323", "😀", "x" * 40, "PI:", "URL"]), max_size=400
).map(" ".join)


@given(TEXTS | st.text(max_size=3_000), st.integers(1, 60), st.sampled_from([words, in_bytes, len]))
def test_what_is_kept_is_within_the_budget_canonical_and_the_same_again(
    text: str, tokens: int, count: Callable[[str], int]
) -> None:
    clean = canonical(text)
    found = fitted(clean, Budget(tokens, 100_000), count)
    assert found.text == canonical(found.text)
    assert found == fitted(clean, Budget(tokens, 100_000), count)
    if not found.cut:
        assert found.text == clean
    if tokens >= 24:  # the gap itself takes five bytes, and marks at the seam some more
        assert count(found.text) <= tokens


@pytest.mark.parametrize("count", [lambda text: 10 * len(text), lambda text: 10**9])
def test_a_tokenizer_that_counts_nonsense_ends_all_the_same(count: Callable[[str], int]) -> None:
    assert len(fitted(LONG, BUDGET, count).text) <= 50
