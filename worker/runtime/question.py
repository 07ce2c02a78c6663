"""Question: what is asked of which engine, fully determined, and whether that engine answers it at all."""

from __future__ import annotations

import statistics
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from worker.core.artefact import Fingerprints
from worker.core.budget import Budget
from worker.core.canonicalisers import normaliser, scored_text
from worker.core.categories import CategorySet
from worker.core.digest import fingerprint
from worker.core.labels import Tokenize, choose_labels
from worker.core.primitives import ChooseOne, Plan, Primitive
from worker.core.questions import Behind, FurtherQuestion, choose_question_labels
from worker.core.room import check_room
from worker.core.rotation import Averaged, TurnedBack, turned, turns
from worker.core.rules import RuleSet
from worker.core.scores import LabelScores, Piece, ScoreRequest
from worker.core.turns import fit_turns
from worker.core.two_levels import choose_two_level_labels
from worker.errors import RequestRefused
from worker.ports import EngineIdentity, ScoringEngine, ShowsTemplate
from worker.runtime.reading import Reader
from worker.runtime.sent import Sent

EASY_PER_CATEGORY = 1
EASY_AT_MOST = 12


@dataclass(frozen=True, slots=True)
class Question:
    """A rule set's question put to one engine.

    A further question is one too: under `rule_set` its answers are the categories, and `behind` says where it stands.
    """

    rule_set: RuleSet
    primitive: Primitive
    identity: EngineIdentity
    behind: Behind | None = None
    budget: Budget | None = None
    """What of a ticket fits beside the prompt, by the rules and by the model's context; None: not looked at."""
    sent: Sent = field(default_factory=Sent)
    other_order: Question | None = None
    """The same with its categories in another order; its scores come in the set's own. See gates.other_order_margin."""

    def asking(self, rule_set: RuleSet, primitive: Primitive) -> Question:
        """Another question to the same engine, sent in the same way. Raises LabelError."""
        return replace(self, rule_set=rule_set, primitive=self.sent.wrapped(primitive))

    def reader(self, tokenize: Tokenize) -> Reader | None:
        """What cuts tickets that are too long; `tokenize` is the engine's, asked where there is no local tokenizer."""
        return None if self.budget is None else Reader(self.budget, self.sent.counting(tokenize))

    @property
    def fingerprints(self) -> Fingerprints:
        """Everything that changes scores, or their meaning, when it changes."""
        length = self.rule_set.rules.length
        read = [str(length.most_tokens), length.when_cut] if length.read_otherwise else []
        return Fingerprints(
            model=fingerprint(self.identity.engine, self.identity.model),
            tokenizer=self.identity.tokenizer,
            prompt=fingerprint("read/1", self.primitive.prompt_fingerprint, read)
            if read
            else self.primitive.prompt_fingerprint,
            labels=self.primitive.labels_fingerprint,
            categories=self.rule_set.categories.fingerprint,
            normaliser=normaliser(self.rule_set.categories.prompt.canonicalise),
        )


async def prepare_question(rule_set: RuleSet, engine: ScoringEngine, sent: Sent | None = None) -> Question:
    """Build the prompt, check its labels with the engine's own tokenizer, and that a ticket fits.

    Raises LabelError, PromptError, EngineUnavailable, ConfigError.
    """
    identity = await engine.identity()
    primitive = await choose_primitive(rule_set.categories, None, engine.tokenize)
    sent = sent or Sent()
    await sent.check(primitive, engine)
    question = Question(rule_set, sent.wrapped(primitive), identity, sent=sent)
    question = await _with_room(question, rule_set.categories, primitive, engine)
    if rule_set.rules.gates.other_order_margin is None:
        return question
    by = len(rule_set.categories.ids) // 2
    other = ChooseOne(*await choose_labels(turned(rule_set.categories, by), engine.tokenize))
    return replace(question, other_order=question.asking(rule_set, TurnedBack(other, by)))


async def prepare_further(question: Question, further: FurtherQuestion, engine: ScoringEngine) -> Question:
    """The same for one of the further questions of the rule set whose own is `question`. Raises as it does."""
    categories, first = question.rule_set.categories, question.primitive
    behind = Behind(further, first.prompt, categories.first_cue)
    rules = question.rule_set.for_question(further)
    primitive = await choose_primitive(rules.categories, behind, engine.tokenize)
    asked = replace(question.asking(rules, primitive), behind=behind)
    return await _with_room(asked, categories, first, engine)


async def in_another_order(question: Question, by: int, tokenize: Tokenize) -> Question:
    """The same question with its categories turned by so many places in the prompt, and its scores in that order.

    Words stay with their categories, letters with their places. Raises LabelError.
    """
    one_order = _one_order(turned(question.rule_set.categories, by))
    primitive = await choose_primitive(one_order, question.behind, tokenize)
    rule_set = RuleSet(categories=one_order, rules=question.rule_set.rules, questions=question.rule_set.questions)
    return question.asking(rule_set, primitive)


def _one_order(categories: CategorySet) -> CategorySet:
    return categories.model_copy(update={"prompt": categories.prompt.model_copy(update={"orders": 1})})


async def _with_room(question: Question, categories: CategorySet, first: Primitive, engine: ScoringEngine) -> Question:
    """The question, if a ticket fits beside it; `categories` and `first` wrote the prefix. Raises PromptError."""
    prompt, limit = question.primitive.longest_prompt, question.identity.context_tokens
    room = await check_room(categories, prompt, first.labels.words, limit, engine.tokenize)
    # A token of BOS, which counting a ticket may add, and one for a seam that falls otherwise.
    budget = question.rule_set.rules.length.budget.at_most(room.longest_ticket - 2)
    return replace(question, budget=budget)


async def choose_primitive(categories: CategorySet, behind: Behind | None, tokenize: Tokenize) -> Primitive:
    """How these categories, or the answers to a further question, are asked about. Raises LabelError."""
    if behind is not None:
        return ChooseOne(*await choose_question_labels(behind, categories, tokenize))
    if categories.two_levels is not None:
        return await choose_two_level_labels(categories, categories.two_levels, tokenize)
    by = turns(len(categories.categories), categories.prompt.orders)
    orders = [ChooseOne(*await choose_labels(turned(categories, number), tokenize)) for number in by]
    return orders[0] if len(orders) == 1 else Averaged(tuple(orders), by)


Ask = Callable[[Sequence[ScoreRequest]], Awaitable[Mapping[ScoreRequest, LabelScores | str]]]
"""Scores, or the reason code for which there are none, of requests that share prefix and labels."""


async def score_texts(primitive: Primitive, texts: Iterable[str], ask: Ask) -> dict[str, LabelScores | str]:
    """Every text through its plan, all of them round by round, so that requests which may go together do.

    `texts` are canonical. Raises what `ask` raises.
    """
    plans: dict[str, Plan] = {}
    rounds: dict[str, tuple[ScoreRequest, ...]] = {}
    done: dict[str, LabelScores | str] = {}
    for text in texts:
        try:
            plans[text] = primitive.plan(text)
            rounds[text] = next(plans[text])
        except RequestRefused:
            done[text] = "engine_refused"
    while rounds:
        groups: dict[tuple[Piece, tuple[int, ...]], dict[ScoreRequest, None]] = {}
        for requests in rounds.values():
            for request in requests:
                groups.setdefault((request.prefix, request.label_token_ids), {})[request] = None
        answers: dict[ScoreRequest, LabelScores | str] = {}
        for group in groups.values():
            answers.update(await ask(tuple(group)))
        following = {}
        for text, requests in rounds.items():
            rows = [answers[request] for request in requests]
            scored = [row for row in rows if isinstance(row, LabelScores)]
            if len(scored) < len(rows):
                done[text] = next(row for row in rows if isinstance(row, str))
                continue
            try:
                following[text] = plans[text].send(scored)
            except StopIteration as end:
                done[text] = end.value
        rounds = following
    return done


async def served_template_problem(rule_set: RuleSet, engine: ScoringEngine) -> str | None:
    """One sentence where the engine shows its own chat template, and that writes turns otherwise than this prompt.

    Raises EngineError, PromptError.
    """
    style = rule_set.categories.prompt
    if style.style != "chat" or not isinstance(engine, ShowsTemplate):
        return None
    system, one, answer, two = "Sort the tickets.", "Ticket: one", "Category: two", "Ticket: three"
    theirs = await engine.tokenize_turns([("system", system), ("user", one), ("assistant", answer), ("user", two)])
    if theirs is None:
        return None
    turns = await fit_turns(style.chat_turns, engine.tokenize)
    parts = (turns.start, system, turns.system_user, one, turns.user_assistant, answer, turns.assistant_user, two)
    (ours,) = await engine.tokenize(["".join(parts) + turns.answer])
    if ours == theirs:
        return None
    at = next((n for n, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), len(ours))
    return (
        f"the engine's own chat template writes turns otherwise, from token {at} on ({len(theirs)} tokens, here "
        f"{len(ours)}): name the model's tokenizer_config.json as prompt.template_file"
    )


@dataclass(frozen=True, slots=True)
class EasyCheck:
    """How the engine answered tickets that it was shown in the prompt."""

    masses: tuple[float, ...]
    right: int
    partial: int = 0
    """Of so many the engine did not return every label."""

    @property
    def median_mass(self) -> float:
        return statistics.median(self.masses)

    def problem(self, floor: float) -> str | None:
        """One sentence where the model would rather write something else than a label, else None."""
        if not self.masses:
            return "the engine refused every easy ticket; its log says why"
        if self.median_mass >= floor:
            return None
        return (
            f"on easy tickets the labels together have probability {self.median_mass:.3g}, {floor:.3g} is demanded: "
            "the model would rather write something else (a wrong prompt style, or a thinking model)"
        )


def easy_tickets(rule_set: RuleSet) -> list[tuple[int, str]]:
    """One example of each category as canonical text, with the category's place; up to a dozen."""
    categories = rule_set.categories.categories
    easy = [
        (index, example)
        for index, category in enumerate(categories)
        for example in category.examples[:EASY_PER_CATEGORY]
    ]
    if not easy:  # a set without examples is asked about its own descriptions
        easy = [(index, category.description) for index, category in enumerate(categories)]
    left_out = rule_set.categories.prompt.canonicalise
    return [(index, scored_text(text, left_out)) for index, text in easy[:EASY_AT_MOST]]


async def check_easy_tickets(question: Question, engine: ScoringEngine) -> EasyCheck:
    """Scores the easy tickets. Raises EngineError."""
    easy = easy_tickets(question.rule_set)
    texts = [text for _, text in easy]

    async def ask(requests: Sequence[ScoreRequest]) -> Mapping[ScoreRequest, LabelScores | str]:
        return dict(zip(requests, await engine.score(requests), strict=True))

    found = await score_texts(question.primitive, dict.fromkeys(texts), ask)
    rows = [(index, row) for index, text in easy if isinstance(row := found[text], LabelScores)]
    right = sum(max(range(len(row.logprobs)), key=row.logprobs.__getitem__) == index for index, row in rows)
    return EasyCheck(tuple(row.mass for _, row in rows), right, sum(bool(row.unknown) for _, row in rows))
