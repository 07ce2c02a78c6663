"""Primitives: the shape of a question, from ticket text to score requests, and from their answers to label scores.

A primitive says what to ask as a plan: a generator that yields rounds of requests, is sent their scores in the same
order, and returns the label scores of the whole question. It asks nobody itself, so the worker, the calibration and
the tests each ask in their own way. A yes/no question and a score question are a choice between labels to the engine;
how their answers are read is told in core.answers.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

from worker.core.digest import fingerprint
from worker.core.labels import Labels
from worker.core.prompt import Prompt
from worker.core.scores import LabelScores, ScoreRequest

Plan = Generator[tuple[ScoreRequest, ...], Sequence[LabelScores], LabelScores]
"""Rounds of requests out, one row of scores a request in; returns the scores in label order."""


class Primitive(Protocol):
    """What can be asked about a ticket. `labels` are in the order of the categories."""

    @property
    def prompt(self) -> Prompt:
        """The prompt of the first request."""

    @property
    def labels(self) -> Labels: ...

    @property
    def prompt_fingerprint(self) -> str:
        """Of every prompt that may be asked, and of how their answers are put together."""

    @property
    def labels_fingerprint(self) -> str: ...

    @property
    def longest_prompt(self) -> Prompt:
        """Of the prompts that may be asked, the one with most text around the ticket."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Of every label that is asked for, in a fixed order."""

    def request(self, text: str) -> ScoreRequest:
        """The first request. `text` is canonical (core.normalise)."""

    def plan(self, text: str) -> Plan:
        """All requests. `text` is canonical."""


@dataclass(frozen=True, slots=True)
class ChooseOne:
    """Which one of the labels?"""

    prompt: Prompt
    labels: Labels

    @property
    def prompt_fingerprint(self) -> str:
        return self.prompt.fingerprint

    @property
    def labels_fingerprint(self) -> str:
        return self.labels.fingerprint

    @property
    def longest_prompt(self) -> Prompt:
        return self.prompt

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.labels.token_ids

    def request(self, text: str) -> ScoreRequest:
        """`text` is canonical (core.normalise)."""
        return ScoreRequest(self.prompt.prefix, self.prompt.item(text), self.labels.token_ids)

    def plan(self, text: str) -> Plan:
        (scores,) = yield (self.request(text),)
        return scores


@dataclass(frozen=True, slots=True)
class TwoLevel:
    """Which department, and which of its categories? P(category) = P(department) x P(category | department).

    Departments are asked about from the most probable on, at most `ask_at_most`, and no further than that: a
    department less probable than the best category found so far cannot hold a better one, so where the plan stops by
    itself the first category is the one that asking all departments would have given. A category of a department that
    was not asked about gets an equal share of its department's probability; the only category of a department gets
    all of it, without being asked about.
    """

    departments: ChooseOne
    inside: tuple[ChooseOne | None, ...]
    """The question inside each department; None where it has a single category."""
    members: tuple[tuple[int, ...], ...]
    """Places of each department's categories, in the order of its labels."""
    ask_at_most: int

    @property
    def prompt(self) -> Prompt:
        return self.departments.prompt

    @property
    def labels(self) -> Labels:
        """Each category's label inside its department; the department's own where it has a single category."""
        found = [
            (place, word, token_id)
            for number, (asked, places) in enumerate(zip(self.inside, self.members, strict=True))
            for place, word, token_id in zip(places, *self._labels_inside(number, asked), strict=True)
        ]
        found.sort()
        return Labels(tuple(word for _, word, _ in found), tuple(token_id for _, _, token_id in found))

    @property
    def prompt_fingerprint(self) -> str:
        inside = ("-" if asked is None else asked.prompt.fingerprint for asked in self.inside)
        places = (f"{number}:{place}" for number, places in enumerate(self.members) for place in places)
        return fingerprint("two-levels/1", self.departments.prompt.fingerprint, inside, places, self.ask_at_most)

    @property
    def labels_fingerprint(self) -> str:
        inside = ("-" if asked is None else asked.labels.fingerprint for asked in self.inside)
        return fingerprint("two-levels/1", self.departments.labels.fingerprint, inside)

    @property
    def longest_prompt(self) -> Prompt:
        prompts = (self.prompt, *(asked.prompt for asked in self.inside if asked is not None))
        return max(prompts, key=lambda prompt: len(prompt.prefix) + len(prompt.suffix))

    @property
    def token_ids(self) -> tuple[int, ...]:
        inside = (token_id for asked in self.inside if asked is not None for token_id in asked.token_ids)
        return (*self.departments.token_ids, *inside)

    def request(self, text: str) -> ScoreRequest:
        return self.departments.request(text)

    def plan(self, text: str) -> Plan:
        (above,) = yield (self.departments.request(text),)
        known = set(range(len(self.inside))) - set(above.unknown)
        best = max((above.logprobs[d] for d in known if self.inside[d] is None), default=-math.inf)
        answers: dict[int, LabelScores] = {}
        for department in sorted(known, key=lambda d: (-above.logprobs[d], d)):
            asked = self.inside[department]
            if asked is None:
                continue
            if len(answers) == self.ask_at_most or above.logprobs[department] <= best:
                break
            (row,) = yield (asked.request(text),)
            answers[department] = row
            best = max(best, above.logprobs[department] + row.logprobs[row.best_known])
        return self._multiplied(above, answers)

    def _multiplied(self, above: LabelScores, answers: dict[int, LabelScores]) -> LabelScores:
        """Scores of all categories. What an engine did not return stays unknown, under the product of the bounds."""
        logprobs: dict[int, float] = {}
        unknown: list[int] = []
        for department, places in enumerate(self.members):
            upper, row = above.logprobs[department], answers.get(department)
            if department in above.unknown:
                unknown += places
                logprobs.update(dict.fromkeys(places, upper))
                continue
            for number, place in enumerate(places):
                inside = -math.log(len(places)) if row is None else row.logprobs[number]
                logprobs[place] = min(0.0, upper + inside)  # each level may lie above 1 by rounding
                if row is not None and number in row.unknown:
                    unknown.append(place)
        hidden = frozenset(unknown)
        bound = max((logprobs[place] for place in hidden), default=0.0)  # one for all, as an envelope states one
        values = tuple(bound if place in hidden else logprobs[place] for place in range(len(logprobs)))
        mass = math.fsum(math.exp(value) for place, value in enumerate(values) if place not in hidden)
        return LabelScores(values, min(1.0, mass), tuple(sorted(unknown))).checked()

    def _labels_inside(self, number: int, asked: ChooseOne | None) -> tuple[tuple[str, ...], tuple[int, ...]]:
        if asked is not None:
            return asked.labels.words, asked.labels.token_ids
        above = self.departments.labels
        return (above.words[number],), (above.token_ids[number],)
