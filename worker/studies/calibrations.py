"""Calibrate a question, evaluate an artefact, self-test an engine."""

from __future__ import annotations

import asyncio
from pathlib import Path

from worker.adapters.files import CALIBRATION_FILE, calibration_file, write_atomically
from worker.core.artefact import Artefact
from worker.errors import ConfigError
from worker.offline.calibration_run import CalibrateOptions, CalibrationRun, require_labels_of_each, run_calibration
from worker.offline.evaluate import Evaluation, evaluate
from worker.offline.prior import match_history
from worker.offline.selftest import SelfTest, selftest
from worker.offline.traffic import load_shares, load_unlabelled
from worker.settings import Settings
from worker.studies.scored import SEED, Start, labelled_tickets, open_scorer, timestamp
from worker.wiring import Desk


async def calibrate_command(
    settings: Settings,
    folder: Path,
    labelled: Path | None,
    part: str,
    unlabelled: Path | None,
    options: CalibrateOptions,
    journal: Path | None,
    start: Start,
    question_id: str | None = None,
) -> CalibrationRun:
    """Score the tickets (or read them from the journal), fit and certify. Raises ConfigError, EngineError."""
    desk = Desk.load(folder)
    tickets = labelled_tickets(desk, labelled, part, question_id)
    if question_id is not None:
        require_labels_of_each(tickets, [option.id for option in desk.question(question_id).options])
    traffic = load_unlabelled(unlabelled) if unlabelled else ()
    async with open_scorer(settings, desk.rule_set, journal, start, question_id) as scorer:
        return await run_calibration(scorer, tickets, traffic, options, seed=SEED, created_at=timestamp())


async def history_command(
    settings: Settings, folder: Path, shares: Path, unlabelled: Path, replace: bool, journal: Path | None, start: Start
) -> Artefact:
    """Probabilities for a desk without labels. Raises ConfigError, EngineError."""
    desk = Desk.load(folder)
    if not replace and desk.artefact is not None and any(c.certified for c in desk.artefact.certificates):
        raise ConfigError(
            f"{folder / CALIBRATION_FILE} has certificates, and historical shares certify nothing: every ticket would "
            "go to people; add --write to replace it"
        )
    history, traffic = load_shares(shares), load_unlabelled(unlabelled)
    async with open_scorer(settings, desk.rule_set, journal, start) as scorer:
        scored = await scorer.score("unlabelled tickets", traffic)
    return match_history(scorer.question, scored, history, created_at=timestamp())


async def evaluate_command(
    settings: Settings,
    folder: Path,
    labelled: Path | None,
    part: str,
    journal: Path | None,
    start: Start,
    question_id: str | None = None,
) -> Evaluation:
    """Held-out tickets against an artefact of the rule set. Raises ConfigError, EngineError."""
    desk = Desk.load(folder)
    artefact = desk.artefact if question_id is None else desk.further[desk.question(question_id).id]
    if artefact is None:
        path = folder / calibration_file(question_id)
        raise ConfigError(f"{path}: no calibration to evaluate; run `ticket-router calibrate`")
    tickets = labelled_tickets(desk, labelled, part, question_id)
    async with open_scorer(settings, desk.rule_set, journal, start, question_id) as scorer:
        scored = await scorer.score("labelled tickets", tickets)
    return evaluate(scorer.question, artefact, scored, seed=SEED)


async def selftest_command(
    settings: Settings,
    folder: Path,
    labelled: Path | None,
    unlabelled: Path | None,
    repeat: int,
    orders: int,
    start: Start,
    question_id: str | None = None,
) -> SelfTest:
    """Is this engine usable for this rule set? Raises ConfigError, EngineError."""
    desk = Desk.load(folder)
    tickets = load_unlabelled(unlabelled) if unlabelled else labelled_tickets(desk, labelled, "all", question_id)
    async with open_scorer(settings, desk.rule_set, None, start, question_id) as scorer:
        return await selftest(
            scorer.question,
            scorer.engine,
            tickets,
            repeat=repeat,
            orders=orders,
            batch_items=scorer.batch_items,
            progress=start("self-test"),
            sleep=asyncio.sleep,
        )


def write_artefact(artefact: Artefact, folder: Path, question_id: str | None = None) -> Path:
    """calibration.json of the rule set, or that of one of its further questions."""
    path = folder / calibration_file(question_id)
    write_atomically(path, artefact.to_bytes())
    return path
