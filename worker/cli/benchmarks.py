"""Commands that measure what this software promises, and that show it at work."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from worker.cli.arguments import Engine, LabelledFile, Part, Rules, makeable
from worker.cli.extras import opened, studies
from worker.cli.terminal import bar, bars, err, out, program
from worker.console.benchmarks import (
    print_attacks,
    print_certifying_times,
    print_guarantees,
    print_question_costs,
    print_splits,
    print_writing,
)
from worker.console.calibrations import print_calibration
from worker.console.demo import print_demo, print_estimate, print_licence, print_next
from worker.offline.spreadsheets import formula_note

app = typer.Typer()
benchmark = typer.Typer(help="Measure what this software promises.", no_args_is_help=True)
app.add_typer(benchmark, name="benchmark")

GUARANTEE_DRAWS, QUICK_DRAWS = 5_000, 300


@benchmark.command()
def guarantees(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer draws: under a minute.")] = False,
) -> None:
    """How often each way to a threshold breaks its promise on known populations; exit code 1 where ours does."""
    study = studies()
    with bars() as progress:
        table = study.guarantees(QUICK_DRAWS if quick else GUARANTEE_DRAWS, bar(progress, "simulating"))
    print_guarantees(out, table)
    if table.violations:
        raise typer.Exit(1)


@benchmark.command()
def calibration(
    tickets: Annotated[int, typer.Option(min=1_000, max=100_000, help="Labelled tickets.")] = 10_000,
    categories: Annotated[int, typer.Option(min=2, max=500)] = 50,
) -> None:
    """How long certifying takes, and how much memory; on drawn scores, no engine is asked."""
    study = studies()
    with bars() as progress:
        rows = study.certifying_times(tickets, categories, bar(progress, "certifying"))
    print_certifying_times(out, rows, study.machine(), study.today())


@benchmark.command()
def writing(
    rules: Rules,
    labelled: LabelledFile = None,
    part: Part = "demo",
    tickets: Annotated[int, typer.Option(min=1, max=10_000, help="Labelled tickets, one after the other.")] = 30,
    engine: Engine = None,
) -> None:
    """The same model scores, and writes its answer (a word, JSON, after thinking): how often is each right?"""
    settings, study = opened(engine)
    with bars() as progress:
        work = study.writing_command(settings, rules, labelled, part, tickets, partial(bar, progress))
        rows = asyncio.run(work)
    print_writing(out, rows, study.machine(), study.today())


@benchmark.command()
def attacks(
    rules: Rules,
    part: Part = "all",
    each: Annotated[int, typer.Option(min=1, max=100, help="Honest tickets under each of some 300 templates.")] = 2,
    kind: Annotated[list[str] | None, typer.Option(help="Only this kind of attack; may be repeated.")] = None,
    every: Annotated[int, typer.Option(min=1, max=100, help="Only one template of so many.")] = 1,
    show: Annotated[int, typer.Option(min=0, max=1000, help="So many successful attacks are listed.")] = 20,
    engine: Engine = None,
) -> None:
    """How many attacked tickets end where their author wants; exit code 1 where it is more than alpha allows."""
    settings, study = opened(engine)
    with bars() as progress:
        start = partial(bar, progress)
        table = asyncio.run(study.attack_command(settings, rules, part, each, kind or [], every, start))
    print_attacks(out, table, study.machine(), study.today(), show)
    if table.exceeded:
        raise typer.Exit(1)


@benchmark.command()
def questions(
    rules: Rules,
    tickets: Annotated[int, typer.Option(min=1, max=1000, help="Of the set's samples.")] = 24,
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Over the same tickets; the median counts.")] = 3,
    engine: Engine = None,
) -> None:
    """What a ticket takes with one question, two, three and so on: the cost of each that is added."""
    settings, study = opened(engine)
    with bars() as progress:
        costs = asyncio.run(study.question_costs(settings, rules, tickets, rounds, partial(bar, progress)))
    what = "CPU time" if settings.engine == "llama_cpp" else "time"
    print_question_costs(out, costs, what, study.machine(), study.today())


@app.command()
def splits(
    name: Annotated[str, typer.Argument(help="banking77, clinc150 or ko_petitions.")],
    data: Annotated[Path, typer.Option("--data", help="Folder with the data set's CSV files.", show_default=False)],
    rows: Annotated[int, typer.Option(min=100, max=1000, help="Of each part; both are scored once and mixed.")] = 400,
    splits: Annotated[int, typer.Option(min=1, max=1000, help="Random splits.")] = 20,
    size: Annotated[list[int] | None, typer.Option(help="Labelled tickets; may be repeated.")] = None,
    engine: Engine = "llama_cpp",
    to: Annotated[Path, typer.Option("--to", help="Folder for rule set and scores.")] = Path("build/trials"),
) -> None:
    """Calibrate and check on many random splits of a public data set: how often is alpha really exceeded?"""
    settings, study = opened(engine)
    with bars() as progress:
        start = partial(bar, progress)
        work = study.splits(settings, name, data, to / name, rows, size or [100, 200, 400], splits, start)
        found = asyncio.run(work)
    print_splits(out, name, found, study.machine(), study.today())


@app.command()
def demo(
    folder: Annotated[Path, typer.Option("--rule-sets", help="Folder with the demo's sets.")] = Path("routing_rules"),
    report: Annotated[Path, typer.Option(help="Folder for the report.", callback=makeable)] = Path("build/demo"),
    tickets: Annotated[int, typer.Option(min=1, max=1000, help="Tickets of each rule set.")] = 60,
) -> None:
    """Route labelled tickets with an embedded broker, cache and model, twice."""
    settings, study = opened()
    print_licence(out, study.licence_notice())
    with bars() as progress:
        work = study.demo(settings, folder, tickets, partial(bar, progress), partial(print_estimate, err))
        results, summary = asyncio.run(work)
    print_demo(out, results)
    out.print(f"report: {study.write_demo_report(summary, report)}", highlight=False)
    print_next(out, program(), folder / "helpdesk")


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
    settings, study = opened()
    with bars() as progress:
        work = study.trial(settings, name, data, to / name, rows, alpha, delta, partial(bar, progress))
        made, calibrated, routed = asyncio.run(work)
    print_calibration(out, calibrated.result)
    print_demo(out, [routed])
    out.print(f"report: {study.write_calibration_report(calibrated, to / name)}", highlight=False)
    if note := formula_note(cell for row in made.calibration for cell in (row.id, row.text, row.label)):
        out.print(f"calibration.csv: {note}", style="yellow", markup=False, highlight=False, soft_wrap=True)
