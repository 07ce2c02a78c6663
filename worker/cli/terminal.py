"""What a command shows while it works and where it fails: streams, bars, one line for an error."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

from rich.markup import escape
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

from worker.console.visible import VisibleConsole
from worker.errors import ConfigError, RouterError

out = VisibleConsole(emoji=False)
err = VisibleConsole(stderr=True, emoji=False)

CONFIG_ERROR, RUN_ERROR = 2, 3
PLAIN_EVERY, PLAIN_S = 20, 10.0
"""Where no bar can be drawn, there is a line for so many, and one when so long there was none."""


def fail(error: RouterError) -> NoReturn:
    try:
        err.print(f"ticket-router: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
    except OSError:  # nobody can be told; the exit code still can
        write_nowhere(2)
    sys.exit(CONFIG_ERROR if isinstance(error, ConfigError) else RUN_ERROR)


def open_standard_streams() -> None:
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


def write_nowhere(number: int) -> None:
    """What is still in the stream's buffer would fail once more at the end, and change the exit code."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)


def program() -> str:
    """How this program was called, so that what is shown can be typed."""
    called = Path(sys.argv[0])
    found = shutil.which(called.name)
    if found is not None and Path(found).absolute() == called.absolute():
        return called.name
    here = Path.cwd()
    return str(called.absolute().relative_to(here) if called.absolute().is_relative_to(here) else called)


class _RateColumn(ProgressColumn):
    """How many a second, over the last half minute."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:.1f}/s" if task.speed else "", style="progress.data.speed")


@contextlib.contextmanager
def bars(afterwards: str = "") -> Iterator[Progress]:
    """Progress bars on standard error. Where Ctrl-C ends the work, they are followed by how far it came, and by what
    the same command would do `afterwards`.
    """
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _RateColumn())
    progress = Progress(*columns, TimeRemainingColumn(), console=err)
    try:
        with progress:
            yield progress
    except KeyboardInterrupt:
        reached = [f"{task.description} {task.completed:g} of {task.total:g}" for task in progress.tasks if task.total]
        said = f"stopped at: {', '.join(reached)}" if reached else "stopped before anything was done"
        err.print(said + (f". {afterwards}" if afterwards else ""), markup=False, highlight=False, soft_wrap=True)
        raise


def goes_on_from(journal: Path) -> str:
    """What follows where all scores are in a journal as they come."""
    return f"Scores until here are kept in {journal}: the same command goes on from there"


BEGINS_ANEW = "Nothing of it is kept: the same command begins anew"


@contextlib.contextmanager
def status() -> Iterator[Callable[[str], None]]:
    """Says on standard error what is being waited for; on a terminal the line goes when that is over."""
    if not err.is_terminal:
        yield lambda what: err.print(what, markup=False, highlight=False)
        return
    with err.status("") as line:
        yield lambda what: line.update(escape(what))


def bar(progress: Progress, label: str) -> Callable[[int, int], None]:
    task = progress.add_task(label, total=None)
    started = False
    said, said_at = 0, time.monotonic()
    if not err.is_terminal:  # a bar is drawn on terminals only
        err.print(f"{label}: starting", markup=False, highlight=False)

    def move(done: int, total: int) -> None:
        nonlocal started, said, said_at
        if started:
            progress.update(task, completed=done, total=total)
        else:  # what was done before this run is not part of its rate
            progress.reset(task, completed=done, total=total)
            started = True
        due = done // PLAIN_EVERY > said // PLAIN_EVERY or time.monotonic() - said_at >= PLAIN_S
        if not err.is_terminal and done > said and due:
            said, said_at = done, time.monotonic()
            err.print(f"{label}: {done} of {total}", markup=False, highlight=False)

    return move
