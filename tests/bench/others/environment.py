"""Where the other frameworks are: in a virtual environment of its own, for they pin other versions of our libraries."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

PINNED = Path(__file__).with_name("requirements.txt")
CACHE = Path(__file__).parents[3] / ".cache" / "bench"


def python_of_others(*, install: bool = False) -> Path | None:
    """Its interpreter; None where it is not installed. Raises CalledProcessError where installing fails."""
    folder = CACHE / hashlib.sha256(PINNED.read_bytes()).hexdigest()[:12]
    python = folder / "bin" / "python"
    done = folder / ".complete"
    if not done.exists():
        if not install:
            return None
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        # --no-deps: the list is complete, and has our confluent-kafka where Quix Streams asks for an older one.
        subprocess.run([*command, "--no-deps", "--require-hashes", "-r", str(PINNED)], check=True)
        done.touch()
    return python
