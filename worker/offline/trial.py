"""Trials on text that nobody here wrote: a labelled data set becomes a rule set, is calibrated, and is routed."""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import Field

from worker.adapters.files import CATEGORIES_FILE, RULES_FILE, Labelled, write_atomically
from worker.adapters.yaml_strict import load_model
from worker.core.categories import NONE_ID, Identifier, LabelWord, Line, PromptStyle, Strict
from worker.core.normalise import canonical
from worker.errors import ConfigError

MAX_ROWS = 2000
SHORTEST_EXAMPLE = 15


class TrialCategory(Strict):
    """A category, and the label under which the data set has it."""

    id: Identifier
    source: Line = Field(description="the label in the data set")
    name: Line
    description: Line
    label: LabelWord


class TrialSpec(Strict):
    """How a data set is turned into a rule set; `calibrate` and `route` may be one file: no row is in both parts."""

    id: Identifier
    title: Line
    language: str
    calibrate: Line = Field(description="CSV file in the data folder")
    route: Line
    text: Line = "text"
    label: Line = "label"
    prompt: PromptStyle
    categories: tuple[TrialCategory, ...]
    outside: tuple[Line, ...] = Field((), description="labels of rows that belong to no category; `*`: all others")
    outside_share: Annotated[float, Field(ge=0, le=0.5)] = Field(0.1, description="of the rows that are taken")
    examples: int = Field(4, ge=1, le=16, description="of each category, in the prompt")
    example_chars: int = Field(120, ge=20, le=1000, description="longest text that is taken as an example")


def available() -> tuple[str, ...]:
    """Names of the trials that ship with the package."""
    folder = resources.files("worker.offline") / "trials"
    return tuple(sorted(item.name.removesuffix(".yaml") for item in folder.iterdir() if item.name.endswith(".yaml")))


def load_spec(name: str) -> TrialSpec:
    """Raises ConfigError for an unknown name."""
    if name not in available():
        raise ConfigError(f"no trial '{name}'; there are: {', '.join(available())}")
    with resources.as_file(resources.files("worker.offline") / "trials" / f"{name}.yaml") as path:
        return load_model(path, TrialSpec)


@dataclass(frozen=True, slots=True)
class Trial:
    """A rule set folder made from a data set, and its two parts: rows to calibrate on and rows to route."""

    folder: Path
    calibration: tuple[Labelled, ...]
    routing: tuple[Labelled, ...]


def prepare(spec: TrialSpec, data: Path, folder: Path, *, rows: int, alpha: float, delta: float) -> Trial:
    """Writes the rule set. Rows are drawn by the hash of their text, so the same on every machine.

    Equal texts are taken once, so that no ticket calibrates and is routed. Raises ConfigError.
    """
    if not 1 <= rows <= MAX_ROWS:
        raise ConfigError(f"{rows} rows: a trial takes 1 to {MAX_ROWS} of each part")
    by_source = {category.source: category.id for category in spec.categories}
    first = _rows(data / spec.calibrate, spec, by_source)
    second = first if spec.route == spec.calibrate else _rows(data / spec.route, spec, by_source)
    examples, rest = _take_examples(spec, first)
    calibration = _draw(rest, rows, spec.outside_share)
    taken = {ticket.id for ticket in calibration} | {t.id for group in examples.values() for t in group}
    routing = _draw([t for t in second if t.id not in taken], rows, spec.outside_share)
    categories = {
        "id": spec.id,
        "version": 1,
        "language": spec.language,
        "prompt": spec.prompt.model_dump(exclude_defaults=True),
        "categories": [
            {
                **category.model_dump(exclude={"source"}),
                "examples": [canonical(ticket.text) for ticket in examples[category.id]],
            }
            for category in spec.categories
        ],
    }
    rules = {"version": 1, "alpha": alpha, "delta": delta}
    for name, content in ((CATEGORIES_FILE, categories), (RULES_FILE, rules)):
        text = yaml.safe_dump(content, allow_unicode=True, sort_keys=False, width=1000)
        write_atomically(folder / name, text.encode())
    return Trial(folder, tuple(calibration), tuple(routing))


def labelled_csv(tickets: Sequence[Labelled]) -> bytes:
    """The tickets as a labelled file for `calibrate`."""
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    writer.writerow(["id", "text", "label"])
    writer.writerows([t.id, t.text, t.label] for t in tickets)
    return buffer.getvalue().encode()


def _rows(path: Path, spec: TrialSpec, by_source: Mapping[str, str]) -> list[Labelled]:
    return sorted(_unique(path, spec, by_source), key=lambda ticket: ticket.id)


def _unique(path: Path, spec: TrialSpec, by_source: Mapping[str, str]) -> Iterator[Labelled]:
    seen: set[str] = set()
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                text, source = row[spec.text], row[spec.label]
                label = by_source.get(source)
                if label is None and (source in spec.outside or "*" in spec.outside):
                    label = NONE_ID
                key = hashlib.sha256(canonical(text).casefold().encode()).hexdigest()[:16]
                if label is not None and canonical(text) and key not in seen:
                    seen.add(key)
                    yield Labelled(id=key, text=text, label=label, language=spec.language)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except KeyError as error:
        raise ConfigError(f"{path}: no column {error}") from error


def _take_examples(spec: TrialSpec, tickets: Sequence[Labelled]) -> tuple[dict[str, list[Labelled]], list[Labelled]]:
    chosen: dict[str, list[Labelled]] = {category.id: [] for category in spec.categories}
    rest: list[Labelled] = []
    for ticket in tickets:
        group = chosen.get(ticket.label)
        if (
            group is not None
            and len(group) < spec.examples
            and SHORTEST_EXAMPLE <= len(ticket.text) <= spec.example_chars
        ):
            group.append(ticket)
        else:
            rest.append(ticket)
    return chosen, rest


def _draw(tickets: Sequence[Labelled], rows: int, outside_share: float) -> list[Labelled]:
    """The first `rows` by hash, with the stated share of rows of no category (as far as there are any)."""
    inside = [ticket for ticket in tickets if ticket.label != NONE_ID]
    outside = [ticket for ticket in tickets if ticket.label == NONE_ID]
    few = outside[: round(rows * outside_share)]
    return sorted([*inside[: rows - len(few)], *few], key=lambda ticket: ticket.id)
