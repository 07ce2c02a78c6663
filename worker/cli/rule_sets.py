"""Commands on rule sets and recorded decisions: no engine is asked to decide."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import typer

from worker import serving
from worker.cli.arguments import Engine, Rules, engine_settings, makeable
from worker.cli.extras import studies
from worker.cli.terminal import bars, out
from worker.console.rule_sets import print_backtest, print_prompt, print_rule_tests, print_rules_diff, turns_yaml

app = typer.Typer()
prompt = typer.Typer(help="Look at what the model is asked.", no_args_is_help=True)
app.add_typer(prompt, name="prompt")
rule_sets = typer.Typer(help="Test a rule set, and compare two versions of one.", no_args_is_help=True)
app.add_typer(rule_sets, name="rules")


@prompt.command("show")
def prompt_show(
    rules: Rules,
    text: Annotated[
        str | None, typer.Option("--text", help="Of the ticket; default: the first example.", show_default=False)
    ] = None,
    engine: Engine = None,
) -> None:
    """Print what is sent, token by token, where the ticket stands, where the label is read, and every fingerprint."""
    settings = engine_settings(engine)
    serving.set_up_telemetry(settings, quiet=True)
    print_prompt(out, asyncio.run(serving.prompt_view(settings, rules, text)))


@prompt.command("turns")
def prompt_turns(
    file: Annotated[Path, typer.Argument(help="tokenizer_config.json or chat_template.jinja of a model.")],
) -> None:
    """Print a chat template as `turns` for categories.yaml, so that the worker needs no Jinja."""
    sys.stdout.write(turns_yaml(serving.turns(file)))


@rule_sets.command("test")
def rules_test(rules: Rules) -> None:
    """Run the tests that the rule set carries; exit code 1 where one fails. Neither engine nor broker is needed."""
    found = serving.rules_test(rules)
    print_rule_tests(out, found)
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
    print_rules_diff(out, found)
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
    report: Annotated[Path, typer.Option(help="Folder for the report.", callback=makeable)] = Path("build/backtest"),
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
    print_backtest(out, found, study.backtest_limits(found))
    if report is not None:
        out.print(f"report: {study.write_backtest_report(found, report)}", highlight=False)
