"""Commands that study: calibrate, evaluate, self-test, benchmarks, demo and trials; they need the offline or embedded
extras.
"""

from worker.offline.calibration_run import CalibrateOptions
from worker.studies.benchmarks import (
    attack_command,
    certifying_times,
    choices_command,
    guarantees,
    question_costs,
    splits,
    write_choices,
    writing_command,
)
from worker.studies.calibrations import (
    calibrate_command,
    evaluate_command,
    history_command,
    selftest_command,
    write_artefact,
)
from worker.studies.records import backtest_command, backtest_limits, labels_command, write_backtest_report
from worker.studies.reports import (
    write_calibration_report,
    write_demo_report,
    write_evaluation_report,
    write_selftest_report,
)
from worker.studies.routed import demo, licence_notice, trial
from worker.studies.scored import machine, today

__all__ = [
    "CalibrateOptions",
    "attack_command",
    "backtest_command",
    "backtest_limits",
    "calibrate_command",
    "certifying_times",
    "choices_command",
    "demo",
    "evaluate_command",
    "guarantees",
    "history_command",
    "labels_command",
    "licence_notice",
    "machine",
    "question_costs",
    "selftest_command",
    "splits",
    "today",
    "trial",
    "write_artefact",
    "write_backtest_report",
    "write_calibration_report",
    "write_choices",
    "write_demo_report",
    "write_evaluation_report",
    "write_selftest_report",
    "writing_command",
]
