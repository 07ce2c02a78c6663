"""Rule sets: what the desk demands of a decision, as it is written in rules.yaml."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Literal, Self

from jsonpointer import JsonPointer
from pydantic import ConfigDict, Field, model_validator

from worker.core.categories import NONE_ID, CategorySet, Identifier, Line, Strict, TopicName
from worker.core.digest import fingerprint
from worker.core.normalise import canonical
from worker.core.ticket import Intake, Pointer, Ticket

Alpha = Annotated[float, Field(gt=0.0, le=0.5, description="error allowed among the routed, as a share")]
Delta = Annotated[float, Field(gt=0.0, le=0.5, description="chance that the guarantee fails")]


class Demand(Strict):
    """Stricter or looser than the set for one category; what is left out is the set's own."""

    alpha: Alpha | None = None
    delta: Delta | None = None


class Gates(Strict):
    """What a score must pass before its threshold is even asked."""

    min_label_mass: float = Field(
        0.10, ge=0.0, lt=1.0, description="least total probability of all labels as the next token"
    )


class Topics(Strict):
    """Topics of the set; those of the categories stand in categories.yaml."""

    input: TopicName | None = Field(None, description="default tickets.<set>")
    human: TopicName | None = Field(None, description="default <set>.human")
    dead_letter: TopicName | None = Field(None, description="default <set>.dead-letter")
    decisions: TopicName | None = Field(None, description="default <set>.decisions")


class Expectation(Strict):
    """What a rule's own test says must come out of the rules alone, without a score."""

    action: Literal["route", "escalate", "score"]
    category: Identifier | None = None

    @model_validator(mode="after")
    def _says_where_to(self) -> Self:
        if (self.action == "route") != (self.category is not None):
            raise ValueError("`category` goes with `action: route`, and only with it")
        return self


class RuleTest(Strict):
    """One test of the overrides: a ticket in, what must come out."""

    name: Line
    text: Line
    language: str | None = None
    channel: str | None = None
    tenant: str | None = None
    metadata: dict[str, str | int | float | bool | None] = Field(default_factory=dict)
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
    def _pattern(self) -> re.Pattern[str]:
        # Literals only, so matching is linear: a regular expression of somebody's making could stall the worker.
        words = "|".join(re.escape(word.casefold()) for word in sorted(self.any, key=len, reverse=True))
        return re.compile(rf"(?<!\w)(?:{words})(?!\w)" if self.whole_word else words)

    def matches(self, ticket: Ticket) -> bool:
        return self._pattern.search(ticket.text.casefold()) is not None


class FieldRule(Strict):
    """Routes or escalates by a field that the helpdesk sets, not the ticket's author."""

    kind: Literal["field"]
    name: Line
    pointer: Pointer = Field(description="JSON Pointer into the ticket's metadata, or tenant / channel by name")
    equals: str | int | float | bool
    then: Literal["escalate", "route"]
    category: Identifier | None = Field(None, description="only with `then: route`")
    tests: tuple[RuleTest, ...] = ()

    def matches(self, ticket: Ticket) -> bool:
        if self.pointer == "/tenant":
            found: object = ticket.tenant
        elif self.pointer == "/channel":
            found = ticket.channel
        else:
            found = JsonPointer(self.pointer).resolve(ticket.metadata, None)
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


class Rules(Strict):
    """rules.yaml."""

    version: int = Field(ge=1)
    alpha: Alpha
    delta: Delta
    target: Literal["error_among_routed", "misroutes_per_ticket"] = Field(
        "error_among_routed", description="what alpha limits; the second, looser one counts misroutes per ticket of all"
    )
    certify: Literal["each_category", "together"] = Field(
        "each_category",
        description="each_category: a certificate for each that has labels enough, the rest as a pool; together: one "
        "for all, which needs fewer labels and says nothing about a single category",
    )
    categories: dict[Identifier, Demand] = Field(default_factory=dict)
    gates: Gates = Field(default_factory=Gates)
    topics: Topics = Field(default_factory=Topics)
    intake: Intake = Field(default_factory=Intake)
    overrides: tuple[Override, ...] = Field((), max_length=1000, description="the first that matches decides")
    tests: tuple[RuleTest, ...] = Field((), description="tests of all overrides together")


class RuleSet(Strict):
    """A category set and the rules over it; the unit that is versioned, fingerprinted and deployed."""

    categories: CategorySet
    rules: Rules

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        known = {c.id for c in self.categories.routable}
        named = [("categories", key) for key in self.rules.categories]
        for rule in self.rules.overrides:
            if isinstance(rule, KeywordRule):
                continue
            if (rule.then == "route") != (rule.category is not None):
                raise ValueError(f"override '{rule.name}': `category` goes with `then: route`, and only with it")
            if rule.category is not None:
                named.append((f"override '{rule.name}'", rule.category))
        for where, category in named:
            if category not in known:
                hint = "people get those tickets" if category == NONE_ID else f"known: {', '.join(sorted(known))}"
                raise ValueError(f"{where}: '{category}' is no category to route to ({hint})")
        outputs = [self.human_topic, self.dead_letter_topic, self.decisions_topic]
        everything = [*outputs, *(self.categories.topic(c) for c in known)]
        if self.input_topic in everything:
            raise ValueError(f"topic '{self.input_topic}' is input and output: every ticket would go round for ever")
        if len(set(outputs)) < len(outputs) or set(outputs) & {self.categories.topic(c) for c in known}:
            raise ValueError("the human, dead-letter, decisions and category topics must be different topics")
        return self

    @property
    def id(self) -> str:
        return self.categories.id

    @property
    def input_topic(self) -> str:
        return self.rules.topics.input or f"tickets.{self.id}"

    @property
    def human_topic(self) -> str:
        return self.rules.topics.human or f"{self.id}.human"

    @property
    def dead_letter_topic(self) -> str:
        return self.rules.topics.dead_letter or f"{self.id}.dead-letter"

    @property
    def decisions_topic(self) -> str:
        return self.rules.topics.decisions or f"{self.id}.decisions"

    @property
    def output_topics(self) -> tuple[str, ...]:
        """Every topic the worker writes to, each once."""
        routes = (self.categories.topic(c.id) for c in self.categories.routable)
        return tuple(dict.fromkeys((*routes, self.human_topic, self.dead_letter_topic, self.decisions_topic)))

    def demand(self, category_id: str) -> tuple[float, float]:
        """(alpha, delta) that a certificate for this category must at least keep."""
        own: Mapping[str, Demand] = self.rules.categories
        demand = own.get(category_id, Demand())
        alpha = demand.alpha if demand.alpha is not None else self.rules.alpha
        delta = demand.delta if demand.delta is not None else self.rules.delta
        return alpha, delta

    @cached_property
    def fingerprint(self) -> str:
        """Digest of everything that decides, without the tests."""
        rules = self.rules.model_dump_json(exclude={"tests": True, "overrides": {"__all__": {"tests"}}})
        return fingerprint("rule-set/1", self.categories.model_dump_json(), rules)

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, ignored_types=(cached_property,))
