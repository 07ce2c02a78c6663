"""Question: what is asked of which engine, fully determined, and whether that engine answers it at all."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from worker.core.artefact import Fingerprints
from worker.core.digest import fingerprint
from worker.core.labels import choose_labels
from worker.core.normalise import NORMALISER_VERSION, canonical
from worker.core.primitives import ChooseOne
from worker.core.rules import RuleSet
from worker.core.scores import LabelScores
from worker.ports import EngineIdentity, ScoringEngine

EASY_PER_CATEGORY = 1
EASY_AT_MOST = 12


@dataclass(frozen=True, slots=True)
class Question:
    """A rule set's question put to one engine."""

    rule_set: RuleSet
    primitive: ChooseOne
    identity: EngineIdentity

    @property
    def fingerprints(self) -> Fingerprints:
        """Everything that changes scores, or their meaning, when it changes."""
        return Fingerprints(
            model=fingerprint(self.identity.engine, self.identity.model),
            tokenizer=self.identity.tokenizer,
            prompt=self.primitive.prompt.fingerprint,
            labels=self.primitive.labels.fingerprint,
            categories=self.rule_set.categories.fingerprint,
            normaliser=NORMALISER_VERSION,
        )


async def prepare_question(rule_set: RuleSet, engine: ScoringEngine) -> Question:
    """Build the prompt and check its labels with the engine's own tokenizer. Raises LabelError, EngineUnavailable."""
    identity = await engine.identity()
    prompt, labels = await choose_labels(rule_set.categories, engine.tokenize)
    return Question(rule_set, ChooseOne(prompt, labels), identity)


@dataclass(frozen=True, slots=True)
class EasyCheck:
    """How the engine answered tickets that it was shown in the prompt."""

    masses: tuple[float, ...]
    right: int

    @property
    def median_mass(self) -> float:
        return statistics.median(self.masses)

    def problem(self, floor: float) -> str | None:
        """One sentence where the model would rather write something else than a label, else None."""
        if self.median_mass >= floor:
            return None
        return (
            f"on easy tickets the labels together have probability {self.median_mass:.3g}, {floor:.3g} is demanded: "
            "the model would rather write something else (a wrong prompt style, or a thinking model)"
        )


async def check_easy_tickets(question: Question, engine: ScoringEngine) -> EasyCheck:
    """Scores one example of each category, up to a dozen. Raises EngineError."""
    categories = question.rule_set.categories.categories
    easy = [
        (index, example)
        for index, category in enumerate(categories)
        for example in category.examples[:EASY_PER_CATEGORY]
    ][:EASY_AT_MOST]
    if not easy:  # a set without examples is asked about its own descriptions
        easy = [(index, category.description) for index, category in enumerate(categories)][:EASY_AT_MOST]
    requests = [question.primitive.request(canonical(text)) for _, text in easy]
    rows: list[LabelScores] = list(await engine.score(requests))
    right = sum(
        max(range(len(row.logprobs)), key=row.logprobs.__getitem__) == index
        for (index, _), row in zip(easy, rows, strict=True)
    )
    return EasyCheck(tuple(row.mass for row in rows), right)
