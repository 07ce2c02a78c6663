"""Commands as the documents show them: where each stands, and what would be wrong with it before it is run."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer.main
import yaml

from worker.cli import app
from worker.settings import Settings

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
"""README.ko.md shows the same commands, which its own test says."""
PROGRAMS = (
    "ticket-router",
    ".venv/bin/ticket-router",
    "make",
    "docker",
    "kubectl",
    "pip",
    "pytest",
    "python",
    "cp",
    "export",
)
OTHERS: dict[str, str] = {
    "kafka-transactions.sh": "part of Apache Kafka's own scripts",
    "kafka-acls.sh": "part of Apache Kafka's own scripts",
}
"""Programs that the documents name and that nothing here can check, and why."""
TREE = typer.main.get_command(app)
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
DOCKERFILE = (ROOT / "deploy/Dockerfile").read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Command:
    """One line of shell, continued lines joined, without its comment."""

    document: str
    line: int
    shell: str
    whole: bool
    """It stands in a block of commands, to be typed as it is; else it is named in a sentence, perhaps in part."""
    before: tuple[str, ...] = ()
    """Variables that its block sets before it, as shell."""
    section: str = ""
    """The heading that it stands under, where it stands in a block."""

    def __str__(self) -> str:
        return f"{self.document}:{self.line}: {self.shell}"

    @property
    def words(self) -> list[str]:
        return shlex.split(self.shell, comments=True)


def commands(document: Path) -> list[Command]:
    return [*_blocks(document), *_named(document)]


def _blocks(document: Path) -> Iterator[Command]:
    """Fenced blocks without a language whose first line begins with a program; the others show output."""
    text = document.read_text(encoding="utf-8")
    for block in re.finditer(r"^```(?:sh|bash|console)?\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        first = text.count("\n", 0, block.start()) + 2
        if not _is_command(block[1]):
            continue
        section = ["", *re.findall(r"^#+ (.+)$", text[: block.start()], re.MULTILINE)][-1]
        before: list[str] = []
        # A continued line stays one, and keeps the number of its first.
        for line in re.finditer(r"^(?:.*\\\n)*.*$", block[1], re.MULTILINE):
            shell = re.sub(r"\s+#.*$", "", line[0].replace("\\\n", "")).strip()
            if shell:
                number = first + block[1].count("\n", 0, line.start())
                yield Command(document.name, number, shell, True, tuple(before), section)
            if shell.startswith("export "):
                before.append(shell)


def _named(document: Path) -> Iterator[Command]:
    text = document.read_text(encoding="utf-8")
    outside = re.sub(
        r"^```.*?^```", lambda block: re.sub(r"[^\n]", " ", block[0]), text, flags=re.MULTILINE | re.DOTALL
    )
    for span in re.finditer(r"`([^`\n]+)`", outside):
        first, _, rest = span[1].partition(" ")
        if rest and (first in PROGRAMS or first in OTHERS):
            yield Command(document.name, outside.count("\n", 0, span.start()) + 1, span[1], False)


def _is_command(text: str) -> bool:
    first = text.split()[0] if text.strip() else ""
    return first in PROGRAMS or first in OTHERS


def problem(command: Command) -> str | None:
    """What is wrong with it, as far as can be told without running it."""
    shell = re.sub(r"\[(--[^]]*)\]", r"\1", command.shell)  # [--optional VALUE]
    shell = re.sub(r"(?<=\w)(\|\w+)+", "", shell)  # word|json|thinking
    words = shlex.split(shell, comments=True)
    program, arguments = words[0].rpartition("/")[2], words[1:]
    checks = {
        "ticket-router": _ticket_router,
        "make": _make,
        "docker": _docker,
        "kubectl": _kubectl,
        "pip": _pip,
        "export": _export,
        "python": _python,
    }
    if program in checks:
        return checks[program](arguments, command.whole)
    if program in {"cp", "pytest"}:
        return _missing(arguments[:1])
    return None


def _ticket_router(arguments: Sequence[str], whole: bool) -> str | None:
    at: Any = TREE
    rest = list(arguments)
    while hasattr(at, "commands") and rest and not rest[0].startswith("-"):
        name = rest.pop(0)
        if name not in at.commands:
            return f"there is no command '{name}'"
        at = at.commands[name]
    if whole:
        try:
            at.make_context("ticket-router", rest)
        except Exception as error:
            # Typer has brought a Click of its own along in newer releases, so the type is not to be named here.
            if not hasattr(error, "format_message"):
                raise
            return str(error.format_message())
        return None
    known = {option for parameter in at.params for option in (*parameter.opts, *parameter.secondary_opts)}
    unknown = [word for word in rest if word.startswith("--") and word.partition("=")[0] not in known]
    return f"there is no option {', '.join(unknown)}" if unknown else None


def _make(arguments: Sequence[str], whole: bool) -> str | None:
    del whole
    targets = set(re.findall(r"^([a-z][a-z-]*):", MAKEFILE, re.MULTILINE))
    variables = set(re.findall(r"\$[({](?:if \$\()?([A-Z]+)", MAKEFILE))
    for word in arguments:
        name, equals, _ = word.partition("=")
        if (name not in variables) if equals else (name not in targets):
            return f"there is no {'variable' if equals else 'target'} '{name}' in the Makefile"
    return None


def _docker(arguments: Sequence[str], whole: bool) -> str | None:
    del whole
    after = {word: arguments[place + 1] for place, word in enumerate(arguments[:-1])}
    if arguments[0] == "compose":
        services = COMPOSE["services"]
        profiles = {profile for service in services.values() for profile in service.get("profiles", ())}
        asked = {arguments[place + 1] for place, word in enumerate(arguments) if word == "--profile"}
        if asked - profiles:
            return f"there is no profile {', '.join(asked - profiles)}"
        scaled = after.get("--scale", "").partition("=")[0]
        return f"there is no service {scaled}" if scaled and scaled not in services else None
    if arguments[0] == "build":
        if not re.search(rf"^FROM .* AS {re.escape(after['--target'])}$", DOCKERFILE, re.MULTILINE):
            return f"there is no target {after['--target']}"
        return _missing([after["-f"]])
    return f"nobody checks `docker {arguments[0]}` here"


def _kubectl(arguments: Sequence[str], whole: bool) -> str | None:
    del whole
    return _missing([arguments[place + 1] for place, word in enumerate(arguments) if word in {"-f", "-k"}])


def _pip(arguments: Sequence[str], whole: bool) -> str | None:
    del whole
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for word in arguments[1:]:
        if found := re.fullmatch(r"ticket-router\[([\w,]+)\]", word):
            unknown = set(found[1].split(",")) - set(project["optional-dependencies"])
            if unknown:
                return f"there is no extra {', '.join(unknown)}"
    return None


def _python(arguments: Sequence[str], whole: bool) -> str | None:
    del whole
    if arguments[0] == "-m" and find_spec(arguments[1]) is None:
        return f"there is no module {arguments[1]}"
    return None


def _export(arguments: Sequence[str], whole: bool) -> str | None:
    del whole
    known = {f"ROUTER_{name.upper()}" for name in Settings.model_fields}
    names = {word.partition("=")[0] for word in arguments}
    unknown = {name for name in names if name.startswith("ROUTER_")} - known
    return f"there is no setting {', '.join(unknown)}" if unknown else None


def _missing(paths: Sequence[str]) -> str | None:
    gone = [path for path in paths if not (ROOT / path).exists()]
    return f"there is no {', '.join(gone)}" if gone else None
