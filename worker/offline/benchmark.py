"""Benchmarks of the statistics: how often each procedure breaks its promise, and how long certifying takes."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from worker.core.artefact import Artefact
from worker.core.calibration import Calibrator
from worker.core.categories import Category, CategorySet, PromptStyle
from worker.core.labels import Labels
from worker.core.primitives import ChooseOne
from worker.core.prompt import build_prompt
from worker.core.rules import Rules, RuleSet
from worker.offline.calibrate import calibrate
from worker.offline.certification import Plan, candidates, certify_candidates
from worker.offline.guarantee_simulation import (
    LANGUAGE_MODEL,
    POPULATIONS,
    PROCEDURES,
    LanguageModelPopulation,
    Outcome,
    simulate,
    simulate_form,
)
from worker.offline.scoring import Progress, ScoredTicket
from worker.ports import EngineIdentity
from worker.runtime.question import Question

OURS = ("rank", "frozen", "split")
"""Procedures that promise something; the others are there to show that the simulation catches what is wrong."""
SIZES = (100, 200, 500, 2000)
SPLIT_SIZES = (500, 2000)
SPLIT_SHARE = 10
"""The split form fits a calibrator in every draw: it gets one draw where the others get so many."""
EVALUATE_ON = 30_000


@dataclass(frozen=True, slots=True)
class GuaranteesTable:
    """Every population, size and procedure at one alpha and delta."""

    outcomes: tuple[Outcome, ...]
    alpha: float
    delta: float
    draws: int

    @property
    def violations(self) -> tuple[Outcome, ...]:
        """Ours that broke alpha in more draws than delta and three standard errors allow."""
        return tuple(o for o in self.outcomes if o.procedure in OURS and not o.holds)


def benchmark_guarantees(
    draws: int,
    seed: int,
    progress: Progress,
    *,
    alpha: float = 0.05,
    delta: float = 0.05,
    sizes: Sequence[int] = SIZES,
    procedures: Sequence[str] = tuple(PROCEDURES),
) -> GuaranteesTable:
    """Violation and coverage of every procedure on the populations of `guarantee_simulation`."""
    split_sizes = [n for n in SPLIT_SIZES if n in sizes]
    total = len(POPULATIONS) * len(sizes) + len(split_sizes)
    outcomes: list[Outcome] = []
    progress(0, total)
    for place, population in enumerate(POPULATIONS):
        for step, n in enumerate(sizes, 1):
            outcomes += simulate(population, procedures, n=n, draws=draws, seed=seed, alpha=alpha, delta=delta)
            progress(place * len(sizes) + step, total)
    for step, n in enumerate(split_sizes, 1):
        few = max(1, draws // SPLIT_SHARE)
        found = simulate_form(
            LANGUAGE_MODEL, "split", n=n, draws=few, seed=seed, alpha=alpha, delta=delta, evaluate_on=EVALUATE_ON
        )
        outcomes.append(found)
        progress(len(POPULATIONS) * len(sizes) + step, total)
    return GuaranteesTable(tuple(outcomes), alpha, delta, draws)


@dataclass(frozen=True, slots=True)
class CertifyingTime:
    """Seconds for `n` labelled tickets of `categories`, and the memory that certifying takes at most."""

    n: int
    categories: int
    deciding_s: float
    """Each ticket through the gates and the calibrator."""
    certifying_s: float
    """Groups and thresholds of the tickets that were decided."""
    calibrating_s: float
    """Everything: selection by cross-validation, fit, decisions, certificates, measures with their intervals."""
    peak_mib: float
    """Of deciding and certifying."""


def benchmark_calibration(
    sizes: Sequence[int], categories: int, seed: int, clock: Callable[[], float], progress: Progress
) -> tuple[CertifyingTime, ...]:
    """One row per size, on drawn scores; no engine is asked. `clock` gives seconds."""
    rows = []
    progress(0, len(sizes))
    for done, n in enumerate(sizes, 1):
        question, tickets = _desk(n, categories, seed)
        rule_set, opened = question.rule_set, _open_artefact(question)
        plan = Plan(rule_set.rules.alpha, rule_set.rules.delta, opened.form)
        began = clock()
        found = candidates(tickets, rule_set, opened)
        decided = clock()
        certify_candidates(found, rule_set, plan)
        certified = clock()
        calibrate(question, tickets, seed=seed, created_at="1970-01-01T00:00:00Z")
        calibrated = clock()
        del found
        tracemalloc.start()
        try:
            certify_candidates(candidates(tickets, rule_set, opened), rule_set, plan)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        rows.append(
            CertifyingTime(n, categories, decided - began, certified - decided, calibrated - certified, peak / 2**20)
        )
        progress(done, len(sizes))
    return tuple(rows)


def _desk(n: int, size: int, seed: int) -> tuple[Question, list[ScoredTicket]]:
    """A question that nobody is asked, and tickets that somebody could have been asked about."""
    names = tuple(f"c{i}" for i in range(size))
    categories = CategorySet(
        id="benchmark",
        version=1,
        language="en",
        prompt=PromptStyle(instruction="Nobody is asked."),
        categories=tuple(Category(id=name, name=name, description=name) for name in names),
    )
    rules = Rules.model_validate({"version": 1, "alpha": 0.05, "delta": 0.05}, strict=False)
    primitive = ChooseOne(build_prompt(categories, names, legend=False), Labels(names, tuple(range(size))))
    identity = EngineIdentity("none", "none", "none", 4096)
    generator = np.random.default_rng(seed)
    population = LanguageModelPopulation(bias=tuple(generator.normal(0.0, 0.6, size).tolist()))
    logprobs, labels = population.draw_logprobs(generator, n)
    tickets = [
        ScoredTicket(f"t{i}", f"ticket {_letters(i)}", label, logprobs=tuple(row), mass=1.0)
        for i, (row, label) in enumerate(zip(logprobs.tolist(), labels.tolist(), strict=True))
    ]
    return Question(RuleSet(categories=categories, rules=rules), primitive, identity), tickets


def _letters(number: int) -> str:
    """Near-duplicates are told apart by letters only."""
    return "".join(chr(ord("a") + int(digit)) for digit in str(number))


def _open_artefact(question: Question) -> Artefact:
    size = len(question.rule_set.categories.ids)
    return Artefact(
        rule_set=question.rule_set.id,
        created_at="1970-01-01T00:00:00Z",
        engine=question.identity.engine,
        model_name=question.identity.model,
        labels=question.rule_set.categories.ids,
        fingerprints=question.fingerprints,
        form="max_probability",
        min_label_mass=0.0,
        calibrator=Calibrator.identity(size),
        certificates=(),
        data={},
    )
