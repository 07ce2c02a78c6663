"""The wire format of `POST /v1/systemone` (TypeSafe System One, as Jev-compatible servers speak it): which bodies are
requests, and what their answers look like.

After the public specification 0.1 that jevcompat 0.1.1 tests. Three types of question: *noul* (yes or no), *choice*
(one of 2 to 255 options), *score* (one of 2 to 10 levels, low to high). Nothing here knows how one is put to a model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, assert_never

import orjson

from worker.core.normalise import canonical
from worker.core.ticket import decode_object
from worker.errors import InvalidQuestions, InvalidTicket, Problem

QuestionType = Literal["noul", "choice", "score"]

ALIAS = "jev-latest"
"""The model name that the official clients send unless told otherwise; every compatible server accepts it."""
MAX_QUESTIONS = 64
MAX_OPTIONS = 255
MAX_LEVELS = 10
MAX_INSTRUCTION_CHARS = 8_000
MAX_MEANING_CHARS = 2_000
"""Of an option's name, and of its description, in canonical text."""
MAX_QUESTION_CHARS = 64_000
"""Of all that one question puts into the prompt."""
MAX_PROBLEMS = 20

NOUL_OPTIONS = ("true", "false")


@dataclass(frozen=True, slots=True)
class TypedQuestion:
    """One question as it was sent. Equal for two that are put to the model in the same words, whatever their ids."""

    type: QuestionType
    instructions: str
    """Canonical text, as all that follows but `keys` and `legend`; empty where there are none."""
    names: tuple[str, ...]
    """What the options are called in the prompt; for a score the descriptions of its levels, for a noul `yes`, `no`."""
    meanings: tuple[str, ...]
    """What is said of each besides; empty where nothing is."""
    keys: tuple[str, ...] = field(compare=False)
    """The options as the client knows them, byte for byte."""
    legend: Mapping[str, object] = field(compare=False, default_factory=dict)
    """Of a score: the levels as they were sent."""

    @property
    def chars(self) -> int:
        return len(self.instructions) + sum(map(len, self.names)) + sum(map(len, self.meanings))


@dataclass(frozen=True, slots=True)
class SystemOneRequest:
    """One text and what is asked about it, by question id in the order sent."""

    model: str
    text: str
    """Canonical; JSON where the state was an object or an array."""
    questions: Mapping[str, TypedQuestion]


@dataclass(frozen=True, slots=True)
class Distribution:
    """Probabilities of a question's options, in order: a softmax over its labels, uncalibrated; and the label mass."""

    probabilities: tuple[float, ...]
    mass: float

    @classmethod
    def over(cls, logprobs: Sequence[float], mass: float) -> Distribution:
        top = max(logprobs)
        weights = [math.exp(value - top) for value in logprobs]
        total = math.fsum(weights)
        return cls(tuple(weight / total for weight in weights), mass)


def parse_request(body: bytes, max_bytes: int) -> SystemOneRequest:
    """Raises InvalidQuestions, which names every problem up to a score of them."""
    try:
        document = decode_object(body, max_bytes)
    except InvalidTicket as error:
        raise InvalidQuestions([Problem(("body",), error.detail, error.code)]) from error
    reader = _Reader()
    text = reader.state(document)
    model = reader.model(document)
    questions = reader.questions(document)
    if reader.problems:
        raise InvalidQuestions(reader.problems)
    return SystemOneRequest(model, text, questions)


def answer(question: TypedQuestion, found: Distribution) -> dict[str, Any]:
    """One answer. What the format does not know begins with `x_`."""
    probabilities = found.probabilities
    mass = {"x_label_mass": found.mass}
    match question.type:
        case "noul":
            return {"type": "noul", "noul": probabilities[0], **mass}
        case "choice":
            best = max(range(len(probabilities)), key=probabilities.__getitem__)
            return {
                "type": "choice",
                "choice": question.keys[best],
                "probabilities": dict(zip(question.keys, probabilities, strict=True)),
                "confidence": choice_confidence(probabilities),
                **mass,
            }
        case "score":
            return {
                "type": "score",
                "score": math.fsum(level * p for level, p in enumerate(probabilities)),
                "legend": dict(question.legend),
                "probabilities": dict(zip(question.keys, probabilities, strict=True)),
                "confidence": score_confidence(probabilities),
                **mass,
            }
        case _:
            assert_never(question.type)


def response(model: str, answers: Mapping[str, Mapping[str, Any]], input_tokens: int) -> bytes:
    """`output_tokens` is 0: the model writes nothing. `x_calibrated` is false: no calibration knows these questions."""
    usage = {"input_tokens": input_tokens, "output_tokens": 0}
    return orjson.dumps({"model": model, "answers": answers, "usage": usage, "x_calibrated": False})


def choice_confidence(probabilities: Sequence[float]) -> float:
    """(K max p - 1) / (K - 1): 0 for K equal options, 1 for certainty. How peaked an answer is, not how often right."""
    size = len(probabilities)
    return _within_one((size * max(probabilities) - 1.0) / (size - 1))


def score_confidence(probabilities: Sequence[float]) -> float:
    """1 less the mean distance from the likeliest level, in units of that which equal levels have from their middle."""
    size = len(probabilities)
    mode = max(range(size), key=probabilities.__getitem__)
    spread = math.fsum(p * abs(level - mode) for level, p in enumerate(probabilities))
    uniform = math.fsum(abs(level - (size - 1) / 2) for level in range(size)) / size
    return _within_one(1.0 - spread / uniform)


def _within_one(value: float) -> float:
    return min(1.0, max(0.0, value))


class _Reader:
    """Reads the parts of a body and collects what is wrong with them."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def _wrong(self, place: Sequence[str | int], message: str, code: str) -> None:
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(Problem(("body", *place), message, code))

    def state(self, document: Mapping[str, Any]) -> str:
        if "state" not in document:
            self._wrong(
                ["state"], "state is missing: send the text, or a JSON object or array, to ask about", "missing"
            )
            return ""
        return self._text(["state"], document["state"])

    def model(self, document: Mapping[str, Any]) -> str:
        name = document.get("model")
        if not isinstance(name, str):
            self._wrong(["model"], f"model is not a string: send '{ALIAS}', or a name of GET /v1/models", "missing")
            return ""
        return name

    def questions(self, document: Mapping[str, Any]) -> dict[str, TypedQuestion]:
        asked = document.get("questions")
        if not isinstance(asked, dict) or not asked:
            self._wrong(
                ["questions"], "questions is no object with at least one question: name each by an id", "missing"
            )
            return {}
        if len(asked) > MAX_QUESTIONS:
            self._wrong(
                ["questions"], f"{len(asked)} questions, at most {MAX_QUESTIONS} go into one request", "too_long"
            )
            return {}
        found = {}
        for name, question in asked.items():
            if (read := self._question(["questions", name], question)) is not None:
                found[name] = read
        return found

    def _question(self, place: list[str | int], question: object) -> TypedQuestion | None:
        if place[-1] == "":
            self._wrong(place, "a question's id is empty: name it", "too_short")
        if not isinstance(question, dict):
            self._wrong(place, "a question is an object with type, instructions and criteria", "dict_type")
            return None
        before = len(self.problems)
        instructions = self._text([*place, "instructions"], question.get("instructions"), may_be_null=True)
        if len(instructions) > MAX_INSTRUCTION_CHARS:
            self._wrong(
                [*place, "instructions"], f"more than {MAX_INSTRUCTION_CHARS} characters: shorten it", "too_long"
            )
        criteria = question.get("criteria")
        kind = question.get("type")
        at = [*place, "criteria"]
        read: TypedQuestion | None = None
        if kind == "noul":
            read = self._noul(at, instructions, criteria)
        elif kind == "choice":
            read = self._choice(at, instructions, criteria)
        elif kind == "score":
            read = self._score(at, instructions, criteria)
        else:
            self._wrong([*place, "type"], "type must be 'noul', 'choice' or 'score'", "union_tag_invalid")
        if read is not None and read.chars > MAX_QUESTION_CHARS:
            self._wrong(place, f"{read.chars} characters, at most {MAX_QUESTION_CHARS} fit: shorten it", "too_long")
        return read if len(self.problems) == before else None

    def _noul(self, place: list[str | int], instructions: str, criteria: object) -> TypedQuestion | None:
        sides = {} if criteria is None else criteria
        if not isinstance(sides, dict) or set(sides) - set(NOUL_OPTIONS):
            self._wrong(place, "criteria of a noul is an object with 'true', 'false' or both", "model_type")
            return None
        meanings = tuple(self._meaning([*place, side], sides.get(side)) for side in NOUL_OPTIONS)
        return TypedQuestion("noul", instructions, ("yes", "no"), meanings, NOUL_OPTIONS)

    def _choice(self, place: list[str | int], instructions: str, criteria: object) -> TypedQuestion | None:
        if not isinstance(criteria, dict):
            self._wrong(place, "criteria of a choice is an object: option name to description or null", "dict_type")
            return None
        if not 2 <= len(criteria) <= MAX_OPTIONS:
            code = "too_short" if len(criteria) < 2 else "too_long"
            self._wrong(place, f"{len(criteria)} options: a choice has 2 to {MAX_OPTIONS}", code)
            return None
        names = tuple(canonical(name) for name in criteria)
        seen: set[str] = set()
        for sent, name in zip(criteria, names, strict=True):
            if not name or len(name) > MAX_MEANING_CHARS:
                self._wrong([*place, sent], f"an option's name has 1 to {MAX_MEANING_CHARS} characters", "string_type")
            elif name in seen:
                self._wrong(
                    [*place, sent], "two options read the same: tell them apart by more than spacing", "duplicate"
                )
            seen.add(name)
        meanings = tuple(self._meaning([*place, sent], meaning) for sent, meaning in criteria.items())
        return TypedQuestion("choice", instructions, names, meanings, tuple(criteria))

    def _score(self, place: list[str | int], instructions: str, criteria: object) -> TypedQuestion | None:
        if not isinstance(criteria, list):
            self._wrong(place, "criteria of a score is an array of level descriptions, low to high", "list_type")
            return None
        size = len(criteria)
        if not 2 <= size <= MAX_LEVELS:
            code = "too_short" if size < 2 else "too_long"
            self._wrong(place, f"{size} levels: a score has 2 to {MAX_LEVELS}", code)
            return None
        names = tuple(self._meaning([*place, index], level, needed=True) for index, level in enumerate(criteria))
        meanings = tuple(f"level {index + 1} of {size}" for index in range(size))
        keys = tuple(map(str, range(size)))
        return TypedQuestion("score", instructions, names, meanings, keys, dict(zip(keys, criteria, strict=True)))

    def _meaning(self, place: list[str | int], value: object, *, needed: bool = False) -> str:
        text = self._text(place, value, may_be_null=not needed)
        if len(text) > MAX_MEANING_CHARS:
            self._wrong(place, f"more than {MAX_MEANING_CHARS} characters: shorten it", "too_long")
        elif needed and not text and isinstance(value, str | dict | list):
            self._wrong(place, "a level's description is empty: say what it means", "too_short")
        return text

    def _text(self, place: list[str | int], value: object, *, may_be_null: bool = False) -> str:
        """Canonical text: objects and arrays as JSON. Control tokens are made harmless in all of it."""
        if isinstance(value, str):
            return canonical(value)
        if isinstance(value, dict | list):
            try:
                return canonical(orjson.dumps(value).decode())
            except orjson.JSONEncodeError:
                self._wrong(place, "nested more than 254 levels deep: nest it less deeply", "too_deep")
                return ""
        if value is None and may_be_null:
            return ""
        self._wrong(place, "must be a string, an object or an array", "string_type")
        return ""
