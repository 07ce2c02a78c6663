"""Scripts: which parts of a text are written in other letters than most of it.

Who cannot say it in the ticket's own words says it in the label's: in a Korean ticket an English word at the end is all
that it takes, whatever stands before it. So such words need no pattern.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from worker.core.prefilter import search


@dataclass(frozen=True, slots=True, eq=False)
class Script:
    """Letters that are written together."""

    letter: re.Pattern[str]
    part: re.Pattern[str]
    """From a letter of another script to the last one before the next of this."""
    weight: float
    """How many Latin letters say as much as one of these, about."""


def _script(letter: str, other: str, rest: str, weight: float) -> Script:
    return Script(re.compile(letter), re.compile(f"{other}(?:{rest}*{other})?"), weight)


def _of(letters: str, weight: float) -> Script:
    return _script(f"[{letters}]", rf"[^\W\d_{letters}]", f"[^{letters}]", weight)


_LATIN = "A-Za-z\xaa\xba\xc0-\xd6\xd8-\xf6\xf8-\u02af\u1e00-\u1eff"
_HANGUL = "\u1100-\u11ff\u3131-\u318e\ua960-\ua97f\uac00-\ud7ff"
_HAN = "\u3005-\u3007\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_THESE = _LATIN + _HANGUL + _HAN
LATIN, HANGUL = _of(_LATIN, 1.0), _of(_HANGUL, 2.5)
SCRIPTS = (LATIN, HANGUL, _of(_HAN, 3.0), _script(rf"[^\W\d_{_THESE}]", f"[{_THESE}]", rf"[\W\d_{_THESE}]", 1.0))
"""Chinese and Japanese count as one, and so does everything that is none of the others."""
_LEAST = 3.0
"""Latin letters, or what says as much: `km` and `A` stand in any language."""
MOSTLY = 4.0
"""So many times as much as in all other scripts has to be said in the labels' own, for a text to be written in that."""
_WORD = re.compile(r"[^\W\d_]+")


_is_hangul = search(rf"\A[\x00-@\[-`\{{-\x7F{_HANGUL}]*\z")
"""With what else of ASCII is no letter."""


def script_of(words: Sequence[str]) -> Script:
    """The one in which most of them are written."""
    text = " ".join(words)
    return max(SCRIPTS, key=lambda script: len(script.letter.findall(text)))


def is_one_script(text: str) -> bool:
    """As most are. False is not sure."""
    return text.isascii() or _is_hangul(text) or HANGUL.part.search(text) is None or LATIN.part.search(text) is None


def foreign(text: str, labels: Script, counts: Callable[[str], bool | None]) -> Iterator[tuple[int, int]]:
    """Parts `[start:end]` in other scripts than most of the text, from left to right, in linear time.

    Most of it is what weighs most, but what is written in the labels' script has to outweigh everything else by far:
    who writes a label may write much beside it. Of a word `counts` says whether it makes its part count however short
    it is (True), counts for nothing (False), or counts by its letters (None).
    """
    if is_one_script(text):
        return
    weights = {script: len(script.letter.findall(text)) * script.weight for script in SCRIPTS}
    others = {script: weight for script, weight in weights.items() if script is not labels and weight}
    if not others or (not weights[labels] and len(others) == 1):
        return
    by_far = weights[labels] >= MOSTLY * sum(others.values())
    main = labels if by_far else max(others, key=lambda script: others[script])
    for part in main.part.finditer(text):
        words = _WORD.findall(part[0])
        said = [counts(word) for word in words]
        weight = sum(_weight(word) for word, says in zip(words, said, strict=True) if says is None)
        if True in said or weight >= _LEAST:
            yield part.span()


def _weight(word: str) -> float:
    return sum(len(script.letter.findall(word)) * script.weight for script in SCRIPTS)
