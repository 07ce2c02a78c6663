"""The files people and commands leave for each other: rule sets, artefacts, labelled tickets."""

from __future__ import annotations

import csv
import os
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

import orjson
from pydantic import ValidationError

from worker.adapters.chat_template import load_turns
from worker.adapters.yaml_strict import load_model
from worker.core.artefact import Artefact
from worker.core.categories import NONE_ID, CategorySet
from worker.core.questions import LONGEST_ID, Questions
from worker.core.rules import Rules, RuleSet
from worker.errors import ArtefactError, ConfigError, RuleSetError

CATEGORIES_FILE = "categories.yaml"
RULES_FILE = "rules.yaml"
QUESTIONS_FILE = "questions.yaml"
CALIBRATION_FILE = "calibration.json"
SAMPLES_FILE = "samples/tickets.csv"
SHOWN = 20
"""Problems of a file that an error lists."""


def load_rule_set(folder: Path) -> RuleSet:
    """categories.yaml, rules.yaml and, where it is there, questions.yaml of a folder.

    Raises RuleSetError with file and line, PromptError.
    """
    if folder.is_file():
        raise RuleSetError(str(folder), "is a file; name the folder of a rule set")
    if not folder.is_dir():
        beside = [entry.name for entry in folder.parent.iterdir()] if folder.parent.is_dir() else []
        close = get_close_matches(folder.name, beside, n=1)
        hint = f"; did you mean {folder.parent / close[0]}?" if close else ""
        raise RuleSetError(str(folder), f"no such rule set folder{hint}")
    categories = _with_turns(load_model(folder / CATEGORIES_FILE, CategorySet), folder)
    rules = load_model(folder / RULES_FILE, Rules)
    further = folder / QUESTIONS_FILE
    questions = load_model(further, Questions) if further.exists() else Questions()
    for question in questions.questions:
        if len(f"{categories.id}_{question.id}") > LONGEST_ID:
            raise RuleSetError(str(further), f"'{categories.id}' and '{question.id}' together exceed {LONGEST_ID}")
    try:
        return RuleSet(categories=categories, rules=rules, questions=questions)
    except ValidationError as error:
        message = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
        raise RuleSetError(str(folder / RULES_FILE), message) from error


def _with_turns(categories: CategorySet, folder: Path) -> CategorySet:
    """The set with the model's own chat template read in, if it names a file. Raises PromptError, ConfigError."""
    style = categories.prompt
    if style.template_file is None:
        return categories
    turns = load_turns(folder / style.template_file)
    return categories.model_copy(update={"prompt": style.model_copy(update={"turns": turns})})


def calibration_file(question: str | None = None) -> str:
    """Name of the artefact of a rule set's own question, or of one of the further ones."""
    return CALIBRATION_FILE if question is None else f"calibration.{question}.json"


def load_artefact(path: Path) -> Artefact | None:
    """None where there is no such file. Raises ArtefactError where there is one that cannot be trusted."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ArtefactError(f"{path}: cannot be read: {error.strerror}") from error
    return Artefact.from_bytes(data, str(path))


def write_atomically(path: Path, data: bytes) -> None:
    """Whole or not at all: a reader never sees half a file, a full disk leaves the old one. Raises ConfigError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        temporary = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.chmod(0o644)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class Labelled:
    """One labelled ticket. `label` is a category id or `none`."""

    id: str
    text: str
    label: str
    language: str | None = None
    metadata: Mapping[str, str] | None = None


def load_labelled(path: Path, categories: Collection[str], question: str | None = None) -> tuple[Labelled, ...]:
    """A CSV or JSONL file with columns text and label, and optionally id and language.

    For a further question its answers stand in the column of its name, or in `label` where the file has no such
    column; tickets without an answer are left out. Where there is no id the ticket's place in the file is one. Raises
    ConfigError that lists everything wrong with the file: unknown labels, empty texts, ids that stand twice.
    """
    known = {*categories, NONE_ID}
    problems: list[str] = []
    found: list[Labelled] = []
    lines = list(rows(path, ("text",)))
    column = question if question is not None and any(question in row for _, row in lines) else "label"
    if lines and not any(column in row for _, row in lines):
        columns = ", ".join(lines[0][1]) or "none"
        raise ConfigError(f"{path}: no column {question or column}; the columns are {columns}")
    for line, row in lines:
        text, label = (row.get("text") or "").strip(), (row.get(column) or "").strip()
        if column != "label" and not label:
            continue
        if not text:
            problems.append(f"line {line}: no text")
        elif label not in known:
            what = "no category of the set" if question is None else f"no answer to '{question}'"
            problems.append(f"line {line}: label '{label}' is {what}")
        else:
            found.append(
                Labelled(
                    id=(row.get("id") or f"row-{line}").strip(),
                    text=text,
                    label=label,
                    language=(row.get("language") or row.get("lang") or "").strip() or None,
                )
            )
    problems += [f"id '{key}' stands {n} times" for key, n in Counter(t.id for t in found).items() if n > 1]
    refuse(path, problems)
    if not found:
        raise ConfigError(f"{path}: no labelled tickets in it")
    return tuple(found)


def refuse(path: Path, problems: Sequence[str]) -> None:
    """Raises ConfigError that lists the first of these problems, if there are any."""
    if not problems:
        return
    shown = "\n  ".join(problems[:SHOWN])
    more = f"\n  ... and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
    raise ConfigError(f"{path}: {len(problems)} problems; nothing was used:\n  {shown}{more}")


def rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, Mapping[str, str]]]:
    """Rows of a CSV or JSONL file with their line numbers, every value as text. As `records`."""
    for number, record in records(path, columns):
        yield number, {name: "" if value is None else str(value) for name, value in record.items()}


def records(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, Mapping[str, object]]]:
    """Rows of a CSV or JSONL file with their line numbers, JSON values as they are; a CSV must have `columns`.

    Raises ConfigError.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            if path.suffix == ".jsonl":
                for number, line in enumerate(file, 1):
                    if not line.strip():
                        continue
                    try:
                        row = orjson.loads(line)
                    except ValueError as error:
                        raise ConfigError(f"{path}:{number}: not JSON") from error
                    if not isinstance(row, dict):
                        raise ConfigError(f"{path}:{number}: not a JSON object")
                    yield number, row
                return
            reader = csv.DictReader(file, strict=True)
            missing = set(columns) - set(reader.fieldnames or ())
            if missing:
                raise ConfigError(
                    f"{path}: no column {' and no column '.join(sorted(missing))}; "
                    f"the columns are {', '.join(reader.fieldnames or ('none',))}"
                )
            for row in reader:
                yield reader.line_num, row
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: not a UTF-8 CSV or JSONL file: {error}") from error
