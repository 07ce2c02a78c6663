"""The command line: reads arguments, calls, prints, and sets the exit code; decides nothing."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Annotated, Literal, NoReturn

import orjson
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from worker import console, serving
from worker.core.envelope import envelope_json_schema
from worker.errors import ConfigError, RouterError
from worker.settings import load_settings

app = typer.Typer(
    name="ticket-router",
    help="Routes tickets from Kafka with a stated error rate, or to a person.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
out = Console()
err = Console(stderr=True)

CONFIG_ERROR, RUN_ERROR = 2, 3

Rules = Annotated[Path, typer.Option("--rules", help="Folder of a rule set.", show_default=False)]
LabelledFile = Annotated[
    Path | None, typer.Option("--labelled", help="CSV or JSONL with text and label; default: the set's own samples.")
]
Part = Annotated[
    Literal["all", "calibration", "demo"],
    typer.Option(help="Which part of the file: samples are split by a hash of their id."),
]
Scores = Annotated[Path | None, typer.Option("--scores", help="JSONL journal of scores: a second run goes on from it.")]
WhatIf = Annotated[float | None, typer.Option(min=0.0001, max=0.5, help="What if? Nothing is written.")]


def main() -> None:
    """Entry point: our errors are one line and an exit code, never a traceback."""
    try:
        app()
    except RouterError as error:
        fail(error)


def fail(error: RouterError) -> NoReturn:
    err.print(f"ticket-router: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
    sys.exit(CONFIG_ERROR if isinstance(error, ConfigError) else RUN_ERROR)


def studies() -> ModuleType:
    """The commands that need more than the worker does. Raises ConfigError where that is not installed."""
    try:
        from worker import studies as module
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"this command needs '{error.name}': pip install 'ticket-router[offline,embedded]'"
        ) from error
    return module


@contextlib.contextmanager
def bars() -> Iterator[Progress]:
    """Progress bars on standard error."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=err) as progress:
        yield progress


def _bar(progress: Progress, label: str) -> Callable[[int, int], None]:
    task = progress.add_task(label, total=None)
    return lambda done, total: progress.update(task, completed=done, total=total)


@app.command()
def run(rules: Rules) -> None:
    """Run the worker until SIGTERM, against what ROUTER_* names."""
    settings = load_settings()
    asyncio.run(serving.serve(settings, rules, serving.set_up_telemetry(settings)))


@app.command()
def check(rules: Rules) -> None:
    """Check rules, calibration, topics, engine, labels and cache; exit code 1 where something is wrong."""
    settings = load_settings()
    serving.set_up_telemetry(settings, quiet=True)
    findings = asyncio.run(serving.check(settings, rules))
    console.print_findings(out, findings)
    if any(finding.state == "wrong" for finding in findings):
        raise typer.Exit(1)


@app.command()
def topics(
    rules: Rules,
    create: Annotated[bool, typer.Option("--create", help="Create those that are missing.")] = False,
    partitions: Annotated[int, typer.Option(min=1, max=10_000, help="For topics that are created.")] = 6,
    replication: Annotated[
        int, typer.Option(min=-1, max=10, help="For topics that are created; -1: the broker's.")
    ] = -1,
) -> None:
    """List the topics of a rule set, or create them."""
    console.print_topics(out, serving.topics(load_settings(), rules, create, partitions, replication))


@app.command()
def export(
    rules: Rules,
    to: Annotated[Path, typer.Option("--to", help="JSONL file; `-` for standard output.")] = Path("-"),
) -> None:
    """Write every decision on the decisions topic as JSONL, oldest first within a partition."""
    err.print(f"{serving.export(load_settings(), rules, to)} decisions", highlight=False)


@app.command()
def schema() -> None:
    """Print the JSON Schema of the decision envelope."""
    sys.stdout.write(orjson.dumps(envelope_json_schema(), option=orjson.OPT_INDENT_2).decode() + "\n")


@app.command()
def calibrate(
    rules: Rules,
    labelled: LabelledFile = None,
    part: Part = "all",
    joint: Annotated[bool, typer.Option("--joint", help="All certificates hold together with 1 - delta.")] = False,
    alpha: WhatIf = None,
    delta: WhatIf = None,
    write: Annotated[bool, typer.Option("--write", help="Write although alpha or delta was given.")] = False,
    scores: Scores = None,
    report: Annotated[Path, typer.Option(help="Folder for the report and its figures.")] = Path("build/calibration"),
) -> None:
    """Fit a calibration on labelled tickets, certify thresholds, write calibration.json and a report."""
    settings, study = load_settings(), studies()
    serving.set_up_telemetry(settings, quiet=True)
    with bars() as progress:
        tell = _bar(progress, "scoring")
        work = study.calibrate_command(settings, rules, labelled, part, joint, alpha, delta, scores, tell)
        result = asyncio.run(work)
    console.print_calibration(out, result)
    out.print(f"report: {study.write_calibration_report(result, report)}", highlight=False)
    if (alpha is not None or delta is not None) and not write:
        out.print("what if only: nothing was written to the rule set (add --write)", highlight=False)
    else:
        out.print(f"written: {study.write_artefact(result, rules)}", highlight=False)


@app.command()
def evaluate(
    rules: Rules,
    labelled: LabelledFile = None,
    part: Part = "all",
    fail_over: Annotated[
        bool, typer.Option("--fail-over", help="Exit code 1 where alpha is exceeded beyond chance.")
    ] = False,
    scores: Scores = None,
    report: Annotated[Path, typer.Option(help="Folder for the report and its figures.")] = Path("build/evaluation"),
) -> None:
    """Check an existing calibration on labelled tickets that it has not seen."""
    settings, study = load_settings(), studies()
    serving.set_up_telemetry(settings, quiet=True)
    with bars() as progress:
        tell = _bar(progress, "scoring")
        result = asyncio.run(study.evaluate_command(settings, rules, labelled, part, scores, tell))
    console.print_evaluation(out, result)
    out.print(f"report: {study.write_evaluation_report(result, report)}", highlight=False)
    if fail_over and result.exceeded_beyond_chance:
        raise typer.Exit(1)


@app.command()
def selftest(
    rules: Rules,
    labelled: LabelledFile = None,
    repeat: Annotated[int, typer.Option(min=2, max=10, help="Identical runs.")] = 2,
    orders: Annotated[int, typer.Option(min=1, max=20, help="Label orders.")] = 3,
    report: Annotated[Path, typer.Option(help="Folder for the report and its figures.")] = Path("build/selftest"),
) -> None:
    """Is this engine usable? Flips between runs and label orders, positions, label mass, labels; exit code 1 if not."""
    settings, study = load_settings(), studies()
    serving.set_up_telemetry(settings, quiet=True)
    with bars() as progress:
        work = study.selftest_command(settings, rules, labelled, repeat, orders, _bar(progress, "scoring"))
        result = asyncio.run(work)
    console.print_selftest(out, result)
    out.print(f"report: {study.write_selftest_report(result, report)}", highlight=False)
    if not result.usable:
        raise typer.Exit(1)


@app.command()
def demo(
    folder: Annotated[Path, typer.Option("--rule-sets", help="Folder with the demo's sets.")] = Path("routing_rules"),
    report: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("build/demo"),
    tickets: Annotated[int, typer.Option(min=1, max=1000, help="Tickets of each rule set.")] = 60,
) -> None:
    """Route labelled tickets with an embedded broker, cache and model, twice."""
    settings, study = load_settings(), studies()
    serving.set_up_telemetry(settings, quiet=True)
    console.print_licence(out, study.licence_notice())
    with bars() as progress:
        work = study.demo(settings, folder, tickets, lambda label: _bar(progress, label))
        results, summary = asyncio.run(work)
    console.print_demo(out, results)
    out.print(f"report: {study.write_demo_report(summary, report)}", highlight=False)


@app.command()
def trial(
    name: Annotated[str, typer.Argument(help="banking77, clinc150 or ko_petitions.")],
    data: Annotated[Path, typer.Option("--data", help="Folder with the data set's CSV files.", show_default=False)],
    rows: Annotated[int, typer.Option(min=50, max=2000, help="Of each part.")] = 500,
    alpha: Annotated[float, typer.Option(min=0.001, max=0.5)] = 0.1,
    delta: Annotated[float, typer.Option(min=0.001, max=0.5)] = 0.1,
    to: Annotated[Path, typer.Option("--to", help="Folder for the rule set, the scores and the report.")] = Path(
        "build/trials"
    ),
) -> None:
    """Calibrate on one part of a public data set and route the other through Kafka, with the embedded engine."""
    settings, study = load_settings(), studies()
    serving.set_up_telemetry(settings, quiet=True)
    with bars() as progress:
        work = study.trial(settings, name, data, to / name, rows, alpha, delta, lambda label: _bar(progress, label))
        _, calibrated, routed = asyncio.run(work)
    console.print_calibration(out, calibrated)
    console.print_demo(out, [routed])
    out.print(f"report: {study.write_calibration_report(calibrated, to / name)}", highlight=False)


if __name__ == "__main__":
    main()
