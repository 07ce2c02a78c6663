"""Traffic files: tickets that nobody labelled, and how often a desk has seen each category."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import orjson

from worker.adapters.files import Labelled, refuse, rows
from worker.errors import ConfigError


def load_unlabelled(path: Path) -> tuple[Labelled, ...]:
    """A CSV or JSONL file with a column text, and optionally id and language; labels in it are not looked at.

    Where there is no id the ticket's place in the file is one. Raises ConfigError that lists everything wrong.
    """
    problems: list[str] = []
    found: list[Labelled] = []
    for line, row in rows(path, ("text",), problems):
        text = _text(row.get("text"))
        if not text:
            problems.append(f"line {line}: no text")
            continue
        language = _text(row.get("language")) or _text(row.get("lang")) or None
        found.append(Labelled(_text(row.get("id")) or f"row-{line}", text, label="", language=language))
    problems += [f"id '{key}' stands {n} times" for key, n in Counter(t.id for t in found).items() if n > 1]
    refuse(path, problems)
    if not found:
        raise ConfigError(f"{path}: no tickets in it")
    return tuple(found)


def load_shares(path: Path) -> dict[str, float]:
    """Category id to its share or count: a JSON object, or a CSV file with columns category and share.

    Raises ConfigError that lists everything wrong; which categories must be in it is for others to know.
    """
    problems: list[str] = []
    shares: dict[str, float] = {}
    for place, category, value in _shares(path):
        try:
            share = float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            share = math.nan
        if isinstance(value, bool) or not math.isfinite(share) or share < 0.0:
            problems.append(f"{place}: the share of '{category}' is no number from 0 up: {value!r}")
        elif category in shares:
            problems.append(f"{place}: '{category}' stands twice")
        else:
            shares[category] = share
    refuse(path, problems)
    return shares


def _shares(path: Path) -> Iterator[tuple[str, str, object]]:
    if path.suffix != ".json":
        for line, row in rows(path, ("category", "share")):
            yield f"line {line}", _text(row.get("category")), row.get("share")
        return
    try:
        found = orjson.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON") from error
    if not isinstance(found, dict):
        raise ConfigError(f'{path}: expected one JSON object, such as {{"billing": 0.4, "login": 0.6}}')
    for category, value in found.items():
        yield f"'{category}'", category, value


def _text(value: object) -> str:
    return "" if value is None else str(value).strip()
