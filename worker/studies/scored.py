"""How a study gets labelled tickets, the engine's scores of them, and the date and machine it is printed with."""

from __future__ import annotations

import asyncio
import os
import platform
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

from worker import wiring
from worker.adapters.files import SAMPLES_FILE, Labelled, load_labelled
from worker.core.rules import RuleSet
from worker.offline.calibration_run import Scorer
from worker.offline.demo import Progress, in_calibration_part
from worker.settings import Settings
from worker.wiring import Desk

SEED = 20261130
"""Of everything that is drawn in calibration; any number would do, but always the same one."""
SCORES_FILE = "scores.jsonl"
"""The journal of a trial, beside its rule set."""
Start = Callable[[str], Progress]
"""Makes a progress bar of that name, and gives the function that moves it."""


@asynccontextmanager
async def open_scorer(
    settings: Settings, rule_set: RuleSet, journal: Path | None, start: Start, question_id: str | None = None
) -> AsyncIterator[Scorer]:
    """A rule set's own question, or a further one, put to the first engine of the settings."""
    (_, engine), *_ = wiring.make_engines(settings)
    items = wiring.batch_items(settings)  # where there are no batches, a progress bar loses by them
    try:
        question = await wiring.ask_once(rule_set, engine, question_id, wiring.make_sent(settings))
        yield Scorer(question, engine, journal, items, start, asyncio.sleep)
    finally:
        await engine.aclose()


def labelled_tickets(desk: Desk, file: Path | None, part: str, question_id: str | None = None) -> tuple[Labelled, ...]:
    """Raises ConfigError, also where there is no such question."""
    answers = desk.rule_set.categories.ids
    if question_id is not None:
        answers = tuple(option.id for option in desk.question(question_id).options)
    tickets = load_labelled(file or desk.folder / SAMPLES_FILE, answers, question_id)
    if part == "all":
        return tickets
    return tuple(t for t in tickets if in_calibration_part(t.id) == (part == "calibration"))


def timestamp() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def today() -> str:
    return timestamp()[:10]


def machine() -> str:
    """What a number was measured on."""
    return f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
