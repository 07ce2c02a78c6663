"""Prefilters: whether a regular expression may match a text, asked of an engine that reads each character once.

CPython's `re` tries every alternative at every place. Rust's `regex`, by which pydantic checks strings, follows all of
them at once, in a fiftieth of the time (pydantic-core 2.50: 0.2 us for 100 characters). It has no look-around and no
back references, and other tables of letters, so it is asked for less: for what matches wherever the pattern does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]  # who parses patterns, the same in Python 3.11 to 3.13
from typing import Any

from pydantic_core import SchemaError, SchemaValidator, core_schema

Search = Callable[[str], bool]


def search(pattern: str) -> Search:
    """Whether the pattern, in the syntax of Rust's `regex`, is found in a text; never in one with lone surrogates.

    Raises SchemaError where it is none, or takes more than 10 MB.
    """
    return SchemaValidator(core_schema.str_schema(pattern=pattern, strict=True)).isinstance_python


def may_match(*patterns: str) -> Search:
    """False is sure: none of the patterns, in Python's syntax, matches the text or a part of it.

    A part is any slice: `^` and `$` hold everywhere. `\\A` and `\\Z` are the ends of the whole. The text has to be one
    of `whole_characters`.
    """
    try:
        return search("|".join(map(relaxed, patterns)))
    except SchemaError:  # by far too many labels for an automaton
        return lambda _: True


_is_whole = search("")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def whole_characters(text: str) -> str:
    """Of the same length, with U+FFFD for lone surrogates, which no string of Rust's can hold."""
    return text if text.isascii() or _is_whole(text) else _LONE_SURROGATE.sub("\ufffd", text)


_ANY = "(?s:.)"
_ANYTHING = "(?s:.)*"
_CHANGES_LETTERS = re.IGNORECASE | re.LOCALE | re.ASCII
_REPEATS = (op.MAX_REPEAT, op.MIN_REPEAT, op.POSSESSIVE_REPEAT)
_BEYOND = r"\x{80}-\x{10FFFF}"
_BEYOND_BUT_HANGUL = r"\x{80}-\x{ABFF}\x{D7A4}-\x{10FFFF}"
"""Which characters beyond ASCII are letters depends on the version of Unicode, so any may be one, and may be none. But
Hangul syllables are letters in all, and Korean text is made of them."""
_CATEGORIES = {
    op.CATEGORY_WORD: "0-9A-Za-z_" + _BEYOND,
    op.CATEGORY_NOT_WORD: r"\x00-/:-@\[-\^`\{-\x7F" + _BEYOND_BUT_HANGUL,
    op.CATEGORY_DIGIT: "0-9" + _BEYOND_BUT_HANGUL,
    op.CATEGORY_NOT_DIGIT: r"\x00-/:-\x7F" + _BEYOND,
    op.CATEGORY_SPACE: r"\x09-\x0D\x1C-\x20" + _BEYOND_BUT_HANGUL,
    op.CATEGORY_NOT_SPACE: r"\x00-\x08\x0E-\x1B!-\x7F" + _BEYOND,
}


def relaxed(pattern: str) -> str:
    """In the syntax of Rust's `regex`: what matches wherever the pattern does, and perhaps elsewhere."""
    parsed = _parser.parse(pattern)
    return _ANYTHING if parsed.state.flags & _CHANGES_LETTERS else _sequence(parsed, {})


def _sequence(items: Sequence[Any], groups: dict[int, str]) -> str:
    return "".join(_item(kind, value, groups) for kind, value in items)


def _item(kind: Any, value: Any, groups: dict[int, str]) -> str:
    """`groups`: what stands for those that have been closed."""
    if kind is op.LITERAL:
        return _literal(value)
    if kind is op.IN:
        return _any_of(value)
    if kind in (op.ANY, op.NOT_LITERAL):
        return _ANY
    if kind is op.BRANCH:
        return f"(?:{'|'.join(_sequence(alternative, groups) for alternative in value[1])})"
    if kind is op.SUBPATTERN:
        number, added, _, inner = value
        made = _ANYTHING if added & _CHANGES_LETTERS else f"(?:{_sequence(inner, groups)})"
        return groups.setdefault(number, made) if number is not None else made
    if kind is op.ATOMIC_GROUP:
        return f"(?:{_sequence(value, groups)})"
    if kind in _REPEATS:
        least, most, inner = value
        # Counting up to a limit multiplies the states of an automaton, so there is none but one and the same number.
        times = "?" if (least, most) == (0, 1) else f"{{{least}}}" if least == most else f"{{{least},}}"
        return f"(?:{_sequence(inner, groups)}){times}"
    if kind is op.GROUPREF:
        return groups.get(value, _ANYTHING)
    if kind is op.AT:
        return {op.AT_BEGINNING_STRING: r"\A", op.AT_END_STRING: r"\z"}.get(value, "")
    return "" if kind in (op.ASSERT, op.ASSERT_NOT) else _ANYTHING


def _literal(code: int) -> str:
    char = chr(code)
    return char if char.isalnum() or code > 0x7F else rf"\x{{{code:X}}}"


def _any_of(members: Sequence[Any]) -> str:
    """Less one that is left out, all may be in."""
    parts = []
    for kind, value in members:
        if kind is op.LITERAL:
            parts.append(_literal(value))
        elif kind is op.RANGE:
            parts.append(f"{_literal(value[0])}-{_literal(value[1])}")
        elif kind is op.CATEGORY:
            parts.append(_CATEGORIES[value])
        else:
            return _ANY
    return f"[{''.join(parts)}]"
