"""Orders: one question asked with its categories in several orders, and the average of what comes back.

A model prefers some places of a list, and "the answer is B" names a place. Over r orders that are turned against each
other, no answer that sticks to one place or one letter gets more than 1/r of the probability. The average is the score:
a calibration is fitted on it, and not on that of any single order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from worker.core.categories import CategorySet
from worker.core.digest import fingerprint
from worker.core.labels import Labels
from worker.core.primitives import ChooseOne, Plan
from worker.core.prompt import Prompt
from worker.core.scores import LabelScores, ScoreRequest


def turned(categories: CategorySet, by: int) -> CategorySet:
    """The same categories, in the prompt turned by so many places. Words stay with their categories, letters with
    their places."""
    rows = categories.categories
    return categories.model_copy(update={"categories": rows[by:] + rows[:by]})


def turns(size: int, orders: int) -> tuple[int, ...]:
    """By how much each of `orders` orders is turned, evenly spread; the first not at all."""
    return tuple(round(size * number / orders) % size for number in range(orders))


def turned_back(scores: LabelScores, by: int) -> LabelScores:
    """Scores of a turned question, in the order of the set."""
    size = len(scores.logprobs)
    unknown = tuple(sorted((place + by) % size for place in scores.unknown))
    return LabelScores(scores.logprobs[-by:] + scores.logprobs[:-by] if by else scores.logprobs, scores.mass, unknown)


@dataclass(frozen=True, slots=True)
class TurnedBack:
    """One order other than the set's, whose scores come in the set's order."""

    asked: ChooseOne
    by: int

    @property
    def orders(self) -> tuple[ChooseOne, ...]:
        return (self.asked,)

    @property
    def prompt(self) -> Prompt:
        return self.asked.prompt

    @property
    def labels(self) -> Labels:
        words, ids = self.asked.labels.words, self.asked.labels.token_ids
        at = -self.by % len(words)
        return Labels(words[at:] + words[:at], ids[at:] + ids[:at])

    @property
    def prompt_fingerprint(self) -> str:
        return fingerprint("turned/1", self.asked.prompt_fingerprint, self.by)

    @property
    def labels_fingerprint(self) -> str:
        return self.asked.labels_fingerprint

    @property
    def longest_prompt(self) -> Prompt:
        return self.asked.prompt

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.asked.token_ids

    def request(self, text: str) -> ScoreRequest:
        return self.asked.request(text)

    def plan(self, text: str) -> Plan:
        (row,) = yield (self.asked.request(text),)
        return turned_back(row, self.by)


@dataclass(frozen=True, slots=True)
class Averaged:
    """Every order, asked in one round. `by[0]` is 0: the set's own."""

    orders: tuple[ChooseOne, ...]
    by: tuple[int, ...]

    @property
    def prompt(self) -> Prompt:
        return self.orders[0].prompt

    @property
    def labels(self) -> Labels:
        return self.orders[0].labels

    @property
    def prompt_fingerprint(self) -> str:
        return fingerprint("averaged/1", [one.prompt_fingerprint for one in self.orders], self.by)

    @property
    def labels_fingerprint(self) -> str:
        return fingerprint("averaged/1", [one.labels_fingerprint for one in self.orders])

    @property
    def longest_prompt(self) -> Prompt:
        return max((one.prompt for one in self.orders), key=lambda prompt: len(prompt.prefix) + len(prompt.suffix))

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token for one in self.orders for token in one.token_ids)

    def request(self, text: str) -> ScoreRequest:
        return self.orders[0].request(text)

    def plan(self, text: str) -> Plan:
        rows = yield tuple(one.request(text) for one in self.orders)
        return averaged([turned_back(row, by) for row, by in zip(rows, self.by, strict=True)])


def averaged(rows: list[LabelScores]) -> LabelScores:
    """Mean probabilities. A label that is unknown in one order is unknown, under the mean of what it has at most."""
    size, count = len(rows[0].logprobs), math.log(len(rows))
    values = [_log_sum([row.logprobs[place] for row in rows]) - count for place in range(size)]
    hidden = frozenset(place for row in rows for place in row.unknown)
    if hidden:
        bound = max(values[place] for place in hidden)  # one for all, as an envelope states one
        values = [bound if place in hidden else value for place, value in enumerate(values)]
    return LabelScores.from_logprobs(tuple(min(0.0, value) for value in values), tuple(sorted(hidden)))


def _log_sum(logs: list[float]) -> float:
    top = max(logs)
    return top + math.log(math.fsum(math.exp(value - top) for value in logs))
