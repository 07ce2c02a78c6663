"""Calibration run: what a calibration asks the engine about, how often, and which answers serve which purpose."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from worker.adapters.files import Labelled
from worker.core.certificates import ScoreForm
from worker.core.normalise import canonical
from worker.errors import ConfigError
from worker.offline.calibrate import CalibrationResult, calibrate
from worker.offline.certification import Target
from worker.offline.scoring import Progress, ScoredTicket, Sleep, score_labelled
from worker.offline.selftest import SelfTest, selftest
from worker.ports import ScoringEngine
from worker.runtime.question import Question

SELFTEST_TICKETS = 300
"""As many, drawn at random, show flips well enough for a panel: 1 % of them has a 95 % interval of .2 to 2.9 %."""


LEAST_OF_EACH = 10
"""Different texts for each answer to a further question: with fewer its probability is a guess, which rules believe."""


def require_labels_of_each(tickets: Sequence[Labelled], answers: Sequence[str]) -> None:
    """Raises ConfigError unless every answer to a further question stands at enough texts, each with one answer only.

    The rule set's own question needs no such thing: its certificates count what was wrong.
    """
    given: dict[str, set[str]] = {}
    for ticket in tickets:
        given.setdefault(canonical(ticket.text), set()).add(ticket.label)
    counts = Counter(next(iter(labels)) for labels in given.values() if len(labels) == 1)
    short = [f"{answer} {counts[answer]}" for answer in answers if counts[answer] < LEAST_OF_EACH]
    if short:
        raise ConfigError(
            f"too few labelled tickets: each answer needs {LEAST_OF_EACH} different texts that no other answer has, "
            f"and there are: {', '.join(short)}; label more. Without a calibration the answers are recorded and not "
            "believed"
        )


@dataclass(frozen=True, slots=True)
class CalibrateOptions:
    """What is asked of a calibration. None: as the rules say, or as the labels decide."""

    alpha: float | None = None
    delta: float | None = None
    target: Target | None = None
    form: ScoreForm | None = None
    joint: bool = False
    repeat: bool = False
    """Score everything a second time, for the margin gate."""
    selftest: bool = False

    @property
    def what_if(self) -> bool:
        """Whether anything departs from what the rules and the labels decide."""
        return any(value is not None for value in (self.alpha, self.delta, self.target, self.form))


@dataclass(frozen=True, slots=True)
class CalibrationRun:
    """A calibration, and the self-test that its report shows beside it."""

    result: CalibrationResult
    selftest: SelfTest | None


@dataclass(frozen=True, slots=True)
class Scorer:
    """Tickets to scores: an engine, a journal, and a progress bar for each run over the tickets."""

    question: Question
    engine: ScoringEngine
    journal: Path | None
    batch_items: int
    start: Callable[[str], Progress]
    sleep: Sleep

    async def score(self, what: str, tickets: Sequence[Labelled], turn: int = 0) -> list[ScoredTicket]:
        """As `score_labelled`. `what` names the progress bar."""
        return await score_labelled(
            self.question,
            self.engine,
            tickets,
            self.journal,
            self.batch_items,
            self.start(what),
            sleep=self.sleep,
            turn=turn,
        )


async def run_calibration(
    scorer: Scorer,
    labelled: Sequence[Labelled],
    unlabelled: Sequence[Labelled],
    options: CalibrateOptions,
    *,
    seed: int,
    created_at: str,
) -> CalibrationRun:
    """Score, calibrate and certify. `unlabelled` tickets fix the thresholds beforehand where there are any.

    The margin gate is estimated from unlabelled tickets where there are any, since those certify nothing else, and from
    the labelled ones otherwise. Raises ConfigError, EngineError.
    """
    scored = await scorer.score("labelled tickets", labelled)
    traffic = await scorer.score("unlabelled tickets", unlabelled) if unlabelled else []
    pairs: list[tuple[ScoredTicket, ScoredTicket]] = []
    if options.repeat:
        again = await scorer.score("the same again", unlabelled or labelled, turn=1)
        pairs = list(zip(traffic or scored, again, strict=True))
    tested = None
    if options.selftest:
        tested = await selftest(
            scorer.question,
            scorer.engine,
            _some(labelled, SELFTEST_TICKETS),
            journal=scorer.journal,
            batch_items=scorer.batch_items,
            progress=scorer.start("self-test"),
            sleep=scorer.sleep,
        )
    result = calibrate(
        scorer.question,
        scored,
        seed=seed,
        created_at=created_at,
        alpha=options.alpha,
        delta=options.delta,
        joint=options.joint,
        target=options.target or scorer.question.rule_set.rules.target,
        form=options.form,
        unlabelled=traffic,
        repeated=pairs,
    )
    return CalibrationRun(result, tested)


def _some(tickets: Sequence[Labelled], at_most: int) -> Sequence[Labelled]:
    """A random sample that is the same on every machine: the lowest hashes of the ids."""
    return sorted(tickets, key=lambda ticket: hashlib.sha256(b"selftest\x00" + ticket.id.encode()).digest())[:at_most]
