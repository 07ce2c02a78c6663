"""Random splits: calibrate on some tickets and hold the others against it, again and again, from one scoring.

A single held-out check says little about a promise that may fail in a share delta of the labelled sets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from worker.core.calibration import Calibrator
from worker.core.reliability import calibration_error
from worker.core.rules import RuleSet
from worker.errors import ConfigError
from worker.offline.calibrate import CalibrationResult, calibrate
from worker.offline.evaluate import Evaluation, evaluate
from worker.offline.near_duplicates import collapse
from worker.offline.scoring import Progress, ScoredTicket
from worker.runtime.question import Question

FEWEST_HELD_OUT = 50


@dataclass(frozen=True, slots=True)
class SplitRow:
    """What `splits` random splits into `n` labelled and `held_out` other tickets came to, at one alpha and delta.

    Shares are of held-out tickets, averaged over the splits; errors are pooled over them, None where nothing routed.
    """

    n: int
    held_out: int
    alpha: float
    delta: float
    splits: int
    calibrator: str
    """The one chosen most often, and in how many splits."""
    split_form: int
    """Splits in which the split form was chosen; in the others the raw margin was certified."""
    raw_accuracy: float
    accuracy: float
    ece_before: float
    ece_after: float
    coverage: float
    nothing_certified: int
    certified_error: float | None
    """Among the labelled tickets above their thresholds."""
    error: float | None
    """Among the held-out tickets that were routed."""
    over: int
    """Splits in which the held-out error is above alpha, which chance in the held-out part alone may bring about."""
    over_beyond_chance: int
    certificates: int
    """Under which something was routed, over all splits."""
    certificates_over: int


def repeat_splits(
    question: Question,
    scored: Iterable[ScoredTicket],
    *,
    sizes: Sequence[int],
    rates: Sequence[tuple[float, float]],
    splits: int,
    seed: int,
    created_at: str,
    progress: Progress,
) -> tuple[SplitRow, ...]:
    """A row for each size and each (alpha, delta). Which tickets fit and which certify is drawn anew in every split.

    Raises ConfigError where a size leaves too few tickets to hold against it.
    """
    pool = collapse(scored).kept
    largest = len(pool) - FEWEST_HELD_OUT
    if not sizes or max(sizes) > largest:
        raise ConfigError(f"{max(sizes, default=0)} labelled of {len(pool)} tickets: at most {largest}, or more --rows")
    generator = np.random.default_rng(seed)
    orders = [generator.permutation(len(pool)).tolist() for _ in range(splits)]
    total, done = len(sizes) * len(rates) * splits, 0
    rows = []
    for n in sizes:
        for alpha, delta in rates:
            asked = replace(question, rule_set=_demanding(question.rule_set, alpha, delta))
            outcomes = []
            for number, order in enumerate(orders):
                # The fit part is drawn by id: another id in every split, or the same tickets would always fit.
                drawn = [replace(pool[i], id=f"{number}/{pool[i].id}") for i in order]
                result = calibrate(asked, drawn[:n], seed=seed, created_at=created_at)
                outcomes.append((result, evaluate(asked, result.artefact, drawn[n:], seed=seed)))
                done += 1
                progress(done, total)
            rows.append(_row(n, alpha, delta, outcomes))
    return tuple(rows)


def _demanding(rule_set: RuleSet, alpha: float, delta: float) -> RuleSet:
    rules = rule_set.rules.model_copy(update={"alpha": alpha, "delta": delta})
    return RuleSet(categories=rule_set.categories, rules=rules)


def _row(n: int, alpha: float, delta: float, outcomes: Sequence[tuple[CalibrationResult, Evaluation]]) -> SplitRow:
    results, evaluations = [r for r, _ in outcomes], [e for _, e in outcomes]
    kinds = Counter(r.selection.candidate.kind for r in results)
    kind, times = kinds.most_common(1)[0]
    parts = [part for e in evaluations for part in e.certificates]
    raw = [_raw(e) for e in evaluations]
    return SplitRow(
        n=n,
        held_out=round(_mean([e.overall.n for e in evaluations])),
        alpha=alpha,
        delta=delta,
        splits=len(outcomes),
        calibrator=f"{kind} {times}/{len(results)}",
        split_form=sum(r.artefact.form == "max_probability" for r in results),
        raw_accuracy=_mean([accuracy for accuracy, _ in raw]),
        accuracy=_mean([e.measures.accuracy.value for e in evaluations]),
        ece_before=_mean([ece for _, ece in raw]),
        ece_after=_mean([e.measures.ece.value for e in evaluations]),
        coverage=_mean([e.overall.m / e.overall.n for e in evaluations]),
        nothing_certified=sum(not any(c.certified for c in r.certificates) for r in results),
        certified_error=_pooled([(sum(c.wrong for c in r.routed), len(r.routed)) for r in results]),
        error=_pooled([(e.overall.k, e.overall.m) for e in evaluations]),
        over=sum(e.overall.exceeded for e in evaluations),
        over_beyond_chance=sum(e.exceeded_beyond_chance for e in evaluations),
        certificates=len(parts),
        certificates_over=sum(part.exceeded for part in parts),
    )


def _raw(evaluation: Evaluation) -> tuple[float, float]:
    """Accuracy and ECE of the raw softmax on the held-out tickets."""
    z = np.array([a.ticket.logprobs for a in evaluation.answered])
    labels = np.array([a.ticket.label for a in evaluation.answered])
    raw = Calibrator.identity(z.shape[1]).apply(z)
    right = raw.argmax(axis=1) == labels
    return float(right.mean()), calibration_error(raw.max(axis=1), right)


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


def _pooled(counts: Sequence[tuple[int, int]]) -> float | None:
    total = sum(n for _, n in counts)
    return sum(k for k, _ in counts) / total if total else None
