"""What the tests of secured servers share: what docs/deploying.md promises, and commands that are run to their end."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path
from typing import Any

from tests.integration.desk import COMMAND, Desk
from worker import serving
from worker.offline.check import Finding
from worker.settings import Settings

DEPLOYING = (Path(__file__).parents[2] / "docs" / "deploying.md").read_text(encoding="utf-8")
COMMAND_S = 120.0

Right = tuple[str, str, str, str]
"""Resource, name, pattern, operation."""


def rights_of(who: str) -> list[Right]:
    """The rows of the table of rights on Kafka."""
    rows = [line.strip("| ").split(" | ") for line in DEPLOYING.splitlines() if line.startswith(f"| {who} | ")]
    found = [(resource, name, pattern, operation) for _, resource, name, pattern, operation in rows]
    assert found, f"docs/deploying.md lists no rights for {who}"
    return found


def users_of_redis() -> list[str]:
    """The lines of the access control list."""
    found = [line for line in DEPLOYING.splitlines() if line.startswith("user ")]
    assert found, "docs/deploying.md has no users of Redis"
    return found


def settings_of(desk: Desk, **settings: Any) -> Settings:
    """As a process would read them; a command of its own takes a second to start."""
    own = {name.removeprefix("ROUTER_").lower(): value for name, value in desk.environment.items()}
    return Settings(_env_file=None, **{**own, **settings})


def findings(desk: Desk, **settings: Any) -> dict[str, Finding]:
    """What `ticket-router check` finds with the desk's settings and these, by part."""
    return {found.part: found for found in asyncio.run(serving.check(settings_of(desk, **settings), desk.folder))}


def command(desk: Desk, *arguments: str, **settings: object) -> subprocess.CompletedProcess[str]:
    """`ticket-router ARGUMENTS --rules FOLDER` with the desk's settings and these."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("ROUTER_", "OTEL_"))},
        **desk.environment,
        **{f"ROUTER_{name.upper()}": str(value) for name, value in settings.items()},
    }
    return subprocess.run(
        [str(COMMAND), *arguments, "--rules", str(desk.folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
        cwd=desk.folder,
        check=False,
    )
