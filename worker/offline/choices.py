"""Choices: questions with options of their own put to an engine; how often and how surely it is right, which places it
prefers, what changes when it is asked again, and how long it takes."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from worker.adapters.choices_file import Choice
from worker.adapters.writing import Way
from worker.core.labels import Labels
from worker.core.primitives import ChooseOne, Primitive
from worker.core.reliability import Band, Monotonicity, bands, bootstrap_ece, monotonicity
from worker.core.score_form import raw_margin
from worker.core.scores import LabelScores, ScoreRequest
from worker.core.systemone import Distribution, TypedQuestion
from worker.core.turns import Turns
from worker.core.typed_question import as_rule_set, put, with_labels
from worker.errors import ConfigError, EngineError
from worker.offline.demo import percentile
from worker.offline.measures import Measured, share
from worker.offline.scoring import Progress, Sleep, ask_engine
from worker.offline.selftest import Flips, count_flips
from worker.offline.writing import ToWrite, Writer, WrittenAnswers, by_scoring, written_answers
from worker.ports import ScoringEngine
from worker.runtime.load import Timed, under_load
from worker.runtime.question import score_texts
from worker.runtime.sent import Sent

INSTRUCTION = "Which of these answers the question?"
"""Where the question is the text itself; where it is about a text, the question is what instructs."""

Answer = LabelScores | str
"""Scores, or the reason code for which there are none."""


@dataclass(frozen=True, slots=True)
class AskedChoice:
    """One question as it is put to the engine, and as it is put to a writer: with its turns and without any."""

    choice: Choice
    text: str
    sent: Primitive
    in_turns: ChooseOne
    plain: ChooseOne


@dataclass(frozen=True, slots=True)
class Pass:
    """One time through all questions; `answers` and `seconds` are in their order."""

    name: str
    at_once: int
    answers: tuple[Answer, ...]
    seconds: tuple[float, ...]

    def seconds_at(self, percent: int) -> float:
        """A percentile of the seconds from request to answer, retries included."""
        return percentile(self.seconds, percent)


@dataclass(frozen=True, slots=True)
class Place:
    """A place among the options, counted from 0. Of the `offered` questions that have it, it is the right one of
    `labelled` and was answered in `predicted`."""

    place: int
    offered: int
    labelled: int
    predicted: int
    right: int


@dataclass(frozen=True, slots=True)
class AnsweredChoice:
    """One question that was scored. `confidence` is the first option's share of the probability of all options: not
    calibrated. Where the engine did not return every label, it is the least that share can be."""

    id: str
    options: int
    answer: int
    predicted: int
    confidence: float
    mass: float


@dataclass(frozen=True, slots=True)
class ChoiceEvaluation:
    """What came of it. Everything but latencies and flips is of the first pass, and counts `answered` questions."""

    questions: int
    answered: tuple[AnsweredChoice, ...]
    unscored: tuple[tuple[str, int], ...]
    """Reason code and number, most frequent first."""
    partial: int
    """Of so many the engine did not return every label."""
    accuracy: Measured
    by_chance: float
    """What guessing would be right on average: the mean of 1 / options."""
    mean_confidence: float
    ece: Measured
    bands: tuple[Band, ...]
    monotonicity: Monotonicity
    median_mass: float
    """Label mass: low where the model would rather write something else than a label."""
    places: tuple[Place, ...]
    flips: tuple[Flips, ...]
    passes: tuple[Pass, ...]
    written: tuple[WrittenAnswers, ...] = ()
    """The first row is scoring, over the same questions; empty where nothing was to be written."""
    unwritten: tuple[tuple[Way, str], ...] = ()
    """Ways that the server did not see through, and why; what was scored is no less true for it."""

    def to_dict(self) -> dict[str, Any]:
        """Strict JSON values; what was not measured is null."""
        return {
            "questions": self.questions,
            "answered": len(self.answered),
            "unscored": dict(self.unscored),
            "partial": self.partial,
            "accuracy": self.accuracy.to_dict(),
            "by_chance": self.by_chance,
            "confidence": "uncalibrated share of the label among the options",
            "mean_confidence": self.mean_confidence,
            "expected_calibration_error": self.ece.to_dict(),
            "bands": [{name: _finite(value) for name, value in asdict(band).items()} for band in self.bands],
            "monotonicity": self.monotonicity,
            "median_label_mass": self.median_mass,
            "places": [asdict(place) for place in self.places],
            "flips": [{"name": f.name, "n": f.n, "flips": f.flips, "rate": f.rate.to_dict()} for f in self.flips],
            "latency_s": [
                {"name": p.name, "at_once": p.at_once, "p50": p.seconds_at(50), "p95": p.seconds_at(95)}
                for p in self.passes
            ],
            "written": [{**asdict(row), "right": row.right.to_dict()} for row in self.written],
            "unwritten": dict(self.unwritten),
            "rows": [asdict(row) for row in self.answered],
        }


async def put_choices(
    choices: Sequence[Choice], turns: Turns | None, engine: ScoringEngine, sent: Sent
) -> tuple[AskedChoice, ...]:
    """Each question with its options as a legend of labels. `turns` are those of a chat model, None for a base model.

    Labels are chosen and checked once for each number of options, behind the shortest prompt that has as many. Raises
    LabelError, and ConfigError where the engine is away.
    """
    labels: dict[int, Labels] = {}
    try:
        for choice in sorted(choices, key=_length):
            if (size := len(choice.options)) not in labels:
                question = _typed(choice)
                found = await put(question, as_rule_set(question, turns), engine.tokenize)
                if not labels:
                    await sent.check(found, engine)
                labels[size] = found.labels
    except EngineError as error:
        raise ConfigError(f"the engine cannot be asked: {error}") from error
    return tuple(_asked(choice, turns, labels[len(choice.options)], sent) for choice in choices)


async def evaluate_choices(
    asked: Sequence[AskedChoice],
    engine: ScoringEngine,
    *,
    at_once: int,
    seed: int,
    clock: Callable[[], float],
    sleep: Sleep,
    start: Callable[[str], Progress],
    writer: Writer | None = None,
    ways: Sequence[Way] = (),
    limit: int = 0,
) -> ChoiceEvaluation:
    """Every question alone, alone again, and with others in flight; the first `limit` that were scored also in writing.

    Asking again tells what the engine's memory of a prompt is worth, and how much answers change when nothing does:
    what they do under load is to be held against that. Raises EngineUnavailable where the engine stays away,
    ConfigError where nothing could be scored.
    """

    async def ask(one: AskedChoice) -> Answer:
        async def requests(batch: Sequence[ScoreRequest]) -> Mapping[ScoreRequest, Answer]:
            return await ask_engine(engine, batch, sleep)

        return (await score_texts(one.sent, [one.text], requests))[one.text]

    await ask(asked[0])  # what is loaded at the first request is no latency of it
    passes = []
    for name, width in (("alone", 1), ("alone, again", 1), (f"{at_once} at once, again", at_once)):
        timed = await under_load([partial(ask, one) for one in asked], width, clock, start(name))
        passes.append(_pass(name, width, timed))
    result = summarise_choices([one.choice for one in asked], passes, seed=seed)
    return result if writer is None else await _in_writing(result, asked, writer, ways, limit, clock, start)


def summarise_choices(choices: Sequence[Choice], passes: Sequence[Pass], *, seed: int) -> ChoiceEvaluation:
    """Raises ConfigError where the first pass scored nothing."""
    pairs = list(zip(choices, passes[0].answers, strict=True))
    answered = [_answered(choice, answer) for choice, answer in pairs if isinstance(answer, LabelScores)]
    unscored = Counter(answer for _, answer in pairs if isinstance(answer, str)).most_common()
    if not answered:
        raise ConfigError(f"no question could be scored: {', '.join(f'{n} {code}' for code, n in unscored)}")
    right = [row.predicted == row.answer for row in answered]
    confidence = [row.confidence for row in answered]
    ece = bootstrap_ece(confidence, right, np.random.default_rng(seed))
    by_band = bands(confidence, right)
    return ChoiceEvaluation(
        questions=len(choices),
        answered=tuple(answered),
        unscored=tuple(unscored),
        partial=sum(isinstance(answer, LabelScores) and bool(answer.unknown) for _, answer in pairs),
        accuracy=share(sum(right), len(right)),
        by_chance=statistics.fmean(1 / row.options for row in answered),
        mean_confidence=statistics.fmean(confidence),
        ece=Measured(ece.value, ece.lower, ece.upper),
        bands=by_band,
        monotonicity=monotonicity(by_band),
        median_mass=statistics.median(row.mass for row in answered),
        places=tuple(_place(answered, place) for place in range(max(row.options for row in answered))),
        flips=_flips(passes),
        passes=tuple(passes),
    )


async def _in_writing(
    result: ChoiceEvaluation,
    asked: Sequence[AskedChoice],
    writer: Writer,
    ways: Sequence[Way],
    limit: int,
    clock: Callable[[], float],
    start: Callable[[str], Progress],
) -> ChoiceEvaluation:
    first = result.passes[0]
    scored = [number for number, answer in enumerate(first.answers) if isinstance(answer, LabelScores)][:limit]
    written, unwritten = [_scoring(asked, first, scored)], []
    for way in ways:
        to_write = [_to_write(asked[number], way) for number in scored]
        try:
            written.append(await written_answers(writer, to_write, way, clock, start(f"writing: {way}")))
        except (EngineError, ConfigError) as error:
            unwritten.append((way, str(error)))
    return replace(result, written=tuple(written), unwritten=tuple(unwritten))


def _length(choice: Choice) -> int:
    return len(choice.question) + len(choice.text or "") + sum(map(len, choice.options))


def _typed(choice: Choice) -> TypedQuestion:
    instructions = INSTRUCTION if choice.text is None else choice.question
    return TypedQuestion("choice", instructions, choice.options, ("",) * len(choice.options), choice.options)


def _asked(choice: Choice, turns: Turns | None, labels: Labels, sent: Sent) -> AskedChoice:
    question = _typed(choice)
    plain = with_labels(as_rule_set(question, None), labels)
    in_turns = plain if turns is None else with_labels(as_rule_set(question, turns), labels)
    return AskedChoice(choice, choice.text or choice.question, sent.wrapped(in_turns), in_turns, plain)


def _pass(name: str, at_once: int, timed: Sequence[Timed[Answer]]) -> Pass:
    return Pass(name, at_once, tuple(one.done for one in timed), tuple(one.seconds for one in timed))


def _answered(choice: Choice, scores: LabelScores) -> AnsweredChoice:
    best = scores.best_known
    confidence = Distribution.over(scores.logprobs, scores.mass).probabilities[best]
    return AnsweredChoice(choice.id, len(choice.options), choice.answer, best, confidence, scores.mass)


def _place(answered: Sequence[AnsweredChoice], place: int) -> Place:
    offered = [row for row in answered if place < row.options]
    return Place(
        place=place,
        offered=len(offered),
        labelled=sum(row.answer == place for row in offered),
        predicted=sum(row.predicted == place for row in offered),
        right=sum(row.predicted == row.answer == place for row in offered),
    )


def _flips(passes: Sequence[Pass]) -> tuple[Flips, ...]:
    """Against the first pass, over the questions that were scored in all."""
    answers = zip(*(one.answers for one in passes), strict=True)
    scored = [[row for row in rows if isinstance(row, LabelScores)] for rows in answers]
    top = [[raw_margin(row.logprobs) for row in rows] for rows in scored if len(rows) == len(passes)]
    return tuple(count_flips(one.name, top, run) for run, one in enumerate(passes) if run > 0)


def _scoring(asked: Sequence[AskedChoice], first: Pass, scored: Sequence[int]) -> WrittenAnswers:
    answers = [(asked[number].choice.answer, first.answers[number]) for number in scored]
    right = sum(isinstance(row, LabelScores) and row.best_known == answer for answer, row in answers)
    return by_scoring(right, len(scored), statistics.fmean(first.seconds[number] for number in scored))


def _to_write(one: AskedChoice, way: Way) -> ToWrite:
    """A server puts its own turns around a message, so that only a completion gets ours."""
    asked = one.in_turns if way == "word" else one.plain
    return ToWrite(asked.prompt.prefix + asked.prompt.item(one.text), asked.labels.words, one.choice.answer)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
