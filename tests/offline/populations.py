"""Labelled scores from a population like a language model's, as a scored file would hold them."""

from __future__ import annotations

import math

import numpy as np

from worker.core.categories import NONE_ID, Category, CategorySet, PromptStyle
from worker.core.labels import Labels
from worker.core.primitives import ChooseOne
from worker.core.prompt import build_prompt
from worker.core.rules import Rules, RuleSet
from worker.offline.guarantee_simulation import LanguageModelPopulation
from worker.offline.scoring import ScoredTicket
from worker.ports import EngineIdentity
from worker.runtime.question import Question

IDS = ("billing", "access", "network", "printing", "software", "hardware", "travel", "facilities")
FLOOR = 0.1
SYLLABLES = ("ba", "ce", "di", "fo", "gu", "ka", "le", "mi", "no", "pu")


def question(ids: tuple[str, ...] = IDS, *, none: bool = False, **rules: object) -> Question:
    names = (*ids, *((NONE_ID,) if none else ()))
    categories = CategorySet(
        id="desk",
        version=1,
        language="en",
        prompt=PromptStyle(instruction="Sort the tickets."),
        categories=tuple(
            Category(id=name, name=name.title(), description=f"about {name}", examples=(f"a ticket on {name}",))
            for name in names
        ),
    )
    body = {"version": 1, "alpha": 0.1, "delta": 0.1, "gates": {"min_label_mass": FLOOR}, **rules}
    labels = Labels(names, tuple(range(100, 100 + len(names))))
    return Question(
        RuleSet(categories=categories, rules=Rules.model_validate(body, strict=False)),
        ChooseOne(build_prompt(categories, names, legend=False), labels),
        EngineIdentity("stub", "stub-model", "stub-tokenizer", 4096),
    )


def name_of(number: int) -> str:
    """A word without digits for each number: near-duplicates are told apart by letters only."""
    return "".join(SYLLABLES[int(digit)] for digit in str(number))


def scored(
    n: int,
    seed: int,
    *,
    categories: int = len(IDS),
    population: LanguageModelPopulation | None = None,
    low_mass: float = 0.03,
    prefix: str = "t",
) -> list[ScoredTicket]:
    """`n` tickets, 4 % of no category; a share `low_mass` has too little label mass."""
    drawn = population or LanguageModelPopulation(
        bias=tuple(np.random.default_rng(5).normal(0, 0.6, categories).round(2))
    )
    generator = np.random.default_rng(seed)
    logprobs, labels = drawn.draw_logprobs(generator, n)
    mass = np.where(generator.random(n) < low_mass, 0.02, generator.uniform(0.5, 1.0, n))
    languages = generator.choice(["en", "ko"], n)
    return [
        ScoredTicket(
            id=f"{prefix}{i:05d}",
            text=f"ticket {prefix} {name_of(i)} about {name_of(seed)}",
            label=int(label),
            language=str(language),
            logprobs=tuple((row + math.log(m)).tolist()),
            mass=float(m),
        )
        for i, (row, label, m, language) in enumerate(zip(logprobs, labels, mass, languages, strict=True))
    ]
