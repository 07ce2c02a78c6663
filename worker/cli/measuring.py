"""Commands that fit, certify and check a calibration on labelled tickets."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from worker.adapters.writing import WAYS
from worker.cli.arguments import (
    JOURNAL,
    Engine,
    FurtherQuestion,
    LabelledFile,
    Part,
    Rules,
    Scores,
    UnlabelledFile,
    WhatIf,
    makeable,
    one_way,
    writable,
)
from worker.cli.extras import opened, studies
from worker.cli.terminal import BEGINS_ANEW, bar, bars, goes_on_from, out
from worker.console.calibrations import (
    print_calibration,
    print_choices,
    print_evaluation,
    print_history,
    print_labelling,
    print_selftest,
)
from worker.core.turns import ChatTemplate
from worker.errors import ConfigError

app = typer.Typer()

FORMS = {"raw": "raw_margin", "split": "max_probability"}
TARGETS = {"error-among-routed": "error_among_routed", "misroutes-per-ticket": "misroutes_per_ticket"}


@app.command()
def calibrate(
    rules: Rules,
    question: FurtherQuestion = None,
    labelled: LabelledFile = None,
    part: Part = "all",
    unlabelled: UnlabelledFile = None,
    joint: Annotated[bool, typer.Option("--joint", help="All certificates hold together with 1 - delta.")] = False,
    target: Annotated[
        Literal["error-among-routed", "misroutes-per-ticket"] | None,
        typer.Option(help="What alpha limits. Default: what rules.yaml says. What if? Nothing is written."),
    ] = None,
    alpha: WhatIf = None,
    delta: WhatIf = None,
    form: Annotated[
        Literal["raw", "split"] | None,
        typer.Option(help="Score form, to compare; by default the labels decide. Nothing is written."),
    ] = None,
    write: Annotated[bool, typer.Option("--write", help="Write although this is a what-if.")] = False,
    repeat: Annotated[
        bool, typer.Option("--repeat", help="Score everything a second time, for the margin gate.")
    ] = False,
    with_selftest: Annotated[
        bool, typer.Option("--selftest", help="Fill the report's panel on flips and label order: more scoring.")
    ] = False,
    history_shares: Annotated[
        Path | None,
        typer.Option(
            "--history-shares",
            help="No labels yet: CSV or JSON of category and share, with --unlabelled. Certifies nothing.",
        ),
    ] = None,
    engine: Engine = None,
    scores: Scores = JOURNAL,
    report: Annotated[Path, typer.Option(help="Folder for the report and its figures.", callback=makeable)] = Path(
        "build/calibration"
    ),
) -> None:
    """Fit a calibration on labelled tickets, certify thresholds, write calibration.json and a report."""
    settings, study = opened(engine)
    if history_shares is not None:
        if unlabelled is None or labelled is not None or question is not None:
            raise ConfigError("--history-shares goes with --unlabelled, and without --labelled and --question")
        with bars(goes_on_from(scores)) as progress:
            start = partial(bar, progress)
            matching = study.history_command(settings, rules, history_shares, unlabelled, write, scores, start)
            artefact = asyncio.run(matching)
        print_history(out, artefact)
        out.print(f"written: {study.write_artefact(artefact, rules)}", highlight=False)
        return
    options = study.CalibrateOptions(
        alpha=alpha,
        delta=delta,
        target=None if target is None else TARGETS[target],
        form=None if form is None else FORMS[form],
        joint=joint,
        repeat=repeat,
        selftest=with_selftest,
    )
    with bars(goes_on_from(scores)) as progress:
        start = partial(bar, progress)
        work = study.calibrate_command(settings, rules, labelled, part, unlabelled, options, scores, start, question)
        done = asyncio.run(work)
    print_calibration(out, done.result)
    out.print(f"report: {study.write_calibration_report(done, report)}", highlight=False)
    if options.what_if and not write:
        out.print("what if only: nothing was written to the rule set (add --write)", highlight=False)
    else:
        out.print(f"written: {study.write_artefact(done.result.artefact, rules, question)}", highlight=False)


@app.command()
def evaluate(
    rules: Annotated[
        Path | None,
        typer.Option("--rules", help="Folder of a rule set; with --choices only its prompt style counts."),
    ] = None,
    question: FurtherQuestion = None,
    labelled: LabelledFile = None,
    part: Part = "all",
    fail_over: Annotated[
        bool, typer.Option("--fail-over", help="Exit code 1 where alpha is exceeded beyond chance.")
    ] = False,
    choices: Annotated[
        Path | None,
        typer.Option(
            "--choices",
            help="In place of a calibration: multiple-choice questions, CSV or JSONL: question, options, answer.",
        ),
    ] = None,
    chat_template: Annotated[
        ChatTemplate | None,
        typer.Option("--chat-template", help="With --choices: the model's family; default: a base model's prompt."),
    ] = None,
    concurrency: Annotated[
        int, typer.Option(min=2, max=1000, help="With --choices: questions at once when asked under load.")
    ] = 8,
    write_too: Annotated[
        list[str] | None,
        typer.Option(
            "--writing",
            parser=one_way,
            metavar="word|json|thinking",
            help="With --choices: also have the model write its answer; may be repeated.",
        ),
    ] = None,
    limit: Annotated[
        int, typer.Option(min=1, max=100_000, help="With --writing: only the first questions, one after the other.")
    ] = 30,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json", help="With --choices: write figures and every question's row to this file.", callback=writable
        ),
    ] = None,
    engine: Engine = None,
    scores: Scores = JOURNAL,
    report: Annotated[Path, typer.Option(help="Folder for the report and its figures.", callback=makeable)] = Path(
        "build/evaluation"
    ),
) -> None:
    """Check an existing calibration on labelled tickets that it has not seen; or, by --choices, how often and how
    surely the engine is right on multiple-choice questions."""
    if choices is None and rules is None:
        raise typer.BadParameter("say --rules FOLDER, or --choices FILE")
    if choices is None and (chat_template is not None or write_too or json_file is not None):
        raise typer.BadParameter("--chat-template, --writing and --json go with --choices")
    if choices is not None and (labelled is not None or question is not None or fail_over):
        raise typer.BadParameter("--labelled, --question and --fail-over are for a calibration, not for --choices")
    if chat_template is not None and rules is not None:
        raise typer.BadParameter("--rules and --chat-template both say how the prompt is written: keep one")
    settings, study = opened(engine)
    if choices is not None:
        with bars(BEGINS_ANEW) as progress:
            start = partial(bar, progress)
            ways = [way for way in WAYS if way in (write_too or ())]
            asking = study.choices_command(settings, choices, rules, chat_template, concurrency, ways, limit, start)
            answered = asyncio.run(asking)
        print_choices(out, answered, study.machine(), study.today())
        if json_file is not None:
            out.print(f"written: {study.write_choices(answered, json_file)}", markup=False, highlight=False)
        return
    with bars(goes_on_from(scores)) as progress:
        start = partial(bar, progress)
        work = study.evaluate_command(settings, rules, labelled, part, scores, start, question)
        result = asyncio.run(work)
    print_evaluation(out, result)
    out.print(f"report: {study.write_evaluation_report(result, report)}", highlight=False)
    if fail_over and result.exceeded_beyond_chance:
        raise typer.Exit(1)


@app.command()
def selftest(
    rules: Rules,
    question: FurtherQuestion = None,
    labelled: LabelledFile = None,
    unlabelled: Annotated[
        Path | None, typer.Option("--unlabelled", help="CSV or JSONL with text, in place of labelled tickets.")
    ] = None,
    repeat: Annotated[int, typer.Option(min=2, max=10, help="Identical runs.")] = 2,
    orders: Annotated[int, typer.Option(min=1, max=20, help="Label orders.")] = 3,
    engine: Engine = None,
    report: Annotated[Path, typer.Option(help="Folder for the report and its figures.", callback=makeable)] = Path(
        "build/selftest"
    ),
) -> None:
    """Is this engine usable? Flips between runs and label orders, positions, label mass, labels; exit code 1 if not."""
    settings, study = opened(engine)
    with bars(BEGINS_ANEW) as progress:
        start = partial(bar, progress)
        work = study.selftest_command(settings, rules, labelled, unlabelled, repeat, orders, start, question)
        result = asyncio.run(work)
    print_selftest(out, result)
    out.print(f"report: {study.write_selftest_report(result, report)}", highlight=False)
    if not result.usable:
        raise typer.Exit(1)


@app.command()
def labels(
    rules: Rules,
    answers: Annotated[Path, typer.Option("--answers", help="JSONL of answer events.", show_default=False)],
    log: Annotated[Path, typer.Option("--log", help="JSONL of decisions, as `export` writes it.", show_default=False)],
    tickets: Annotated[
        Path,
        typer.Option("--tickets", help="CSV or JSONL with id and text: `export --what tickets`.", show_default=False),
    ],
    to: Annotated[Path, typer.Option("--out", help="CSV for calibrate and evaluate.", callback=writable)],
    include: Annotated[
        Literal["assist", "auto", "all"] | None,
        typer.Option(help="Also answers of people who saw the suggestion, given in this mode; they certify nothing."),
    ] = None,
) -> None:
    """Make a labelled file of what people answered in shadow, and say what auto would have got wrong."""
    study = studies()
    modes = () if include is None else ("assist", "auto") if include == "all" else (include,)
    with bars(BEGINS_ANEW) as progress:
        task = progress.add_task("bytes of decisions", total=None)
        found = study.labels_command(
            rules, answers, log, tickets, to, modes,
            lambda done, total: progress.update(task, completed=done, total=total),
        )  # fmt: skip
    print_labelling(out, found)
