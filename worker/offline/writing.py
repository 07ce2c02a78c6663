"""What a model that writes its answers would have decided, beside the same model's scores; nothing is routed by it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import orjson

from worker.adapters.writing import WAYS as WAYS  # noqa: PLC0414 - what is compared unless less is asked for
from worker.adapters.writing import Way, Written
from worker.core.canonicalisers import scored_text
from worker.errors import ConfigError, InvalidAnswer, RequestRefused
from worker.offline.measures import Measured, share
from worker.offline.scoring import Progress, ScoredTicket
from worker.runtime.question import Question


class Writer(Protocol):
    """Writes; it has no scores to give, and so no place behind a port of the runtime."""

    async def write(self, prompt: str, words: Sequence[str], way: Way) -> Written: ...


@dataclass(frozen=True, slots=True)
class WrittenAnswers:
    """One way of answering over the same tickets; `scoring` is the first label by its raw score."""

    way: str
    n: int
    right: Measured
    wrong: int
    unparsable: int
    """Written answers that are no label; there is no telling what they meant."""
    refused: int
    tokens: float
    """Output tokens a ticket, on average."""
    seconds: float
    """A ticket, asked one after the other."""


@dataclass(frozen=True, slots=True)
class ToWrite:
    """One question for a writer: the prompt, the words it may answer with, and the place of the right one."""

    prompt: str
    words: Sequence[str]
    label: int


async def compare_writing(
    question: Question,
    writer: Writer,
    tickets: Sequence[ScoredTicket],
    scoring_s: float,
    clock: Callable[[], float],
    start: Callable[[str], Progress],
    ways: Sequence[Way] = WAYS,
) -> tuple[WrittenAnswers, ...]:
    """Every labelled ticket of a category in every way, and the scores that it already has in `scoring_s` each.

    Raises EngineUnavailable, EngineDropped, ConfigError.
    """
    asked = [ticket for ticket in tickets if ticket.problem is None and ticket.label >= 0]
    if not asked:
        raise ConfigError("no labelled ticket could be scored: there is nothing to compare")
    right = sum(ticket.scores.best_known == ticket.label for ticket in asked)
    words = question.primitive.labels.words
    left_out = question.rule_set.categories.prompt.canonicalise
    to_write = []
    for ticket in asked:
        prompt = question.primitive.request(scored_text(ticket.text, left_out)).prompt
        if not isinstance(prompt, str):
            raise ConfigError("this rule set is asked in token ids, which no model answers in writing")
        to_write.append(ToWrite(prompt, words, ticket.label))
    rows = [by_scoring(right, len(asked), scoring_s)]
    for way in ways:
        rows.append(await written_answers(writer, to_write, way, clock, start(way)))
    return tuple(rows)


def by_scoring(right: int, n: int, seconds: float) -> WrittenAnswers:
    """The row of the scores, which write nothing and so never write what is no label."""
    return WrittenAnswers("scoring", n, share(right, n), n - right, 0, 0, 0.0, seconds)


async def written_answers(
    writer: Writer, asked: Sequence[ToWrite], way: Way, clock: Callable[[], float], progress: Progress
) -> WrittenAnswers:
    """Every question in one way, one after the other. Raises EngineUnavailable, EngineDropped, ConfigError."""
    counts = dict.fromkeys(("right", "wrong", "unparsable", "refused"), 0)
    tokens, began, n = 0, clock(), len(asked)
    for done, question in enumerate(asked, 1):
        try:
            written = await writer.write(question.prompt, question.words, way)
        except (RequestRefused, InvalidAnswer):
            counts["refused"] += 1
        else:
            tokens += written.tokens
            meant = parse_written(written.text, question.words, way)
            counts["unparsable" if meant is None else "right" if meant == question.label else "wrong"] += 1
        progress(done, n)
    seconds = (clock() - began) / n
    right, wrong, unparsable, refused = counts.values()
    return WrittenAnswers(way, n, share(right, n), wrong, unparsable, refused, tokens / n, seconds)


def parse_written(text: str, words: Sequence[str], way: Way) -> int | None:
    """Place of the label that was written, None where it is none of them. Case and quotes do not matter."""
    if way == "json":
        try:
            found = orjson.loads(text)
        except orjson.JSONDecodeError:
            return None
        text = found.get("answer", "") if isinstance(found, dict) else ""
        if not isinstance(text, str):
            return None
    elif way == "thinking":
        _, closed, after = text.rpartition("</think>")
        if "<think>" in text and not closed:
            return None
        answers = re.findall(r"Answer:\s*(.+)", after if closed else text)
        text = answers[-1] if answers else ""
    else:
        text = text.strip().split("\n", 1)[0]
    bare = text.strip().strip("\"'`*.").strip().casefold()
    places = [place for place, word in enumerate(words) if word.casefold() == bare]
    return places[0] if len(places) == 1 else None
