"""Where reports and their figures are written."""

from __future__ import annotations

from pathlib import Path

from worker.adapters.files import write_atomically
from worker.offline.calibration_run import CalibrationRun
from worker.offline.demo_summary import DemoSummary
from worker.offline.evaluate import Evaluation
from worker.offline.report import Report, calibration_report, demo_report, evaluation_report, selftest_report
from worker.offline.selftest import SelfTest


def write_report(report: Report, folder: Path) -> Path:
    """report.html with its figures beside it as PNG."""
    for figure in report.figures:
        write_atomically(folder / f"{figure.name}.png", figure.png)
    path = folder / "report.html"
    write_atomically(path, report.html.encode())
    return path


def write_calibration_report(run: CalibrationRun, folder: Path) -> Path:
    return write_report(calibration_report(run.result, run.selftest), folder)


def write_evaluation_report(result: Evaluation, folder: Path) -> Path:
    return write_report(evaluation_report(result), folder)


def write_selftest_report(result: SelfTest, folder: Path) -> Path:
    return write_report(selftest_report(result), folder)


def write_demo_report(summary: DemoSummary, folder: Path) -> Path:
    return write_report(demo_report(summary), folder)
