"""Markup: what a reader would see comes through, and no input takes more than one pass."""

from __future__ import annotations

import time
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.core.markup import visible_text
from worker.core.normalise import canonical
from worker.core.ticket import Intake, parse_ticket


@pytest.mark.parametrize(
    ("markup", "text"),
    [
        ("<p>My <b>screen</b> is&nbsp;black</p>", "My screen is black"),
        ("a<br>b<br/>c", "a b c"),
        ("<a title=\"1 > 0\" href='x>y'>link</a> on", "link on"),
        ("<p don't>it's fine</p>", "it's fine"),
        ("x < y and y > z, 3 <4, <3", "x < y and y > z, 3 <4, <3"),
        ("1<!-- hidden -->2<!-->3<!--->4", "1234"),
        ("<!DOCTYPE html><?xml version='1'?><p>hi", "hi"),
        ("<script>if (a < b) { x('</p>') }</script>see<style>p > a {}</style>n", "see n"),
        ("<SCRIPT>x</scripty></Script >seen", "seen"),
        ("<head><title>t</title></head><body>b<template>x</template>", "b"),
        ("&lt;b&gt; &amp; &#8364; &#x1F600; &nosuch; &", "<b> & € 😀 &nosuch; &"),
        ("&#" + "9" * 5000 + ";ok", "\ufffdok"),
        ("</ nothing known>a</>b", "ab"),
        ("before <b unclosed and the rest", "before <b unclosed and the rest"),
        ('before <a href="never closed> and <b>more</b>', 'before <a href="never closed> and <b>more</b>'),
        ("before <!-- never closed <b>x</b>", "before <!-- never closed <b>x</b>"),
        ("a<script>never closed", "a"),
        ("", ""),
        ("<", "<"),
        ("<>", "<>"),
    ],
)
def test_a_reader_sees_this(markup: str, text: str) -> None:
    assert " ".join(visible_text(markup).split()) == text


class _Reference(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.parts.append(" ")

    def handle_endtag(self, tag: str) -> None:
        self.parts.append(" ")

    def handle_data(self, data: str) -> None:
        self.parts.append(data)


@given(
    st.lists(
        st.one_of(
            st.text(alphabet="abc 가 \n", max_size=8),
            st.sampled_from(
                ["<p>", "</p>", "<br/>", '<a href="x">', "<i class='y z'>", "<!-- c -->", "&amp;", "&#65;"]
            ),
        )
    ).map("".join)
)
def test_sound_markup_reads_as_pythons_own_parser_reads_it(markup: str) -> None:
    reference = _Reference()
    reference.feed(markup)
    reference.close()
    assert visible_text(markup).split() == "".join(reference.parts).split()


@given(st.text(alphabet="<>!-?/ab='\"& ;#9x" + "scripthead", max_size=60))
def test_no_text_raises_and_none_without_markup_is_changed(text: str) -> None:
    seen = visible_text(text)
    if not set(text) & set("<&"):
        assert seen == text


FLOODS = ["<", "<!--", "<a b=", "<a ", '<a b="', "<a b='\"", "</", "<?", "&#", "&", "<script>", "<head>", "<!", "< "]


@pytest.mark.parametrize("markup", ["plain", "html"])
@pytest.mark.parametrize("flood", [*FLOODS, "<|", "[", "\u0301", "＜"])
def test_no_flood_holds_up_the_worker(flood: str, markup: str) -> None:
    text = "a" + flood * (480_000 // len(flood.encode()))
    started = time.process_time()
    parse_ticket(f'{{"text": {_quoted(text)}}}'.encode(), Intake(markup=markup), 1_000_000)  # type: ignore[arg-type]
    assert time.process_time() - started < 1.0  # about 0.1 s; quadratic would be minutes
    assert canonical(text)


def _quoted(text: str) -> str:
    import json

    return json.dumps(text, ensure_ascii=False)
