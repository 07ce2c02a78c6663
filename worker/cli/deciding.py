"""The command for whoever wants to see what becomes of one ticket of their own: decide."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated, Any

import orjson
import typer

from worker import serving
from worker.cli.arguments import Engine, Rules, engine_settings
from worker.cli.terminal import err, out, status
from worker.console.deciding import print_decision
from worker.console.visible import visible
from worker.errors import ConfigError

app = typer.Typer()

STANDARD_INPUT = "-"


def _object(text: str) -> dict[str, Any]:
    try:
        found = orjson.loads(text)
    except ValueError:  # says no more than where
        found = None
    if not isinstance(found, dict):
        raise typer.BadParameter("""write a JSON object, such as '{"vip": true}'""")
    return found


@app.command()
def decide(
    rules: Rules,
    text: Annotated[
        str, typer.Argument(help="The ticket's text; `-`, or none: standard input.", show_default=False)
    ] = STANDARD_INPUT,
    ticket_id: Annotated[str | None, typer.Option("--id", help="Without one the ticket is known by its text.")] = None,
    language: Annotated[str | None, typer.Option(help="As rules by language see it, such as `ko`.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Whose ticket it is.")] = None,
    channel: Annotated[str | None, typer.Option(help="How it came in, such as `email`.")] = None,
    metadata: Annotated[
        Any, typer.Option(parser=_object, metavar="JSON", help="What rules by field look at: an object.")
    ] = None,
    engine: Engine = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the decision as it is published (docs/messages.md).")
    ] = False,
    card: Annotated[
        bool, typer.Option("--card", help="Print the card that people would get, as JSON (docs/cards.md).")
    ] = False,
) -> None:
    """Decide one ticket as a worker would, and say why; without an engine in the settings, by the embedded model.

    Nothing is published, and neither Kafka nor Redis is needed.
    """
    if as_json and card:
        raise typer.BadParameter("--json and --card are two messages: ask for one")
    settings = engine_settings(engine, otherwise="llama_cpp")
    serving.set_up_telemetry(settings, quiet=True)
    named = {"id": ticket_id, "language": language, "tenant": tenant, "channel": channel}
    parts = {"text": _read(text, settings.max_ticket_bytes)} | {
        name: _whole(value, f"--{name}") for name, value in named.items() if value is not None
    }
    ticket = serving.own_ticket(settings, rules, parts, metadata)
    if notice := serving.model_notice(settings):
        err.print(notice, style="dim", markup=False, highlight=False)
    with status() as tell:
        found = asyncio.run(serving.decide(settings, ticket, tell))
    if card and found.card is None:
        err.print(f"no card: the ticket goes to {found.decided.envelope.topic}", markup=False, highlight=False)
    elif as_json or card:
        shown = orjson.loads(found.card or b"") if card else found.decided.envelope
        # Of an escape in a string JSON reads the same character, which no terminal obeys.
        sys.stdout.write(visible(orjson.dumps(shown, option=orjson.OPT_INDENT_2).decode()) + "\n")
    else:
        print_decision(out, found)


def _read(text: str, most_bytes: int) -> str:
    """The text, or that of standard input; no more of it than makes it too large for a ticket. Raises ConfigError."""
    if text != STANDARD_INPUT:
        return _whole(text, "the text")
    if sys.stdin is not None and sys.stdin.isatty():
        err.print("the ticket's text, then Ctrl-D:", markup=False, highlight=False)
    try:
        with open(0, "rb", closefd=False) as stream:
            value = stream.read(most_bytes + 1)
    except OSError as error:
        raise ConfigError(f"standard input cannot be read: {error.strerror}") from error
    if len(value) > most_bytes:
        raise ConfigError(f"standard input holds more than {most_bytes} bytes (ROUTER_MAX_TICKET_BYTES)")
    return _decoded(value, "standard input")


def _whole(text: str, what: str) -> str:
    """An argument. Raises ConfigError where its bytes were no UTF-8, of which Python makes halves of characters."""
    return _decoded(text.encode(errors="surrogateescape"), what)


def _decoded(value: bytes, what: str) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{what} is not UTF-8: byte {error.start + 1}") from error
