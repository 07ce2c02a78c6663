"""Mistakes in what people write by hand: where one stands, and which two values are taken for one."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable

Place = tuple[str | int, ...]
"""Keys and indices that lead to a part of a document."""


class Misplaced(ValueError):
    """A mistake that a whole model finds, with the place in it of the part to mend."""

    def __init__(self, problem: str, *place: str | int) -> None:
        super().__init__(problem)
        self.place: Place = place


def one_spelling(text: str) -> str:
    """Equal for two texts that look the same to the last character."""
    return unicodedata.normalize("NFC", text)


def same_when_read(text: str) -> str:
    """Equal for two texts that a reader takes for one: case, spacing and Unicode's other spellings do not count."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def refuse_twice(what: str, values: Iterable[tuple[str, Place]], alike: Callable[[str], str] = one_spelling) -> None:
    """Raises Misplaced at the second of two values that are alike, each given with its place; all of them are named."""
    seen: dict[str, str] = {}
    twice: dict[str, Place] = {}
    for value, place in values:
        key = alike(value)
        if key in seen:
            twice.setdefault(value if seen[key] == value else f"{seen[key]} and {value} (they read the same)", place)
        seen.setdefault(key, value)
    if twice:
        raise Misplaced(f"{what} used twice: {', '.join(twice)}", *next(iter(twice.values())))
