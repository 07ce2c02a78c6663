"""The files people and commands leave for each other: rule sets, artefacts, labelled tickets."""

from __future__ import annotations

import codecs
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
from worker.adapters.yaml_strict import line_of, load_model
from worker.core.artefact import Artefact
from worker.core.categories import NONE_ID, CategorySet
from worker.core.misplaced import Misplaced
from worker.core.questions import LONGEST_ID, Questions
from worker.core.rules import Rules, RuleSet
from worker.errors import ArtefactError, ConfigError, RuleSetError

CATEGORIES_FILE = "categories.yaml"
RULES_FILE = "rules.yaml"
QUESTIONS_FILE = "questions.yaml"
FILES = {"categories": CATEGORIES_FILE, "rules": RULES_FILE, "questions": QUESTIONS_FILE}
"""Parts of a rule set, and where each is written."""
CALIBRATION_FILE = "calibration.json"
SAMPLES_FILE = "samples/tickets.csv"
SHOWN = 20
"""Problems of a file that an error lists."""
LONGEST_SHOWN = 80
"""Characters of a file's first line that an error shows."""
LONGEST_NAME = 3
"""Words of a column's name: what has more is a sentence."""
LOOKED_AT = 1024 * 1024
"""Bytes of a file by which its encoding is guessed."""
WORKBOOKS = (b"PK\x03\x04", b"\xd0\xcf\x11\xe0")
"""What .xlsx and .xls begin with."""
SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "bars"}
"""What stands in place of commas in files that are called CSV, too."""
ENCODINGS = {"UTF-16": "UTF-16, as Excel's 'Unicode Text' is", "CP949": "CP949, as Korean Windows writes it"}
"""What files that are no UTF-8 are tried as, in this order."""


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
    written = folder / CATEGORIES_FILE
    categories = _with_turns(load_model(written, CategorySet), folder)
    rules = load_model(folder / RULES_FILE, Rules)
    further = folder / QUESTIONS_FILE
    # A link that leads nowhere is a file that somebody wanted to be read.
    questions = load_model(further, Questions) if os.path.lexists(further) else Questions()
    for question in questions.questions:
        if len(f"{categories.id}_{question.id}") > LONGEST_ID:
            raise RuleSetError(str(further), f"'{categories.id}' and '{question.id}' together exceed {LONGEST_ID}")
    try:
        categories.check_names()
    except Misplaced as error:
        raise RuleSetError(f"{written}:{line_of(written, error.place)}", str(error)) from error
    try:
        return RuleSet(categories=categories, rules=rules, questions=questions)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        place = getattr(problem.get("ctx", {}).get("error"), "place", ())
        path = folder / FILES.get(place[0] if place else "rules", RULES_FILE)
        where = f"{path}:{line_of(path, place[1:])}" if place else str(path)
        raise RuleSetError(where, problem["msg"].removeprefix("Value error, ")) from error


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
    ConfigError that lists everything wrong with the file: unknown labels, empty texts, ids that stand twice,
    labels of people who had seen a suggestion.
    """
    known = {*categories, NONE_ID}
    problems: list[str] = []
    found: list[Labelled] = []
    unknown = 0
    lines = list(rows(path, ("text",), problems))
    column = question if question is not None and any(question in row for _, row in lines) else "label"
    if lines and not any(column in row for _, row in lines):
        missing = column if question is None else f"'{question}' with its answers, and no column label to read instead"
        raise ConfigError(f"{path}: no column {missing}; {_columns_in_words(tuple(lines[0][1]), ('text', column))}")
    of_set = question is not None and column == "label"
    for line, row in lines:
        text, label = (row.get("text") or "").strip(), (row.get(column) or "").strip()
        if column != "label" and not label:
            continue
        if not text:
            problems.append(f"line {line}: no text")
        elif label not in known:
            in_set = f"label '{label}' is no category of the set"
            problems.append(
                f"line {line}: {in_set}" if question is None else f"line {line}: '{label}' is no answer to '{question}'"
            )
            unknown += 1
        elif (row.get("blind") or "").strip().lower() == "false":  # as `ticket-router labels` marks them
            problems.append(f"line {line}: labelled in sight of a suggestion (blind=false), which certifies nothing")
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
    if of_set and unknown:
        problems.insert(
            0,
            f"there is no column '{question}', so column 'label' was read in its place, and {unknown} of its values "
            f"are no answers to '{question}' ({', '.join(categories)}): add a column '{question}' with them",
        )
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


def rows(
    path: Path, columns: Sequence[str], problems: list[str] | None = None
) -> Iterator[tuple[int, Mapping[str, str]]]:
    """Rows of a CSV or JSONL file with their line numbers, every value as text. As `records`."""
    for number, record in records(path, columns, problems):
        yield number, {name: "" if value is None else str(value) for name, value in record.items()}


def records(
    path: Path, columns: Sequence[str], problems: list[str] | None = None
) -> Iterator[tuple[int, Mapping[str, object]]]:
    """Rows of a CSV or JSONL file with their line numbers, JSON values as they are; a CSV must have `columns`.

    Lines that are no rows go to `problems`, for the caller to refuse together with what else is wrong; without that
    list they are refused here, behind the last row. Raises ConfigError.
    """
    found: list[str] = [] if problems is None else problems
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            if path.suffix == ".jsonl":
                for number, line in enumerate(file, 1):
                    if not line.strip():
                        continue
                    try:
                        row = orjson.loads(line)
                    except ValueError:
                        found.append(f"line {number}: not JSON")
                        continue
                    if isinstance(row, dict):
                        yield number, row
                    else:
                        found.append(f"line {number}: not a JSON object")
                if problems is None:
                    refuse(path, found)
                return
            reader = csv.DictReader(file, strict=True)
            missing = set(columns) - set(reader.fieldnames or ())
            if missing:
                lacks = " and no column ".join(sorted(missing))
                raise ConfigError(f"{path}: no column {lacks}; {_columns_in_words(reader.fieldnames or (), columns)}")
            for row in reader:
                yield reader.line_num, row
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8: {_encoding_in_words(path)}") from error
    except csv.Error as error:
        raise ConfigError(f"{path}: not a UTF-8 CSV or JSONL file: {error}") from error


def _columns_in_words(columns: Sequence[str], wanted: Sequence[str]) -> str:
    """What stands in the first line, and what to make of it."""
    names = " and ".join(dict.fromkeys(wanted))
    if "text" in wanted:
        names = "text (the ticket) and, where they are labelled, label (its category)"
    if not columns:
        return "the columns are none: the file is empty"
    for separator, title in SEPARATORS.items():
        if len(columns) == 1 and separator in columns[0] and _are_names(columns[0].split(separator)):
            return (
                f"'{_shortened(columns[0])}' is one column, as {title} stand in it in place of commas: save it with "
                "commas (Excel: Save as > CSV UTF-8), and check that texts which hold a comma stand in quotation marks"
            )
    if (len(columns) > 1 or columns[0] in wanted) and _are_names(columns):
        return f"the columns are {_shortened(', '.join(columns))}; name them {names}"
    return (
        f"its first line is '{_shortened(', '.join(columns))}', so it looks like plain text or has no line of names: "
        f"begin a CSV with a line of column names, {names}"
    )


def _are_names(columns: Sequence[str]) -> bool:
    return all(len(column.split()) <= LONGEST_NAME for column in columns)


def _encoding_in_words(path: Path) -> str:
    """What the bytes probably are, and how to make UTF-8 of them."""
    with path.open("rb") as file:
        data = file.read(LOOKED_AT)
    if data.startswith(WORKBOOKS):
        return "it is an Excel workbook. Save it by Save as > CSV UTF-8"
    for encoding, title in ENCODINGS.items():
        if encoding == "UTF-16" and not data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            continue
        try:
            codecs.getincrementaldecoder(encoding)().decode(data)
        except UnicodeDecodeError:
            continue
        made = f"`iconv -f {encoding} -t UTF-8 {path.name} > utf8-{path.name}`"
        return f"it looks like {title}. Save it as UTF-8: in Excel by Save as > CSV UTF-8, or by {made}"
    return "save it as UTF-8, in Excel by Save as > CSV UTF-8"


def _shortened(text: str) -> str:
    return text if len(text) <= LONGEST_SHOWN else text[:LONGEST_SHOWN] + "..."
