"""Required literals: texts that stand in whatever a regular expression matches, so that most texts need no matching.

CPython's `re` tries every alternative at every place; looking for a few dozen literals first takes a fraction of that.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]  # who parses patterns, the same in Python 3.11 to 3.13
from typing import Any

Clause = tuple[str, ...]
"""Literals one of which has to be there."""

_MOST_JOINED = 64
_MOST_CLAUSES = 3
_REPEATS = (op.MAX_REPEAT, op.MIN_REPEAT, op.POSSESSIVE_REPEAT)
_CHANGES_LETTERS = re.IGNORECASE | re.LOCALE | re.VERBOSE


def required_literals(pattern: str) -> tuple[Clause, ...]:
    """Any match satisfies each of these clauses, the most telling first; none where nothing can be said."""
    parsed = _parser.parse(pattern)
    return () if parsed.state.flags & _CHANGES_LETTERS else tuple(_of_sequence(parsed)[:_MOST_CLAUSES])


def _of_sequence(items: Sequence[Any]) -> list[Clause]:
    """Every part of it has to match, so all that its parts require."""
    found: list[Clause] = []
    joined = [""]
    for kind, value in items:
        exactly = _exactly(kind, value)
        if exactly is not None and len(joined) * len(exactly) <= _MOST_JOINED:
            joined = [before + after for before in joined for after in exactly]
            continue
        found += _as_clause(joined)
        joined = [""]
        found += _of_item(kind, value)
    found += _as_clause(joined)
    return sorted(dict.fromkeys(found), key=_selectivity, reverse=True)


def _as_clause(joined: list[str]) -> list[Clause]:
    return [tuple(dict.fromkeys(joined))] if all(joined) else []


def _exactly(kind: Any, value: Any) -> list[str] | None:
    """All that this part can match; None where that is more than a few literals."""
    if kind is op.LITERAL:
        return [chr(value)]
    if kind is op.IN and all(member is op.LITERAL for member, _ in value):
        return [chr(character) for _, character in value]
    if kind is op.SUBPATTERN and not value[1] & _CHANGES_LETTERS:
        return _exact_sequence(value[3])
    if kind is op.BRANCH:
        alternatives = [_exact_sequence(alternative) for alternative in value[1]]
        known = [each for each in alternatives if each is not None]
        return [literal for each in known for literal in each] if len(known) == len(alternatives) else None
    return None


def _exact_sequence(items: Sequence[Any]) -> list[str] | None:
    joined = [""]
    for kind, value in items:
        exactly = _exactly(kind, value)
        if exactly is None or len(joined) * len(exactly) > _MOST_JOINED:
            return None
        joined = [before + after for before in joined for after in exactly]
    return joined


def _of_item(kind: Any, value: Any) -> list[Clause]:
    if kind is op.SUBPATTERN:
        _, added, _, inner = value
        return [] if added & _CHANGES_LETTERS else _of_sequence(inner)
    if kind is op.ATOMIC_GROUP:
        return _of_sequence(value)
    if kind in _REPEATS:
        least, _, inner = value
        return _of_sequence(inner) if least > 0 else []
    if kind is op.BRANCH:
        alternatives = [_of_sequence(alternative) for alternative in value[1]]
        if not all(alternatives):
            return []
        most = min(_MOST_CLAUSES, max(map(len, alternatives)))
        # Whichever alternative matches satisfies all of its clauses, so one of each makes a clause of the whole.
        return [
            tuple(dict.fromkeys(literal for own in alternatives for literal in own[min(number, len(own) - 1)]))
            for number in range(most)
        ]
    exactly = _exactly(kind, value)
    return _as_clause(exactly) if exactly else []


def _selectivity(clause: Clause) -> tuple[int, int]:
    """Long literals are rare, and few of them are looked for soon."""
    return min(map(len, clause)), -len(clause)
