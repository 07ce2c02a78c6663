"""Rule sets: what the desk demands of a decision, as it is written in rules.yaml."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Literal, Self

from jsonpointer import JsonPointer
from pydantic import ConfigDict, Field, model_validator

from worker.core.budget import Budget
from worker.core.categories import NONE_ID, CategoryId, CategorySet, Identifier, Line, Strict, TopicName
from worker.core.digest import fingerprint
from worker.core.normalise import canonical
from worker.core.questions import AnswerId, FurtherQuestion, Questions, ScoreQuestion, as_category_set
from worker.core.ticket import Intake, Pointer, Ticket, value_at

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
    other_order_margin: float | None = Field(
        None,
        gt=0.0,
        le=1.0,
        description="a ticket that would route with its first two calibrated probabilities less apart is asked again "
        "with the categories in another order, and goes to people where that names another",
    )


class Length(Strict):
    """How much of a ticket is read, and what becomes of longer ones."""

    most_tokens: int = Field(
        2_000, ge=16, le=100_000, description="of a longer ticket head and tail are read; at most what the model takes"
    )
    when_cut: Literal["escalate", "decide"] = Field(
        "escalate", description="whether a ticket that was not read whole may route"
    )
    too_long_characters: int = Field(
        100_000, ge=1_000, le=100_000_000, description="a ticket of more canonical text is not asked about at all"
    )
    tenant_characters_per_minute: int | None = Field(
        None, ge=1_000, description="a tenant's text beyond it goes to people unread; for each worker"
    )

    @property
    def read_otherwise(self) -> bool:
        """Whether other tickets, or other parts of them, are decided on than by default: then scores mean another."""
        return (self.most_tokens, self.when_cut) != (Length().most_tokens, "escalate")

    @property
    def budget(self) -> Budget:
        return Budget(self.most_tokens, self.too_long_characters)


class Steering(Strict):
    """What happens to tickets in which a sentence addresses the router."""

    recheck_share: float = Field(
        1.0, ge=0.0, le=1.0, description="so many of those that would route are asked about again without the sentence"
    )


_Excluded = dict[str, bool | set[str] | dict[str, set[str]]]
"""Fields that pydantic leaves out of a dump, wholly or in part."""
DEFAULTS: Mapping[str, Strict] = {"length": Length(), "steering": Steering()}


class Topics(Strict):
    """Topics of the set; those of the categories stand in categories.yaml."""

    input: TopicName | None = Field(None, description="default tickets.<set>")
    human: TopicName | None = Field(None, description="default <set>.human")
    dead_letter: TopicName | None = Field(None, description="default <set>.dead-letter")
    decisions: TopicName | None = Field(None, description="default <set>.decisions")


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
    length: Length = Field(default_factory=Length)
    steering: Steering = Field(default_factory=Steering)
    topics: Topics = Field(default_factory=Topics)
    intake: Intake = Field(default_factory=Intake)
    overrides: tuple[Override, ...] = Field((), max_length=1000, description="the first that matches decides")
    answers: tuple[AnswerRule, ...] = Field(
        (), max_length=100, description="the first that holds says which people; none can route"
    )
    tests: tuple[RuleTest, ...] = Field((), description="tests of all rules together")


class RuleSet(Strict):
    """A category set, further questions and the rules over both: what is versioned, fingerprinted and deployed."""

    categories: CategorySet
    rules: Rules
    questions: Questions = Field(default_factory=Questions)

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
        if self.rules.gates.other_order_margin is not None and self.categories.two_levels is not None:
            raise ValueError("gates.other_order_margin is for categories that are asked about together")
        self._check_answer_rules()
        return self

    def _check_answer_rules(self) -> None:
        taken = {self.input_topic, self.dead_letter_topic, self.decisions_topic}
        taken |= {self.categories.topic(c.id) for c in self.categories.routable}
        for rule in self.rules.answers:
            where = f"rule '{rule.name}'"
            question = self.questions.by_id(rule.question)
            if question is None:
                known = ", ".join(q.id for q in self.questions.questions) or "there are none"
                raise ValueError(f"{where}: no question '{rule.question}' in questions.yaml ({known})")
            ids = [option.id for option in question.options]
            if rule.is_ is not None and rule.is_ not in ids:
                raise ValueError(f"{where}: '{rule.is_}' is no answer to '{rule.question}' ({', '.join(ids)})")
            level = rule.at_least if rule.at_least is not None else rule.expected_at_least
            if level is not None and not (isinstance(question, ScoreQuestion) and level <= len(ids)):
                raise ValueError(f"{where}: levels are those of a score question, here at most {len(ids)}")
            if rule.topic in taken:
                raise ValueError(
                    f"{where}: topic '{rule.topic}' is not one of people's: a ticket's text must not open a queue"
                )
        for each in (*self.rules.tests, *(test for rule in self._rules_with_tests() for test in rule.tests)):
            for question_id, given in (each.answers or {}).items():
                self._check_given(f"test '{each.name}'", question_id, given)

    def _rules_with_tests(self) -> tuple[Override | AnswerRule, ...]:
        return (*self.rules.overrides, *self.rules.answers)

    def _check_given(self, where: str, question_id: str, given: Given) -> None:
        """A test with an answer that cannot be given would hold, or fail, for another reason than it says."""
        question = self.questions.by_id(question_id)
        if question is None:
            known = ", ".join(q.id for q in self.questions.questions) or "there are none"
            raise ValueError(f"{where}: no question '{question_id}' in questions.yaml ({known})")
        ids = [option.id for option in question.options]
        shares = given if isinstance(given, dict) else {} if given is None else {given: 1.0}
        for answer in shares:
            if answer not in ids:
                raise ValueError(f"{where}: '{answer}' is no answer to '{question_id}' ({', '.join(ids)})")
        total = sum(shares.values())
        if total > 1 + ROUNDING or (set(shares) == set(ids) and total < 1 - ROUNDING):
            raise ValueError(f"{where}: the answers to '{question_id}' have probability {total:g} together, and not 1")

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
        return tuple(dict.fromkeys((*routes, *self.people_topics, self.dead_letter_topic, self.decisions_topic)))

    @property
    def people_topics(self) -> tuple[str, ...]:
        """The human topic, and those that rules over answers name."""
        named = (rule.topic for rule in self.rules.answers if rule.topic is not None)
        return tuple(dict.fromkeys((self.human_topic, *named)))

    def demand(self, category_id: str) -> tuple[float, float]:
        """(alpha, delta) that a certificate for this category must at least keep."""
        own: Mapping[str, Demand] = self.rules.categories
        demand = own.get(category_id)
        if demand is None:
            return self.rules.alpha, self.rules.delta
        alpha = demand.alpha if demand.alpha is not None else self.rules.alpha
        delta = demand.delta if demand.delta is not None else self.rules.delta
        return alpha, delta

    def for_question(self, question: FurtherQuestion) -> RuleSet:
        """The rules under which a further question is calibrated: its answers as categories, the same promise and
        gates, and overrides that leave out the same tickets.
        """
        overrides = tuple(
            rule if isinstance(rule, KeywordRule) else rule.model_copy(update={"then": "escalate", "category": None})
            for rule in self.rules.overrides
        )
        changes = {"overrides": overrides, "categories": {}, "topics": Topics(), "answers": (), "tests": ()}
        return RuleSet(
            categories=as_category_set(question, self.categories), rules=self.rules.model_copy(update=changes)
        )

    @cached_property
    def fingerprint(self) -> str:
        """Digest of everything that decides, without the tests."""
        tests = {"__all__": {"tests"}}
        # What came later is left out where it is not used, so that older sets keep their digest.
        unused: _Excluded = {"tests": True, "overrides": tests}
        unused["answers"] = tests if self.rules.answers else True
        if self.rules.gates.other_order_margin is None:
            unused["gates"] = {"other_order_margin"}
        unused |= {name: True for name in ("length", "steering") if getattr(self.rules, name) == DEFAULTS[name]}
        rules = self.rules.model_dump_json(exclude=unused)
        later: _Excluded = {} if self.categories.two_levels is not None else {"two_levels": True}
        style = self.categories.prompt
        if plain := {n for n, used in (("orders", style.orders > 1), ("canonicalise", style.canonicalise)) if not used}:
            later["prompt"] = plain
        questions = (self.questions.model_dump_json(),) if self.questions.questions else ()
        return fingerprint("rule-set/1", self.categories.model_dump_json(exclude=later), rules, *questions)

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, ignored_types=(cached_property,))
