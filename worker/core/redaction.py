"""Redaction: which numbers and addresses in a text are personal, and what stands in their place.

Korean resident and alien registration numbers, cards, phones, e-mail addresses. What is found is a matter of form: a
number that looks like one of them and is none goes too, and a name stays. Every pattern is bounded, so that a text
takes time in proportion to its length, whatever its author wrote.
"""

from __future__ import annotations

import re
from calendar import monthrange
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, Literal

Kind = Literal["email_addresses", "resident_numbers", "card_numbers", "phone_numbers"]

KINDS: Final[tuple[Kind, ...]] = ("email_addresses", "resident_numbers", "card_numbers", "phone_numbers")
"""In the order in which they are looked for: an address may hold a phone number."""

_PLACEHOLDERS: Final[Mapping[str, tuple[str, str]]] = {
    "email": ("[이메일]", "[EMAIL]"),
    "resident": ("[주민등록번호]", "[RESIDENT NUMBER]"),
    "alien": ("[외국인등록번호]", "[ALIEN REGISTRATION NUMBER]"),
    "card": ("[카드번호]", "[CARD]"),
    "phone": ("[전화번호]", "[PHONE]"),
}

PLACEHOLDERS: Final = tuple(text for both in _PLACEHOLDERS.values() for text in both)

Found = tuple[int, int, str]
"""From, to, and which placeholder."""


def redacted(text: str, kinds: Iterable[Kind] = KINDS) -> str:
    """The text with a placeholder for each of these; Korean ones where the text has Hangul. Idempotent."""
    wanted = frozenset(kinds)
    if not _WORTH_A_LOOK.search(text):
        return text
    language = 0 if _HANGUL.search(text) else 1
    for kind in KINDS:
        if kind in wanted:
            text = _replaced(text, _FINDERS[kind](_in_half_width(text)), language)
    return text


def _in_half_width(text: str) -> str:
    """Character for character, so that places stay what they are."""
    return text.translate(_HALF_WIDTH) if _FULL_WIDTH.search(text) else text


def _replaced(text: str, found: Iterable[Found], language: int) -> str:
    """Of those that overlap, the first."""
    parts, at = [], 0
    for start, end, name in found:
        if start >= at:
            parts += [text[at:start], _PLACEHOLDERS[name][language]]
            at = end
    return "".join((*parts, text[at:])) if parts else text


_HANGUL = re.compile("[가-힣]")
_WORTH_A_LOOK = re.compile(r"[0-9０-９@＠]")
_FULL_WIDTH = re.compile("[！-～]")
_HALF_WIDTH: Final[Mapping[int, int]] = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}

_DASH = "\\-\u2010-\u2015\u2212\u30fc\ufe58\ufe63"
_SPACE = " \\t\u00a0\u2007\u2009\u202f\u3000"
_GAP = f"[{_DASH}{_SPACE}]"
_LOOSE = f"[{_DASH}{_SPACE}.·/()]"
"""What people and word processors write between digits."""

# -- e-mail ------------------------------------------------------------------------------------------------------------

_AT = re.compile(r"(?<=[\w%+'-])@(?=\w)")
_LOCAL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._%+'-]{0,63}\Z")
_LOCAL_OF_ANY_SCRIPT = re.compile(r"\w[\w.%+'-]{0,63}\Z")
_DOMAIN = re.compile(r"(?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,24}")
_DOMAIN_OF_ANY_SCRIPT = re.compile(r"(?:[\w-]{1,63}\.){1,8}[^\W\d_]{2,24}")
"""A Korean particle behind an address in Latin letters is no part of it, so those are tried first."""
_LONGEST_LOCAL = 64


def _addresses(text: str) -> Iterator[Found]:
    last = 0
    for at in _AT.finditer(text):
        before = text[max(last, at.start() - _LONGEST_LOCAL) : at.start()]
        local = _LOCAL.search(before) or _LOCAL_OF_ANY_SCRIPT.search(before)
        domain = _DOMAIN.match(text, at.end()) or _DOMAIN_OF_ANY_SCRIPT.match(text, at.end())
        if local and domain:
            last = domain.end()
            yield at.start() - len(local[0]), last, "email"


# -- resident and alien registration numbers ---------------------------------------------------------------------------

_RESIDENT = re.compile(rf"(?<![0-9])([0-9]{{6}}){_GAP}{{0,3}}([0-9])(?:[0-9]{{6}}(?![0-9])|[*xX●○•]{{6}})")
_CENTURY: Final[Mapping[int, int]] = {1: 1900, 2: 1900, 3: 2000, 4: 2000, 5: 1900, 6: 1900, 7: 2000, 8: 2000}
"""By the first digit behind the birthday; from 5 on the person is no citizen. 9 and 0 were born before 1900."""


def _resident_numbers(text: str) -> Iterator[Found]:
    """By their birthday. There is no check digit to go by: since October 2020 the last six are drawn at random."""
    for found in _RESIDENT.finditer(text):
        century = _CENTURY.get(int(found[2]))
        if century is not None and _is_a_day(century, found[1]):
            yield found.start(), found.end(), "alien" if int(found[2]) >= 5 else "resident"


def _is_a_day(century: int, digits: str) -> bool:
    year, month, day = century + int(digits[:2]), int(digits[2:4]), int(digits[4:])
    return 1 <= month <= 12 and 1 <= day <= monthrange(year, month)[1]


# -- cards -------------------------------------------------------------------------------------------------------------

_CARD = re.compile(
    r"(?<![0-9])(?=[2-69])(?=("
    rf"(?:[0-9]{{4}}{_GAP}{{1,3}}){{3}}[0-9]{{1,7}}"
    rf"|[0-9]{{4}}{_GAP}{{1,3}}[0-9]{{6}}{_GAP}{{1,3}}[0-9]{{4,5}}"
    r"|[0-9]{13,19})(?![0-9]))"
)
"""Looked for at every place: the groups of a card may stand behind others."""
_DIGIT = re.compile(r"[0-9]")


def _cards(text: str) -> Iterator[Found]:
    """13 to 19 digits, in the groups that are printed or in one, which satisfy Luhn's check (ISO/IEC 7812-1)."""
    for found in _CARD.finditer(text):
        if _satisfies_luhn([int(digit) for digit in _DIGIT.findall(found[1])]):
            yield *found.span(1), "card"


def _satisfies_luhn(digits: list[int]) -> bool:
    doubled = (sum(divmod(2 * digit, 10)) for digit in digits[-2::-2])
    return (sum(digits[-1::-2]) + sum(doubled)) % 10 == 0


# -- phones ------------------------------------------------------------------------------------------------------------

_KOREAN_AREA = r"(?:1[016-9]|2|3[1-3]|4[1-4]|5[1-5]|6[1-4]|70|80|50[0-9]?)"
"""Mobile, Seoul, the provinces, internet, toll-free, personal. Not 15xx, 16xx and 18xx, which are firms."""
_REST = rf"{_LOOSE}{{0,3}}[0-9]{{3,4}}{_LOOSE}{{0,3}}[0-9]{{4}}(?![0-9])"
_ALONE = r"(?<![0-9])(?<![0-9\]][-./])"
"""No end of a date or of another number, redacted or not."""
_PHONES = (
    re.compile(rf"[+]{_LOOSE}{{0,2}}82{_LOOSE}{{0,3}}(?:0{_LOOSE}{{0,3}})?{_KOREAN_AREA}{_REST}"),
    re.compile(rf"[+]\(?1(?:{_LOOSE}{{0,3}}[0-9]){{10}}(?![0-9])"),
    re.compile(rf"[+]\(?[1-9](?:{_LOOSE}{{0,3}}[0-9]){{6,14}}(?![0-9])"),
    re.compile(rf"(?<![0-9])00{_LOOSE}{{0,3}}82{_LOOSE}{{0,3}}(?:0{_LOOSE}{{0,3}})?{_KOREAN_AREA}{_REST}"),
    re.compile(rf"(?:\(0{_KOREAN_AREA}\)|{_ALONE}0{_KOREAN_AREA}){_REST}"),
    re.compile(
        rf"(?<![0-9.\]])(?:\([2-9][0-9]{{2}}\){_LOOSE}{{0,2}}|[2-9][0-9]{{2}}[-. ])"
        r"[0-9]{3}[-. ][0-9]{4}(?![0-9])"
    ),
    re.compile(
        rf"{_ALONE}(?![0-9][0-9]{_GAP}[0-9][0-9]{_GAP}(?:19|20)[0-9][0-9])"  # a day
        rf"0(?=[0-9]{{1,5}}{_GAP})(?:{_GAP}?[0-9]){{9,10}}(?![0-9])"
    ),
)
"""International with Korea and North America exactly, then any of E.164; Korean; North American; and what begins with
the 0 that most countries dial first. A looser one may take a digit too much: of two that begin together the first wins.
Checked with phonenumbers 9.0.43: all of its 489 examples of fixed and mobile lines are found in international form."""


def _phones(text: str) -> Iterator[Found]:
    """Each form is looked for again only behind what it overlaps, so that no form passes over the text twice."""
    coming = [form.search(text) for form in _PHONES]
    while found := min(filter(None, coming), key=re.Match.start, default=None):  # the first of those that begin there
        yield *found.span(), "phone"
        coming = [
            form.search(text, found.end()) if each and each.start() < found.end() else each
            for form, each in zip(_PHONES, coming, strict=True)
        ]


_FINDERS: Final[Mapping[Kind, Callable[[str], Iterator[Found]]]] = {
    "email_addresses": _addresses,
    "resident_numbers": _resident_numbers,
    "card_numbers": _cards,
    "phone_numbers": _phones,
}
