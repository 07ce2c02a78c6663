"""What a command shows while it works and where it fails: streams, bars, one line for an error."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import NoReturn

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
PLAIN_EVERY = 20


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


def bar(progress: Progress, label: str) -> Callable[[int, int], None]:
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
