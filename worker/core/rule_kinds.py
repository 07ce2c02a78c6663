"""Rule kinds: what a single rule may look at, what it may do then, and the test that it carries."""

from __future__ import annotations

import re
from functools import cached_property
from typing import Annotated, Literal, Self

from jsonpointer import JsonPointer
from pydantic import ConfigDict, Field, model_validator

from worker.core.categories import CategoryId, Identifier, Line, Strict
from worker.core.normalise import canonical
from worker.core.questions import AnswerId
from worker.core.ticket import Pointer, Ticket, value_at
from worker.core.topics import TopicName


class Expectation(Strict):
    """What a rule's own test says must come out of the rules alone, without a score."""

    action: Literal["route", "escalate", "score"]
    category: CategoryId | None = None
    topic: TopicName | None = Field(None, description="of an escalation; left out, any topic of people's will do")

    @model_validator(mode="after")
    def _says_where_to(self) -> Self:
        if (self.action == "route") != (self.category is not None):
            raise ValueError("`category` goes with `action: route`, and only with it")
        if self.topic is not None and self.action != "escalate":
            raise ValueError("`topic` goes with `action: escalate`, and only with it")
        return self


Share = Annotated[float, Field(ge=0.0, le=1.0)]
ROUNDING = 1e-6
"""By so much probabilities that people write may miss 1."""
Given = AnswerId | dict[AnswerId, Share] | None
"""An answer of a test: a sure one, calibrated probabilities of some, or none (`null`): unknown."""


class RuleTest(Strict):
    """One test of the overrides and of the rules over answers: a ticket in, what must come out."""

    name: Line
    text: Line
    language: str | None = None
    channel: str | None = None
    tenant: str | None = None
    metadata: dict[str, str | int | float | bool | None] = Field(default_factory=dict)
    answers: dict[Identifier, Given] | None = Field(
        None, description="what the further questions gave; those left out are unknown. Without it, overrides only"
    )
    expect: Expectation

    def ticket(self) -> Ticket:
        return Ticket(
            id=None,
            text=canonical(self.text),
            tenant=self.tenant,
            channel=self.channel,
            language=self.language,
            metadata=self.metadata,
        )


class KeywordRule(Strict):
    """Sends tickets with a word to people. It cannot route: a ticket's author must not be able to pick a queue."""

    kind: Literal["keyword"]
    name: Line
    any: tuple[Line, ...] = Field(min_length=1, max_length=1000, description="literal words, case ignored")
    whole_word: bool = Field(True, description="false for languages that glue particles to words, such as Korean")
    tests: tuple[RuleTest, ...] = ()

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, ignored_types=(cached_property,))

    @cached_property
    def _words(self) -> tuple[str, ...]:
        return tuple(word.casefold() for word in self.any)

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        # Literals only, so matching is linear: a regular expression of somebody's making could stall the worker.
        words = "|".join(re.escape(word) for word in sorted(self._words, key=len, reverse=True))
        return re.compile(rf"(?<!\w)(?:{words})(?!\w)")

    def matches(self, ticket: Ticket) -> bool:
        text = ticket.text.casefold()
        # One search a word is far faster than one pattern of them all: 1,000 words in 480 kB took that two seconds.
        if not any(word in text for word in self._words):
            return False
        return not self.whole_word or self._pattern.search(text) is not None


class FieldRule(Strict):
    """Routes or escalates by a field that the helpdesk sets, not the ticket's author."""

    kind: Literal["field"]
    name: Line
    pointer: Pointer = Field(description="JSON Pointer into the ticket's metadata, or tenant / channel by name")
    equals: str | int | float | bool
    then: Literal["escalate", "route"]
    category: Identifier | None = Field(None, description="only with `then: route`")
    tests: tuple[RuleTest, ...] = ()

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, ignored_types=(cached_property,))

    @cached_property
    def _parsed(self) -> JsonPointer:
        return JsonPointer(self.pointer)

    def matches(self, ticket: Ticket) -> bool:
        if self.pointer == "/tenant":
            found: object = ticket.tenant
        elif self.pointer == "/channel":
            found = ticket.channel
        else:
            found = value_at(ticket.metadata, self._parsed)
        return type(found) is type(self.equals) and found == self.equals


class LanguageRule(Strict):
    """Routes or escalates by the language that the ticket states."""

    kind: Literal["language"]
    name: Line
    any: tuple[Line, ...] = Field(min_length=1, description="language codes as the tickets carry them")
    then: Literal["escalate", "route"]
    category: Identifier | None = Field(None, description="only with `then: route`")
    tests: tuple[RuleTest, ...] = ()

    def matches(self, ticket: Ticket) -> bool:
        return ticket.language is not None and ticket.language in self.any


Override = Annotated[KeywordRule | FieldRule | LanguageRule, Field(discriminator="kind")]


class AnswerRule(Strict):
    """Raises a ticket to people by the calibrated answer to a further question. It can do nothing else: an answer is
    read from the author's text, and an author must not be able to pick a queue.
    """

    kind: Literal["answer"]
    name: Line
    question: Identifier
    is_: AnswerId | None = Field(None, alias="is", description="with `probability`: this answer is so probable")
    at_least: int | None = Field(
        None, ge=1, description="with `probability`: this level or a higher one is so probable"
    )
    expected_at_least: float | None = Field(None, ge=1.0, description="the expected level is so high")
    probability: float | None = Field(None, gt=0.0, lt=1.0, description="calibrated; that or more")
    then: Literal["escalate"]
    topic: TopicName | None = Field(None, description="of people's own, such as a duty desk's; default the human topic")
    when_unknown: Literal["escalate", "ignore"] = Field(
        "escalate", description="what a question without a calibrated answer means; escalates to the human topic"
    )
    tests: tuple[RuleTest, ...] = ()

    @model_validator(mode="after")
    def _one_condition(self) -> Self:
        stated = [name for name in ("is_", "at_least", "expected_at_least") if getattr(self, name) is not None]
        if len(stated) != 1:
            raise ValueError("state one of `is`, `at_least` and `expected_at_least`")
        if (stated == ["expected_at_least"]) != (self.probability is None):
            raise ValueError("`probability` goes with `is` and `at_least`, and not with `expected_at_least`")
        return self
