"""The command line: reads arguments, calls, prints, and sets the exit code; decides nothing."""

from __future__ import annotations

import errno

import typer

from worker.cli import benchmarks, deciding, measuring, operating, rule_sets
from worker.cli.terminal import fail, open_standard_streams, write_nowhere
from worker.errors import RouterError

__all__ = ["app", "main"]

app = typer.Typer(
    name="ticket-router",
    help="Routes tickets from Kafka with a stated error rate, or to a person.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for commands in (operating, deciding, rule_sets, measuring, benchmarks):
    app.add_typer(commands.app)


def main() -> None:
    """Entry point: our errors are one line and an exit code, never a traceback."""
    open_standard_streams()
    try:
        app()
    except RouterError as error:
        fail(error)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EPIPE, errno.EIO):
            raise
        write_nowhere(1)
        fail(RouterError(f"standard output, or a file that was written, takes nothing more: {error.strerror}"))
