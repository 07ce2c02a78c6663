"""Prefilters: they let through whatever the pattern matches, so leaving out a search that they rule out changes
nothing."""

from __future__ import annotations

import re

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from worker.core.prefilter import may_match, whole_characters
from worker.core.suspicion import Flagger, _sentences

FLAGGER = Flagger(["billing", "login", "Sign in", "민원"], ["Answer:", "Ticket:"])
PATTERNS = (*FLAGGER._whole, *FLAGGER._onwards)
ODD_LABELS = ("Misc.", "기타 문의?", "Anything else…", "other --", "__", ".net", "a. b", "C++ (help)", "Q&A!")
ODD = Flagger(ODD_LABELS, ["Answer:"])


@pytest.mark.parametrize(
    ("pattern", "may", "never"),
    [
        ("abc", "xabcx", "ab c"),
        ("a(?:b|cd)e", "acde", "abde"),
        ("ab?c", "ac", "ab"),
        ("(?:abc){2}", "abcabc", "abc abc"),
        (r"a.{1,3}b", "a12345b", "ab"),  # no upper limit is kept
        (r"a\d[^x]", "a1x", "ab1"),
        (r"\bab\b", "xaby", "a b"),
        ("^ab$", "xaby", "a b"),
        (r"\Aab", "abc", "xab"),
        (r"ab\Z", "cab", "abx"),
        (r"(a|b)-\1", "a-b", "a-c"),
        ("(?=abc)d", "d", "abc"),
        ("(?!abc)d", "d", "abc"),
        (r"a\wb", "aéb", "a b"),
        (r"a\Wb", "aéb", "a가b"),
        (r"a\sb", "a\u3000b", "a가b"),
        (r"a\Sb", "aéb", "a b"),
        (r"a\Db", "a가b", "a1b"),
        ("[<|-]a[.]", "|a.", "<a!"),
        ("(?>ab)c", "abc", "ab"),
    ],
)
def test_what_a_prefilter_lets_through(pattern: str, may: str, never: str) -> None:
    passes = may_match(pattern)
    assert passes(may)
    assert not passes(never)
    assert not re.search(pattern, never)


@pytest.mark.parametrize("pattern", ["(?i)abc", "x(?i:abc)y", "(?a:\\W)", r"(a)?(?(1)b|c)"])
def test_what_is_not_understood_may_be_anything(pattern: str) -> None:
    assert may_match(pattern)("xABCy 가 c")


def test_what_is_too_large_for_an_automaton_may_match_anything() -> None:
    assert may_match("(?:가{1000}){1000}")("")


def test_any_of_several_patterns_opens() -> None:
    passes = may_match("ab", "cd|ef")
    assert [passes(text) for text in ("ab", "cd", "ef", "b|c")] == [True, True, True, False]


@pytest.mark.parametrize("text", ["abc", "가é", "\ud800a\udfffb", "😀\ud83d"])
def test_half_a_character_becomes_one_and_everything_keeps_its_place(text: str) -> None:
    whole = whole_characters(text)
    whole.encode()
    assert [(a, b) for a, b in zip(text, whole, strict=True) if a != b] == [
        (a, "\ufffd") for a in text if "\ud800" <= a <= "\udfff"
    ]


@pytest.mark.parametrize("number", range(len(PATTERNS)))
def test_nothing_that_a_pattern_matches_is_ruled_out(number: int) -> None:
    one = PATTERNS[number]
    passes = may_match(one.pattern.pattern)
    assert not passes("the lamp in my room has no bulb since 3 days. 가로등 불이 나갔어요"), "every ticket is searched"

    @settings(max_examples=30, deadline=None, database=None, suppress_health_check=[HealthCheck.filter_too_much])
    @given(st.from_regex(one.pattern), st.sampled_from(["", "a ", "가. "]), st.sampled_from(["", " b", ". 나"]))
    def holds(text: str, before: str, behind: str) -> None:
        assert passes(whole_characters(f"{before}{text}{behind}"))

    holds()


PIECES = [
    *(
        "billing",
        "login",
        "sign in",
        "민원",
        "answer",
        "team",
        "정답",
        "분류",
        "say",
        "this is",
        "to",
        "label",
        "every",
    ),
    *("ignore", "rules", "previous", "dear", "ai", "model", "system", "category", "1", "a", "나", "분류하세요"),
    *(
        "으로",
        " ",
        " ",
        ". ",
        ": ",
        "! ",
        "-> ",
        "=",
        '"',
        "(",
        ")",
        "?",
        "…",
        "。",
        " -- ",
        " ___ ",
        "_",
        "\n",
        "é",
        "①",
        "²",
    ),
    *("\u3000", "가", "않", "ß", "[", "|", ">", "#", "\u2028", "\x1c", "٣"),
]


@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=14).map("".join))
@example("The lamp is off. billing. Thanks")
@example("가로등 -- 민원 -- 고장")
@example("login\n")
def test_what_any_sentence_of_a_text_matches_is_possible_in_the_text(text: str) -> None:
    assert_possible(FLAGGER, text)


@settings(max_examples=400, deadline=None)
@given(
    st.lists(
        st.sampled_from([*(label.lower() for label in ODD_LABELS), *PIECES]) | st.sampled_from(" .!?…-_"), max_size=12
    ).map("".join)
)
@example("my parcel is late. misc. i want my money back.")
@example("고장났어요. 기타 문의? 감사합니다.")
def test_labels_that_end_or_break_a_sentence_by_themselves_are_no_exception(text: str) -> None:
    assert_possible(ODD, text)


def assert_possible(flagger: Flagger, text: str) -> None:
    """Of whatever matches a sentence the text says that it may, and so does the sentence."""
    in_text = flagger._possible(text)
    for start, end in _sentences(text):
        sentence = text[start:end]
        matched = [each for each in (*flagger._whole, *flagger._onwards) if each.pattern.search(sentence)]
        assert [each.kind for each in matched if each not in in_text] == []
        assert [each.kind for each in matched if each not in flagger._possible(sentence)] == []
