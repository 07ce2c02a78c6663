"""Small category sets, artefacts and scores for tests."""

from __future__ import annotations

import math

from worker.core.artefact import Artefact, Fingerprints
from worker.core.calibration import Calibrator
from worker.core.categories import Category, CategorySet, PromptStyle
from worker.core.certificates import Certificate, ScoreForm
from worker.core.rules import Rules, RuleSet
from worker.core.scores import LabelScores

PRINTS = Fingerprints(model="m", tokenizer="t", prompt="p", labels="l", categories="c", normaliser="1")


def category_set(*ids: str, none: bool = False, examples: int = 1, label: bool = True) -> CategorySet:
    names = [*(ids or ("billing", "login", "bug")), *(("none",) if none else ())]
    return CategorySet(
        id="desk",
        version=1,
        language="en",
        prompt=PromptStyle(instruction="Sort the tickets."),
        categories=tuple(
            Category(
                id=name,
                name=name.title(),
                description=f"about {name}",
                label=("other" if name == "none" else name) if label else None,
                examples=tuple(f"{name} example {n}" for n in range(examples)),
            )
            for name in names
        ),
    )


def rule_set(*ids: str, none: bool = False, **rules: object) -> RuleSet:
    body = {"version": 1, "alpha": 0.1, "delta": 0.1, **rules}
    return RuleSet(categories=category_set(*ids, none=none), rules=Rules.model_validate(body, strict=False))


def certificate(*members: str, threshold: float = 0.5, **changes: object) -> Certificate:
    values: dict[str, object] = {
        "group": members[0],
        "members": members,
        "basis": "pool" if len(members) > 1 else "own",
        "procedure": "rank",
        "score": "max_probability",
        "n": 100,
        "m": 60,
        "k": 2,
        "alpha": 0.1,
        "delta": 0.1,
        "level": 1.0,
        "lambda_": threshold,
        "need": None,
        **changes,
    }
    return Certificate(**values)  # type: ignore[arg-type]


def artefact(
    rules: RuleSet, *certificates: Certificate, form: ScoreForm = "max_probability", **changes: object
) -> Artefact:
    ids = rules.categories.ids
    values: dict[str, object] = {
        "rule_set": rules.id,
        "created_at": "2026-01-01T00:00:00Z",
        "engine": "stub",
        "model_name": "m",
        "labels": ids,
        "fingerprints": PRINTS,
        "form": form,
        "min_label_mass": 0.1,
        "calibrator": Calibrator.identity(len(ids)),
        "certificates": certificates or (certificate(*(c.id for c in rules.categories.routable)),),
        "data": {},
        **changes,
    }
    return Artefact(**values).sealed()  # type: ignore[arg-type]


def scores(*probabilities: float) -> LabelScores:
    return LabelScores.from_logprobs(tuple(math.log(p) for p in probabilities))
