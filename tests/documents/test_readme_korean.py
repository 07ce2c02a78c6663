"""README.ko.md is README.md in Korean: in each section the same headings, commands, names, rows and links."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENGLISH = (ROOT / "README.md").read_text(encoding="utf-8")
KOREAN = (ROOT / "README.ko.md").read_text(encoding="utf-8")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
OTHER_LANGUAGE = {"README.md", "README.ko.md"}


def sections(text: str) -> list[str]:
    """What stands under each heading, the title's first."""
    return re.split(r"^(?=#+ )", FENCED.sub("", text), flags=re.MULTILINE)[1:]


def blocks(text: str) -> list[str]:
    """Without comments, which are translated."""
    return [re.sub(r"[ \t]+# .*", "", block) for block in FENCED.findall(text)]


def names(text: str) -> Counter[str]:
    return Counter(re.findall(r"`([^`\n]+)`", text))


def links(text: str) -> Counter[str]:
    return Counter(target for target in re.findall(r"\]\(([^)]+)\)", text) if target not in OTHER_LANGUAGE)


def rows(text: str) -> list[int]:
    """Columns of each row of each table."""
    return [len(re.findall(r"(?<!\\)\|(?![^`|]*\|>)", line)) for line in text.splitlines() if line.startswith("|")]


def test_both_have_the_same_headings() -> None:
    levels = [re.findall(r"^#+ ", FENCED.sub("", text), re.MULTILINE) for text in (ENGLISH, KOREAN)]
    assert levels[0] == levels[1]


def test_both_show_the_same_commands_and_their_output() -> None:
    assert blocks(KOREAN) == blocks(ENGLISH)


def test_each_section_names_the_same_settings_commands_and_files() -> None:
    for english, korean in zip(sections(ENGLISH), sections(KOREAN), strict=True):
        heading = english.splitlines()[0]
        assert names(korean) == names(english), heading
        assert links(korean) == links(english), heading


def test_tables_have_the_same_rows() -> None:
    for english, korean in zip(sections(ENGLISH), sections(KOREAN), strict=True):
        assert rows(korean) == rows(english), english.splitlines()[0]


def test_it_is_korean() -> None:
    """At least as much Hangul as anything else, outside of code, links and tables' names."""
    prose = re.sub(r"`[^`]*`|\]\([^)]*\)|\"[^\"]*\"", "", FENCED.sub("", KOREAN))
    hangul, latin = len(re.findall(r"[가-힣]", prose)), len(re.findall(r"[A-Za-z]", prose))
    assert hangul > 3 * latin


def test_each_leads_to_the_other() -> None:
    assert "(README.ko.md)" in ENGLISH
    assert "(README.md)" in KOREAN
