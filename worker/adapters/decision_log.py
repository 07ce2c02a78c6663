"""Decision logs: files as `ticket-router export` writes them, read in pieces, so that length costs no memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from worker.errors import ConfigError

LINES = 1024
LONGEST_LINE = 64 * 1024 * 1024
"""Bytes. No decision is near it; what is, is another file."""


def read_decision_lines(
    path: Path, progress: Callable[[int, int], None] = lambda done, total: None
) -> Iterator[list[bytes]]:
    """Lines in lists of at most LINES, empty ones left out; `progress` is told bytes done and in all.

    Raises ConfigError where the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            total, done = path.stat().st_size, 0
            found: list[bytes] = []
            while line := file.readline(LONGEST_LINE):
                done += len(line)
                if len(line) == LONGEST_LINE:
                    raise ConfigError(f"{path}: a line of {LONGEST_LINE} bytes and more: this is no JSONL of decisions")
                if line != b"\n":
                    found.append(line)
                if len(found) == LINES:
                    yield found
                    progress(done, total)
                    found = []
            if found:
                yield found
            progress(done, total)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
