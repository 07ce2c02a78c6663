"""The command says what it has to, wherever its standard streams lead; where they lead nowhere, the exit code does."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.integration.desk import COMMAND


@pytest.mark.parametrize(
    ("arguments", "redirected", "code", "said"),
    [
        ("schema", "> /dev/full", 3, "standard output, or a file that was written, takes nothing more: No space"),
        ("schema", ">&- 2>&- <&-", 0, ""),
        ("run --rules nowhere", "2> /dev/full", 2, ""),
        ("run --rules nowhere", ">&- 2>&- <&-", 2, ""),
        ("run --rules nowhere", "", 2, "nowhere: no such rule set folder"),
    ],
)
def test_streams_that_are_full_or_closed_change_no_exit_code(
    arguments: str, redirected: str, code: int, said: str, tmp_path: Path
) -> None:
    command = ["sh", "-c", f"exec {COMMAND} {arguments} {redirected}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path, check=False)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == bool(said)
    assert said in done.stderr
