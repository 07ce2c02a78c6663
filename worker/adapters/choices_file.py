"""Multiple-choice questions as files hold them, each with options of its own, and everything that is wrong with one."""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from worker.adapters.files import records, refuse
from worker.core.normalise import canonical
from worker.core.systemone import MAX_INSTRUCTION_CHARS, MAX_MEANING_CHARS, MAX_OPTIONS
from worker.errors import ConfigError

COLUMNS = ("question", "options", "answer")
SEPARATOR = "|"
"""Between the options of a CSV cell that is no JSON array."""
NO_ANSWER = "no answer"
LONGEST_SHOWN = 60


@dataclass(frozen=True, slots=True)
class Choice:
    """One question; all texts are canonical. `answer` is the place of the right option, counted from 0."""

    id: str
    question: str
    options: tuple[str, ...]
    answer: int
    text: str | None = None
    """What the question is about, where it does not stand by itself."""


def load_choices(path: Path) -> tuple[Choice, ...]:
    """A CSV or JSONL file with question, options and answer, and optionally id and text.

    Options are a JSON array, in CSV also texts with `|` between them. The answer is the text of an option, its letter
    (A is the first), or as a JSON number its place, counted from 0; one that may mean two options is refused. Where
    there is no id the line is one. Raises ConfigError that lists everything wrong with the file.
    """
    problems: list[str] = []
    found: list[Choice] = []
    ids: Counter[str] = Counter()
    for line, row in records(path, COLUMNS, problems):
        name = _text(row.get("id")) or f"row-{line}"
        ids[name] += 1
        wrong: list[str] = []
        question, text = canonical(_text(row.get("question"))), canonical(_text(row.get("text"))) or None
        if not question:
            wrong.append("no question")
        elif text is not None and len(question) > MAX_INSTRUCTION_CHARS:
            wrong.append(f"the question has {len(question)} characters, beside a text at most {MAX_INSTRUCTION_CHARS}")
        sent = _sent(row.get("options"))
        options = tuple(canonical(_text(option)) for option in sent)
        wrong += _problems(options, sent)
        place = _place(row.get("answer"), options, sent)
        if isinstance(place, str) and (sent or place == NO_ANSWER):  # without options no answer is among them
            wrong.append(place)
        problems += [f"line {line}: {problem}" for problem in wrong]
        if not wrong and isinstance(place, int):
            found.append(Choice(name, question, options, place, text))
    problems += [f"id '{name}' stands {n} times" for name, n in ids.items() if n > 1]
    refuse(path, problems)
    if not found:
        raise ConfigError(f"{path}: no questions in it")
    return tuple(found)


def _text(value: object) -> str:
    """A text or a number as text; empty for anything else."""
    return str(value).strip() if isinstance(value, str | int | float) and not isinstance(value, bool) else ""


def _sent(value: object) -> Sequence[object]:
    if isinstance(value, list):
        return value
    if not isinstance(value, str) or not value.strip():
        return ()
    try:
        found = orjson.loads(value)
    except orjson.JSONDecodeError:
        found = None
    return found if isinstance(found, list) else value.split(SEPARATOR)


def _problems(options: Sequence[str], sent: Sequence[object]) -> list[str]:
    if not sent:
        return ["no options"]
    if not 2 <= len(sent) <= MAX_OPTIONS:
        return [f"{len(sent)} options: a question has 2 to {MAX_OPTIONS}"]
    wrong = []
    if empty := [str(place) for place, option in enumerate(options, 1) if not option]:
        wrong.append(f"option {', '.join(empty)} is empty, or no text")
    if long := [str(place) for place, option in enumerate(options, 1) if len(option) > MAX_MEANING_CHARS]:
        wrong.append(f"option {', '.join(long)} has more than {MAX_MEANING_CHARS} characters")
    if twice := [option for option, n in Counter(options).items() if option and n > 1]:
        wrong.append(f"two options read the same: {', '.join(map(_shown, twice))}")
    return wrong


def _place(answer: object, options: Sequence[str], sent: Sequence[object]) -> int | str:
    """Place of the right option, or what is wrong with the answer."""
    text = canonical(_text(answer))
    if not text:
        return NO_ANSWER
    named = None
    if isinstance(answer, int) and all(isinstance(option, str) for option in sent):
        named = answer
    elif isinstance(answer, str) and len(text) == 1 and text.upper() in string.ascii_uppercase:
        named = string.ascii_uppercase.index(text.upper())
    meant = {options.index(text)} if text in options else set()
    if named is not None and 0 <= named < len(options):
        meant.add(named)
    if len(meant) > 1:
        better = "text as a string" if isinstance(answer, int) else "place, counted from 0, as a JSON number"
        return f"answer {_shown(text)} is one option, and names the place of another: write the option's {better}"
    if not meant:
        return f"answer {_shown(text)} is not among the options: write the option's text, or its letter"
    return meant.pop()


def _shown(text: str) -> str:
    return f"'{text}'" if len(text) <= LONGEST_SHOWN else f"'{text[: LONGEST_SHOWN - 1]}…'"
