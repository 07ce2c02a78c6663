"""The command line: reads arguments, calls, prints, and sets the exit code; decides nothing."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Annotated, Literal, NoReturn

import orjson
import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from worker import console, serving, top
from worker.adapters.writing import WAYS
from worker.core.answer_events import answer_json_schema
from worker.core.schemas import SCHEMAS, SchemaName
from worker.core.turns import ChatTemplate
from worker.errors import ConfigError, RouterError
from worker.offline.replay import Selection
from worker.settings import EngineName, Settings, load_settings

app = typer.Typer(
    name="ticket-router",
    help="Routes tickets from Kafka with a stated error rate, or to a person.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
benchmark = typer.Typer(help="Measure what this software promises.", no_args_is_help=True)
app.add_typer(benchmark, name="benchmark")
prompt = typer.Typer(help="Look at what the model is asked.", no_args_is_help=True)
app.add_typer(prompt, name="prompt")
cache = typer.Typer(help="Look at what Redis remembers, or have it forget.", no_args_is_help=True)
app.add_typer(cache, name="cache")
rule_sets = typer.Typer(help="Test a rule set, and compare two versions of one.", no_args_is_help=True)
app.add_typer(rule_sets, name="rules")
out = Console()
err = Console(stderr=True)

CONFIG_ERROR, RUN_ERROR = 2, 3
PLAIN_EVERY = 20

Rules = Annotated[Path, typer.Option("--rules", help="Folder of a rule set.", show_default=False)]
LabelledFile = Annotated[
    Path | None, typer.Option("--labelled", help="CSV or JSONL with text and label; default: the set's own samples.")
]
FurtherQuestion = Annotated[
    str | None,
    typer.Option("--question", help="Id of a further question (questions.yaml) in place of the set's own."),
]
Part = Annotated[
    Literal["all", "calibration", "demo"],
    typer.Option(help="Which part of the file: samples are split by a hash of their id."),
]
UnlabelledFile = Annotated[
    Path | None, typer.Option("--unlabelled", help="CSV or JSONL with text: current traffic, at least 500 tickets.")
]
Scores = Annotated[Path, typer.Option("--scores", help="JSONL journal of scores: a second run goes on from it.")]
JOURNAL = Path("build/scores.jsonl")
Engine = Annotated[EngineName | None, typer.Option("--engine", help="In place of ROUTER_ENGINE.")]
WhatIf = Annotated[float | None, typer.Option(min=0.0001, max=0.5, help="What if? Nothing is written.")]
FORMS = {"raw": "raw_margin", "split": "max_probability"}
TARGETS = {"error-among-routed": "error_among_routed", "misroutes-per-ticket": "misroutes_per_ticket"}
GUARANTEE_DRAWS, QUICK_DRAWS = 5_000, 300


def _moment(text: str) -> int:
    """Milliseconds since 1970."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise typer.BadParameter("write it as 2026-03-02T08:00:00Z") from error
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)


def _way(text: str) -> str:
    if text not in WAYS:
        raise typer.BadParameter(f"one of {', '.join(WAYS)}, not '{text}'")
    return text


Moment = Annotated[
    int | None,
    typer.Option(parser=_moment, metavar="ISO8601", help="By the time of the records; UTC unless it says otherwise."),
]


def main() -> None:
    """Entry point: our errors are one line and an exit code, never a traceback."""
    _open_standard_streams()
    try:
        app()
    except RouterError as error:
        fail(error)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EPIPE, errno.EIO):
            raise
        _write_nowhere(1)
        fail(RouterError(f"standard output, or a file that was written, takes nothing more: {error.strerror}"))


def fail(error: RouterError) -> NoReturn:
    try:
        err.print(f"ticket-router: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
    except OSError:  # nobody can be told; the exit code still can
        _write_nowhere(2)
    sys.exit(CONFIG_ERROR if isinstance(error, ConfigError) else RUN_ERROR)


def _open_standard_streams() -> None:
    """In place of those that a process was started without: else a socket gets the number of one, and lines meant for
    a person go there."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


def _write_nowhere(number: int) -> None:
    """What is still in the stream's buffer would fail once more at the end, and change the exit code."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)


def studies() -> ModuleType:
    """The commands that need more than the worker does. Raises ConfigError where that is not installed."""
    try:
        from worker import studies as module
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"this command needs '{error.name}': pip install 'ticket-router[offline,embedded]'"
        ) from error
    return module


def _makeable(folder: Path) -> Path:
    """Refuses a folder that could not be written to when the work is done; makes nothing yet."""
    nearest = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise typer.BadParameter(f"{folder} cannot be made a folder: {nearest} is not one that can be written to")
    return folder


def _writable(file: Path | None) -> Path | None:
    """The same for a file that is named at all."""
    if file is not None:
        _makeable(file.parent)
        if file.is_dir():
            raise typer.BadParameter(f"{file} is a folder; name a file")
    return file


class _RateColumn(ProgressColumn):
    """How many a second, over the last half minute."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:.1f}/s" if task.speed else "", style="progress.data.speed")


@contextlib.contextmanager
def bars() -> Iterator[Progress]:
    """Progress bars on standard error."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _RateColumn())
    with Progress(*columns, TimeRemainingColumn(), console=err) as progress:
        yield progress


def _bar(progress: Progress, label: str) -> Callable[[int, int], None]:
    task = progress.add_task(label, total=None)
    started = False

    def move(done: int, total: int) -> None:
        nonlocal started
        if started:
            progress.update(task, completed=done, total=total)
        else:  # what was done before this run is not part of its rate
            progress.reset(task, completed=done, total=total)
            started = True
        if not err.is_terminal and done % PLAIN_EVERY == 0:  # a bar is drawn on terminals only
            err.print(f"{label}: {done} of {total}", markup=False, highlight=False)

    return move


def _settings(engine: EngineName | None = None) -> Settings:
    settings = load_settings()
    return settings if engine is None else settings.model_copy(update={"engine": engine})


@app.command()
def run(rules: Rules) -> None:
    """Run the worker until SIGTERM, against what ROUTER_* names."""
    settings = load_settings()
    serving.run(serving.serve(settings, rules, serving.set_up_telemetry(settings)))


@app.command()
def serve(rules: Rules) -> None:
    """Answer over HTTP until SIGTERM: tickets on POST /v1/decide, typed questions on POST /v1/systemone."""
    settings = load_settings()
    serving.run(serving.serve_http(settings, rules, serving.set_up_telemetry(settings)))


@app.command()
def check(rules: Rules) -> None:
    """Check rules, calibration, topics, engine, labels and cache; exit code 1 where something is wrong."""
    settings = load_settings()
    serving.set_up_telemetry(settings, quiet=True)
    findings = asyncio.run(serving.check(settings, rules))
    console.print_findings(out, findings)
    if any(finding.state == "wrong" for finding in findings):
        raise typer.Exit(1)


app.command("top")(top.command)


@prompt.command("show")
def prompt_show(
    rules: Rules,
    text: Annotated[
        str | None, typer.Option("--text", help="Of the ticket; default: the first example.", show_default=False)
    ] = None,
    engine: Engine = None,
) -> None:
    """Print what is sent, token by token, where the ticket stands, where the label is read, and every fingerprint."""
    settings = _settings(engine)
    serving.set_up_telemetry(settings, quiet=True)
    console.print_prompt(out, asyncio.run(serving.prompt_view(settings, rules, text)))


@prompt.command("turns")
def prompt_turns(
    file: Annotated[Path, typer.Argument(help="tokenizer_config.json or chat_template.jinja of a model.")],
) -> None:
    """Print a chat template as `turns` for categories.yaml, so that the worker needs no Jinja."""
    sys.stdout.write(console.turns_yaml(serving.turns(file)))


OneRuleSet = Annotated[Path | None, typer.Option("--rules", help="Folder of a rule set: only its entries.")]
AtMost = Annotated[int, typer.Option(min=1_000, help="Keys of the server that are looked at.")]


@cache.command("stats")
def cache_stats(rules: OneRuleSet = None, at_most: AtMost = 10_000_000) -> None:
    """Print how many scores Redis remembers of each rule set, their memory, and how long they will stay."""
    console.print_holdings(out, serving.cache_stats(load_settings(), rules, at_most))


@cache.command("flush")
def cache_flush(
    rules: OneRuleSet = None,
    everything: Annotated[bool, typer.Option("--all", help="Of every rule set.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say how much there is, forget nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Ask nothing.")] = False,
    at_most: AtMost = 10_000_000,
) -> None:
    """Have Redis forget the scores of a rule set, or all; they are made anew when tickets need them."""
    if (rules is None) != everything:
        raise typer.BadParameter("say --rules FOLDER, or --all")
    settings = load_settings()
    if dry_run or not yes:
        survey = serving.cache_stats(settings, rules, at_most)
        entries = sum(held.entries for held in survey.holdings.values())
        if dry_run:
            console.print_flush(out, entries, survey.complete, dry_run=True)
            return
        if not sys.stdin.isatty():
            raise ConfigError(f"{entries} entries would be forgotten: say --yes")
        typer.confirm(f"Forget {entries} entries?", abort=True)
    console.print_flush(out, *serving.cache_flush(settings, rules, at_most), dry_run=False)


@rule_sets.command("test")
def rules_test(rules: Rules) -> None:
    """Run the tests that the rule set carries; exit code 1 where one fails. Neither engine nor broker is needed."""
    found = serving.rules_test(rules)
    console.print_rule_tests(out, found)
    if found.failed:
        raise typer.Exit(1)


@rule_sets.command("diff")
def rules_diff(
    old: Annotated[Path, typer.Argument(help="Folder of the rule set as it was.")],
    new: Annotated[Path, typer.Argument(help="Folder of the rule set as it will be.")],
    log: Annotated[
        Path | None, typer.Option("--log", help="Decisions of `export`: also say what moves.", show_default=False)
    ] = None,
) -> None:
    """Say what differs between two versions of a rule set, what expires, and by a log what would move where; exit
    code 1 where they differ."""
    found = serving.rules_diff(old, new)
    console.print_rules_diff(out, found)
    if log is not None:
        _backtest(log, new, old)
    if found.changes:
        raise typer.Exit(1)


@app.command("backtest")
def backtest(
    log: Annotated[Path, typer.Option("--log", help="JSONL of decisions, as `export` writes it.", show_default=False)],
    rules: Annotated[Path, typer.Option("--rules", help="Folder of the new rules.", show_default=False)],
    old: Annotated[
        Path | None, typer.Option("--old", help="Folder of the rules that made the log, where they are at hand.")
    ] = None,
    report: Annotated[Path, typer.Option(help="Folder for the report.", callback=_makeable)] = Path("build/backtest"),
) -> None:
    """Decide recorded decisions again under other rules, without a model, and compare: what moves where?"""
    _backtest(log, rules, old, report)


def _backtest(log: Path, new: Path, old: Path | None, report: Path | None = None) -> None:
    study = studies()
    with bars() as progress:
        task = progress.add_task("bytes of decisions", total=None)
        found = study.backtest_command(
            log, new, old, lambda done, total: progress.update(task, completed=done, total=total)
        )
    console.print_backtest(out, found, study.backtest_limits(found))
    if report is not None:
        out.print(f"report: {study.write_backtest_report(found, report)}", highlight=False)


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
def send(
    rules: Rules,
    tickets: Annotated[Path, typer.Option("--tickets", help="CSV or JSONL with text, and id where there is one.")],
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Only so many.")] = None,
) -> None:
    """Put the tickets of a file on the input topic; their labels are left out."""
    topic, count = serving.send(load_settings(), rules, tickets, limit)
    out.print(f"{count} tickets sent to {topic}", markup=False, highlight=False)


@app.command()
def export(
    rules: Rules,
    to: Annotated[Path, typer.Option("--to", help="JSONL file; `-` for standard output.")] = Path("-"),
    what: Annotated[
        Literal["decisions", "tickets", "answers"],
        typer.Option(help="Decisions; tickets that went to people, as texts; or people's answers (topics.answers)."),
    ] = "decisions",
) -> None:
    """Write every decision on the decisions topic as JSONL, oldest first within a partition; or tickets, or answers."""
    err.print(f"{serving.export(load_settings(), rules, to, what)} {what}", highlight=False)


@app.command()
def labels(
    rules: Rules,
    answers: Annotated[Path, typer.Option("--answers", help="JSONL of answer events.", show_default=False)],
    log: Annotated[Path, typer.Option("--log", help="JSONL of decisions, as `export` writes it.", show_default=False)],
    tickets: Annotated[
        Path,
        typer.Option("--tickets", help="CSV or JSONL with id and text: `export --what tickets`.", show_default=False),
    ],
    to: Annotated[Path, typer.Option("--out", help="CSV for calibrate and evaluate.", callback=_writable)],
    include: Annotated[
        Literal["assist", "auto", "all"] | None,
        typer.Option(help="Also answers of people who saw the suggestion, given in this mode; they certify nothing."),
    ] = None,
) -> None:
    """Make a labelled file of what people answered in shadow, and say what auto would have got wrong."""
    study = studies()
    with bars() as progress:
        task = progress.add_task("bytes of decisions", total=None)
        found = study.labels_command(
            rules, answers, log, tickets, to, ("assist", "auto") if include == "all" else (include,),
            lambda done, total: progress.update(task, completed=done, total=total),
        )  # fmt: skip
    console.print_labelling(out, found)


@app.command()
def audit(rules: Rules, since: Moment = None) -> None:
    """Compare input and output topics: every ticket in one place, once, in order? Exit code 1 where not."""
    ledger = serving.audit(load_settings(), rules, since)
    console.print_ledger(out, ledger)
    if not ledger.clean:
        raise typer.Exit(1)


@app.command()
def replay(
    rules: Rules,
    source: Annotated[
        Literal["dead-letter", "human"], typer.Option("--from", help="Which topic's tickets.", show_default=False)
    ],
    reason: Annotated[str | None, typer.Option(help="Only those with this reason code (docs/messages.md).")] = None,
    since: Moment = None,
    until: Moment = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be sent, send nothing.")] = False,
    max_attempts: Annotated[int, typer.Option(min=1, max=1000, help="A ticket that was sent in so often is left.")] = 5,
) -> None:
    """Send dead letters or escalated tickets to the input topic again, each at most once for every time it came out."""
    selection = Selection(reason, until, max_attempts)
    found = serving.replay(load_settings(), rules, source, since, selection, dry_run=dry_run)
    console.print_replay(out, found, dry_run)


@app.command()
def schema(
    name: Annotated[SchemaName, typer.Argument(help="Which message.")] = "decision",
    rules: Annotated[
        Path | None,
        typer.Option("--rules", help="With `answer`: its categories are this rule set's.", show_default=False),
    ] = None,
) -> None:
    """Print the JSON Schema of a message: decision, card, answer, dead_letter."""
    if rules is not None and name != "answer":
        raise typer.BadParameter("--rules goes with answer")
    found = SCHEMAS[name]() if rules is None else answer_json_schema(serving.load_rules(rules))
    sys.stdout.write(orjson.dumps(found, option=orjson.OPT_INDENT_2).decode() + "\n")


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
    report: Annotated[Path, typer.Option(help="Folder for the report and its figures.", callback=_makeable)] = Path(
        "build/calibration"
    ),
) -> None:
    """Fit a calibration on labelled tickets, certify thresholds, write calibration.json and a report."""
    settings, study = _settings(engine), studies()
    serving.set_up_telemetry(settings, quiet=True)
    if history_shares is not None:
        if unlabelled is None or labelled is not None or question is not None:
            raise ConfigError("--history-shares goes with --unlabelled, and without --labelled and --question")
        with bars() as progress:
            start = partial(_bar, progress)
            matching = study.history_command(settings, rules, history_shares, unlabelled, write, scores, start)
            artefact = asyncio.run(matching)
        console.print_history(out, artefact)
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
    with bars() as progress:
        start = partial(_bar, progress)
        work = study.calibrate_command(settings, rules, labelled, part, unlabelled, options, scores, start, question)
        done = asyncio.run(work)
    console.print_calibration(out, done.result)
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
            parser=_way,
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
            "--json", help="With --choices: write figures and every question's row to this file.", callback=_writable
        ),
    ] = None,
    engine: Engine = None,
    scores: Scores = JOURNAL,
    report: Annotated[Path, typer.Option(help="Folder for the report and its figures.", callback=_makeable)] = Path(
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
    settings, study = _settings(engine), studies()
    serving.set_up_telemetry(settings, quiet=True)
    if choices is not None:
        with bars() as progress:
            start = partial(_bar, progress)
            ways = [way for way in WAYS if way in (write_too or ())]
            asking = study.choices_command(settings, choices, rules, chat_template, concurrency, ways, limit, start)
            answered = asyncio.run(asking)
        console.print_choices(out, answered, study.machine(), study.today())
        if json_file is not None:
            out.print(f"written: {study.write_choices(answered, json_file)}", markup=False, highlight=False)
        return
    with bars() as progress:
        start = partial(_bar, progress)
        work = study.evaluate_command(settings, rules, labelled, part, scores, start, question)
        result = asyncio.run(work)
    console.print_evaluation(out, result)
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
    report: Annotated[Path, typer.Option(help="Folder for the report and its figures.", callback=_makeable)] = Path(
        "build/selftest"
    ),
) -> None:
    """Is this engine usable? Flips between runs and label orders, positions, label mass, labels; exit code 1 if not."""
    settings, study = _settings(engine), studies()
    serving.set_up_telemetry(settings, quiet=True)
    with bars() as progress:
        start = partial(_bar, progress)
        work = study.selftest_command(settings, rules, labelled, unlabelled, repeat, orders, start, question)
        result = asyncio.run(work)
    console.print_selftest(out, result)
    out.print(f"report: {study.write_selftest_report(result, report)}", highlight=False)
    if not result.usable:
        raise typer.Exit(1)


@benchmark.command()
def guarantees(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer draws: under a minute.")] = False,
) -> None:
    """How often each way to a threshold breaks its promise on known populations; exit code 1 where ours does."""
    study = studies()
    with bars() as progress:
        table = study.guarantees(QUICK_DRAWS if quick else GUARANTEE_DRAWS, _bar(progress, "simulating"))
    console.print_guarantees(out, table)
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
        rows = study.certifying_times(tickets, categories, _bar(progress, "certifying"))
    console.print_certifying_times(out, rows, study.machine(), study.today())


@benchmark.command()
def writing(
    rules: Rules,
    labelled: LabelledFile = None,
    part: Part = "demo",
    tickets: Annotated[int, typer.Option(min=1, max=10_000, help="Labelled tickets, one after the other.")] = 30,
    engine: Engine = None,
) -> None:
    """The same model scores, and writes its answer (a word, JSON, after thinking): how often is each right?"""
    settings, study = _settings(engine), studies()
    serving.set_up_telemetry(settings, quiet=True)
    with bars() as progress:
        work = study.writing_command(settings, rules, labelled, part, tickets, partial(_bar, progress))
        rows = asyncio.run(work)
    console.print_writing(out, rows, study.machine(), study.today())


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
    settings, study = _settings(engine), studies()
    serving.set_up_telemetry(settings, quiet=True)
    with bars() as progress:
        start = partial(_bar, progress)
        table = asyncio.run(study.attack_command(settings, rules, part, each, kind or [], every, start))
    console.print_attacks(out, table, study.machine(), study.today(), show)
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
    settings, study = _settings(engine), studies()
    serving.set_up_telemetry(settings, quiet=True)
    with bars() as progress:
        costs = asyncio.run(study.question_costs(settings, rules, tickets, rounds, partial(_bar, progress)))
    what = "CPU time" if settings.engine == "llama_cpp" else "time"
    console.print_question_costs(out, costs, what, study.machine(), study.today())


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
    settings, study = _settings(engine), studies()
    serving.set_up_telemetry(settings, quiet=True)
    with bars() as progress:
        start = partial(_bar, progress)
        work = study.splits(settings, name, data, to / name, rows, size or [100, 200, 400], splits, start)
        found = asyncio.run(work)
    console.print_splits(out, name, found, study.machine(), study.today())


@app.command()
def demo(
    folder: Annotated[Path, typer.Option("--rule-sets", help="Folder with the demo's sets.")] = Path("routing_rules"),
    report: Annotated[Path, typer.Option(help="Folder for the report.", callback=_makeable)] = Path("build/demo"),
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
        work = study.trial(settings, name, data, to / name, rows, alpha, delta, partial(_bar, progress))
        _, calibrated, routed = asyncio.run(work)
    console.print_calibration(out, calibrated.result)
    console.print_demo(out, [routed])
    out.print(f"report: {study.write_calibration_report(calibrated, to / name)}", highlight=False)


if __name__ == "__main__":
    main()
