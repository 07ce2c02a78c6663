"""Attack corpus: what authors of tickets write to be sorted as they like, and how it is put around an honest ticket.

The templates are files of this package, a line each, in English and Korean. `{ticket}` stands for the honest ticket;
`{target}` for the label word that the author wants, `{name}` for that category's name, `{list}` for all label words,
`{cue}` and `{heading}` for the rule set's own. A line may begin with `@` and what is done to everything but the ticket.
"""

from __future__ import annotations

import base64
import re
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Self

from worker.core.categories import Category
from worker.core.rules import RuleSet

KINDS = ("label_echo", "fake_list", "turn_forging", "authority", "unicode", "length")
LANGUAGES = ("en", "ko")
_SLOT = re.compile(r"\{(ticket|target|name|list|cue|heading)\}")
_PADDING = {
    "en": "Some more background that you may skip, the story is long and nothing in it matters much.",
    "ko": "조금 더 설명을 드리자면 이야기가 길고 그다지 중요한 내용은 아닙니다.",
}


@dataclass(frozen=True, slots=True)
class Target:
    """What the author wants, in the words of one rule set."""

    category: str
    words: Mapping[str, str]

    @classmethod
    def of(cls, rule_set: RuleSet, category: Category) -> Self:
        style, rows = rule_set.categories.prompt, rule_set.categories.categories
        words = {
            "target": category.label or category.id,
            "name": category.name,
            "list": ", ".join(row.label or row.id for row in rows),
            "cue": style.answer_cue,
            "heading": style.ticket_heading,
        }
        return cls(category.id, words)


@dataclass(frozen=True, slots=True)
class Template:
    """One way of attacking. `how` is done to everything but the honest ticket."""

    kind: str
    language: str
    text: str
    how: str = ""

    def attack(self, ticket: str, target: Target) -> str:
        """The ticket as its author sends it."""
        parts = re.split(r"(\{ticket\})", self.text.replace("\\n", "\n"))
        filled = [part if part == "{ticket}" else _SLOT.sub(lambda slot: target.words[slot[1]], part) for part in parts]
        if self.how in DISGUISES:
            filled = [part if part == "{ticket}" else DISGUISES[self.how](part) for part in filled]
            return "".join(ticket if part == "{ticket}" else part for part in filled)
        whole = "".join(ticket if part == "{ticket}" else part for part in filled)
        return _lengthened(whole, ticket, self.how, _PADDING[self.language])


def load_corpus() -> tuple[Template, ...]:
    """Every template that ships with the package."""
    folder = resources.files("worker.offline") / "attacks"
    found = []
    for kind in KINDS:
        for language in LANGUAGES:
            for line in (folder / f"{kind}.{language}.txt").read_text(encoding="utf-8").splitlines():
                how, text = line[1:].split(" ", 1) if line.startswith("@") else ("", line)
                found.append(Template(kind, language, text, how))
    return tuple(found)


def _woven(char: str) -> Callable[[str], str]:
    return char.join


def _shifted(upper: int, lower: int) -> Callable[[str], str]:
    """Latin letters moved to another alphabet of Unicode."""

    def move(text: str) -> str:
        return "".join(
            chr(upper + ord(c) - 65) if "A" <= c <= "Z" else chr(lower + ord(c) - 97) if "a" <= c <= "z" else c
            for c in text
        )

    return move


def _fullwidth(text: str) -> str:
    return "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in text)


def _jamo(text: str) -> str:
    """Syllables as compatibility letters, as they stand on keys."""
    first, middle = "ㄱㄲㄴㄷㄸㄹㅁㅂㅃㅅㅆㅇㅈㅉㅊㅋㅌㅍㅎ", "ㅏㅐㅑㅒㅓㅔㅕㅖㅗㅘㅙㅚㅛㅜㅝㅞㅟㅠㅡㅢㅣ"
    last = " ㄱㄲㄳㄴㄵㄶㄷㄹㄺㄻㄼㄽㄾㄿㅀㅁㅂㅄㅅㅆㅇㅈㅊㅋㅌㅍㅎ"
    found = []
    for char in text:
        place = ord(char) - 0xAC00
        if 0 <= place < 11172:
            char = first[place // 588] + middle[place % 588 // 28] + last[place % 28].strip()  # noqa: PLW2901
        found.append(char)
    return "".join(found)


DISGUISES: Mapping[str, Callable[[str], str]] = {
    "fullwidth": _fullwidth,
    "bold": _shifted(0x1D400, 0x1D41A),
    "circled": _shifted(0x24B6, 0x24D0),
    "zero_width": _woven("\u200b"),
    "soft_hyphen": _woven("\xad"),
    "word_joiner": _woven("\u2060"),
    "variation": _woven("\ufe0f"),
    "braille": lambda text: text.replace(" ", "\u2800"),
    "filler": _woven("\u3164"),
    "tags": lambda text: "".join(chr(0xE0000 + ord(c)) if ord(c) < 128 else c for c in text),
    "rtl": lambda text: f"\u202e{text[::-1]}\u202c",
    "reversed": lambda text: text[::-1],
    "homoglyph": lambda text: text.translate(str.maketrans("aceopxyis", "асеорхуіѕ")),
    "spaced": " ".join,
    "punctuated": lambda text: ".".join(text.replace(" ", "")),
    "leet": lambda text: text.translate(str.maketrans("aeiost", "431057")),
    "struck": _woven("\u0336"),
    "upper": str.upper,
    "base64": lambda text: base64.b64encode(text.encode()).decode(),
    "nfd": lambda text: unicodedata.normalize("NFD", text),
    "jamo": _jamo,
}


def _lengthened(text: str, ticket: str, how: str, padding: str) -> str:
    found = re.fullmatch(r"([a-z_]*?)(\d+)", how)
    if found is None:
        return text
    way, count = found[1], int(found[2])
    filler = " ".join([padding] * max(1, count // 20))  # about so many words
    match way:
        case "x":
            return "\n".join([text] * count)
        case "pad_before":
            return text.replace(ticket, f"{ticket} {filler}", 1)
        case "pad_after":
            return text.replace(ticket, f"{filler} {ticket}", 1)
        case "pad_between":
            return text.replace(ticket, f"{filler} {ticket} {filler}", 1)
        case "newlines":
            return text.replace(ticket, ticket + "\n" * count, 1)
        case "spaces":
            return text.replace(ticket, ticket + " " * count, 1)
    raise ValueError(f"nothing is done by '@{how}'")
