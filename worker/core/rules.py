"""Rule sets: what the desk demands of a decision, as it is written in rules.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from worker.core.budget import Budget
from worker.core.categories import NONE_ID, CategorySet, Identifier, Strict
from worker.core.digest import fingerprint
from worker.core.misplaced import Misplaced, Place, refuse_twice, same_when_read
from worker.core.modes import Mode, stricter
from worker.core.questions import FurtherQuestion, Questions, ScoreQuestion, as_category_set
from worker.core.rule_kinds import ROUNDING, AnswerRule, Given, KeywordRule, Override, RuleTest
from worker.core.ticket import Intake
from worker.core.topics import NamedTopic, TopicName, check_topics

Alpha = Annotated[float, Field(gt=0.0, le=0.5, description="error allowed among the routed, as a share")]
Delta = Annotated[float, Field(gt=0.0, le=0.5, description="chance that the guarantee fails")]


class Demand(Strict):
    """Stricter or looser than the set for one category; what is left out is the set's own."""

    alpha: Alpha | None = None
    delta: Delta | None = None
    mode: Mode | None = None


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
    answers: TopicName | None = Field(
        None, description="where people's answers come back; named in cards, neither read nor written by a worker"
    )


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
    mode: Mode = Field(
        "auto",
        description="shadow: everything goes to people, without a suggestion; assist: with one; auto: what is "
        "certified is routed. For categories that do not state their own",
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

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        """A decision names the rule that made it: two of one name could not be told apart."""
        rules = [(rule.name, ("overrides", n, "name")) for n, rule in enumerate(self.overrides)]
        rules += [(rule.name, ("answers", n, "name")) for n, rule in enumerate(self.answers)]
        refuse_twice("rule name", rules, same_when_read)
        return self


IN_RULES = ("rules",)
"""The place of rules.yaml in a rule set."""


class RuleSet(Strict):
    """A category set, further questions and the rules over both: what is versioned, fingerprinted and deployed."""

    categories: CategorySet
    rules: Rules
    questions: Questions = Field(default_factory=Questions)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        known = {c.id for c in self.categories.routable}
        named: list[tuple[str, str, Place]] = [
            ("categories", key, ("categories", key)) for key in self.rules.categories
        ]
        for number, rule in enumerate(self.rules.overrides):
            if isinstance(rule, KeywordRule):
                continue
            place = ("overrides", number)
            if (rule.then == "route") != (rule.category is not None):
                problem = f"override '{rule.name}': `category` goes with `then: route`, and only with it"
                raise Misplaced(problem, *IN_RULES, *place)
            if rule.category is not None:
                named.append((f"override '{rule.name}'", rule.category, (*place, "category")))
        for where, category, at in named:
            if category not in known:
                hint = "people get those tickets" if category == NONE_ID else f"known: {', '.join(sorted(known))}"
                raise Misplaced(f"{where}: '{category}' is no category to route to ({hint})", *IN_RULES, *at)
        check_topics(self._named_topics())
        if self.rules.gates.other_order_margin is not None and self.categories.two_levels is not None:
            raise Misplaced(
                "gates.other_order_margin is for categories that are asked about together",
                *IN_RULES,
                "gates",
                "other_order_margin",
            )
        self._check_answer_rules()
        return self

    def _check_answer_rules(self) -> None:
        for number, rule in enumerate(self.rules.answers):
            where, place = f"rule '{rule.name}'", (*IN_RULES, "answers", number)
            question = self.questions.by_id(rule.question)
            if question is None:
                known = ", ".join(q.id for q in self.questions.questions) or "there are none"
                raise Misplaced(
                    f"{where}: no question '{rule.question}' in questions.yaml ({known})", *place, "question"
                )
            ids = [option.id for option in question.options]
            if rule.is_ is not None and rule.is_ not in ids:
                problem = f"{where}: '{rule.is_}' is no answer to '{rule.question}' ({', '.join(ids)})"
                raise Misplaced(problem, *place, "is")
            level = rule.at_least if rule.at_least is not None else rule.expected_at_least
            if level is not None and not (isinstance(question, ScoreQuestion) and level <= len(ids)):
                raise Misplaced(f"{where}: levels are those of a score question, here at most {len(ids)}", *place)
        tests: list[tuple[Place, RuleTest]] = [
            ((*IN_RULES, "tests", n), test) for n, test in enumerate(self.rules.tests)
        ]
        for kind, rules in (("overrides", self.rules.overrides), ("answers", self.rules.answers)):
            for number, each in enumerate(rules):
                tests += [((*IN_RULES, kind, number, "tests", n), test) for n, test in enumerate(each.tests)]
        for at, test in tests:
            for question_id, given in (test.answers or {}).items():
                try:
                    self._check_given(f"test '{test.name}'", question_id, given)
                except ValueError as error:
                    raise Misplaced(str(error), *at, "answers", question_id) from error

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

    def _named_topics(self) -> list[NamedTopic]:
        at = (*IN_RULES, "topics")
        return [
            *(
                NamedTopic(
                    self.categories.topic(c.id),
                    f"category '{c.id}'",
                    "category",
                    ("categories", "categories", n, "topic"),
                )
                for n, c in enumerate(self.categories.categories)
                if c.id != NONE_ID
            ),
            NamedTopic(self.human_topic, "people", "people", (*at, "human")),
            NamedTopic(self.dead_letter_topic, "dead letters", "own", (*at, "dead_letter")),
            NamedTopic(self.decisions_topic, "decisions", "own", (*at, "decisions")),
            *(
                NamedTopic(answers, "people's answers", "own", (*at, "answers"))
                for answers in (self.rules.topics.answers,)
                if answers is not None
            ),
            NamedTopic(self.input_topic, "the input", "input", (*at, "input")),
            *(
                NamedTopic(rule.topic, f"rule '{rule.name}'", "rule", (*IN_RULES, "answers", n, "topic"))
                for n, rule in enumerate(self.rules.answers)
                if rule.topic is not None
            ),
        ]

    @property
    def output_topics(self) -> tuple[str, ...]:
        """Every topic the worker writes to, each once."""
        routes = (self.categories.topic(c.id) for c in self.categories.routable)
        return tuple(dict.fromkeys((*routes, *self.people_topics, self.dead_letter_topic, self.decisions_topic)))

    @property
    def topics_beside_input(self) -> tuple[str, ...]:
        """Those that the worker writes to, and that of people's answers where the rules name one."""
        answers = self.rules.topics.answers
        return self.output_topics if answers is None else (*self.output_topics, answers)

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

    def mode_of(self, category_id: str | None) -> Mode:
        """How much is carried out of a decision for this category; the set's own where it states none, and for None."""
        own = self.rules.categories.get(category_id) if category_id is not None else None
        return own.mode if own is not None and own.mode is not None else self.rules.mode

    def at_most(self, mode: Mode) -> RuleSet:
        """The same rules with no category in a less strict mode than this."""
        if mode == "auto":
            return self
        held = {
            name: demand if demand.mode is None else demand.model_copy(update={"mode": stricter(mode, demand.mode)})
            for name, demand in self.rules.categories.items()
        }
        changes = {"mode": stricter(mode, self.rules.mode), "categories": held}
        return self.model_copy(update={"rules": self.rules.model_copy(update=changes)})

    def for_question(self, question: FurtherQuestion) -> RuleSet:
        """The rules under which a further question is calibrated: its answers as categories, the same promise and
        gates, and overrides that leave out the same tickets.
        """
        overrides = tuple(
            rule if isinstance(rule, KeywordRule) else rule.model_copy(update={"then": "escalate", "category": None})
            for rule in self.rules.overrides
        )
        changes: dict[str, object] = {"overrides": overrides, "categories": {}, "topics": Topics(), "mode": "auto"}
        changes |= {"answers": (), "tests": ()}
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
        unused |= {"mode": True} if self.rules.mode == "auto" else {}
        unused["categories"] = {name: {"mode"} for name, own in self.rules.categories.items() if own.mode is None}
        unused["topics"] = {"answers"}  # where a person's answer goes decides nothing
        rules = self.rules.model_dump_json(exclude=unused)
        later: _Excluded = {} if self.categories.two_levels is not None else {"two_levels": True}
        style = self.categories.prompt
        if plain := {n for n, used in (("orders", style.orders > 1), ("canonicalise", style.canonicalise)) if not used}:
            later["prompt"] = plain
        questions = (self.questions.model_dump_json(),) if self.questions.questions else ()
        return fingerprint("rule-set/1", self.categories.model_dump_json(exclude=later), rules, *questions)

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, ignored_types=(cached_property,))
