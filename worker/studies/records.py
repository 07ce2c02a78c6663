"""What can be learnt from recorded decisions without an engine: backtests, and labels out of people's answers."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import orjson

from worker.adapters.decision_log import read_decision_lines
from worker.adapters.files import load_rule_set, write_atomically
from worker.errors import ConfigError
from worker.offline.answer_files import read_texts
from worker.offline.backtest import Backtest, backtest
from worker.offline.backtest_report import backtest_report, limits
from worker.offline.demo import Progress
from worker.offline.labelling import Labelling, as_csv, label
from worker.studies.reports import write_report
from worker.wiring import Desk


def backtest_command(log: Path, new: Path, old: Path | None, progress: Progress) -> Backtest:
    """Recorded decisions again under the rules in `new`; no engine is asked. Raises ConfigError."""
    before = None if old is None else Desk.load(old).side
    return backtest(read_decision_lines(log, progress), Desk.load(new).side, before)


def labels_command(
    folder: Path, answers: Path, log: Path, tickets: Path, to: Path, include: Sequence[str], progress: Progress
) -> Labelling:
    """Writes the labelled file that people's answers make. Raises ConfigError; then nothing is written."""
    for read in (answers, log, tickets):
        if to.exists() and read.exists() and to.samefile(read):
            raise ConfigError(f"{to}: is read from, and would be written over: name another file as --out")
    rule_set = load_rule_set(folder)
    found = label(
        rule_set, answers, read_decision_lines(log, progress), read_texts(tickets), datetime.now(UTC), include
    )
    write_atomically(to, as_csv(found))
    return found


def backtest_limits(result: Backtest) -> tuple[str, ...]:
    """What was refused or kept, and what a log cannot tell."""
    return limits(result)


def write_backtest_report(result: Backtest, folder: Path) -> Path:
    """The page, and everything in it as backtest.json."""
    write_atomically(folder / "backtest.json", orjson.dumps(result.to_dict(), option=orjson.OPT_INDENT_2) + b"\n")
    return write_report(backtest_report(result), folder)
