"""Near-duplicates: what counts as one ticket."""

from __future__ import annotations

import random

import pytest

from worker.offline.near_duplicates import collapse, digest, letters, pack_digests, unpack_digests
from worker.offline.scoring import ScoredTicket


def ticket(key: str, text: str, label: int = 0) -> ScoredTicket:
    return ScoredTicket(key, text, label)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Order 1234 is late!", "order 99 IS late"),
        ("Bitte, Straße", "BITTE STRASSE"),
        ("가로등이 고장났어요. 12번지", "가로등이 고장났어요 (7번지)!!"),
        ("thanks 👍", "thanks"),
    ],
)
def test_case_digits_punctuation_and_space_make_no_difference(one: str, other: str) -> None:
    assert letters(one) == letters(other)
    assert digest(one) == digest(other)


@pytest.mark.parametrize(("one", "other"), [("12345", "12346"), ("!!!", "???"), ("가로등", "가로수"), ("café", "cafe")])
def test_other_letters_and_texts_without_any_stay_apart(one: str, other: str) -> None:
    assert letters(one) != letters(other)


def test_the_first_by_id_is_kept_whatever_the_order() -> None:
    tickets = [
        ticket("b", "late order 7", 1),
        ticket("a", "Late order!", 0),
        ticket("c", "late ORDER 9", 0),
        ticket("d", "x"),
    ]
    for seed in range(5):
        random.Random(seed).shuffle(tickets)
        collapsed = collapse(tickets)
        assert [t.id for t in collapsed.kept] == ["a", "d"]
        assert collapsed.dropped == (("b", "a"), ("c", "a"))
        assert collapsed.conflicting == (("b", "a"),)


def test_an_id_that_stands_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="stands twice"):
        collapse([ticket("a", "x"), ticket("a", "y")])


def test_digests_survive_the_artefact() -> None:
    tickets = [ticket(str(i), f"text {'abcdefghij'[i]}") for i in range(10)]
    assert unpack_digests(pack_digests(tickets)) == {digest(t.text) for t in tickets}
    assert unpack_digests("") == frozenset()
