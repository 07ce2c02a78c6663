"""The tables of docs/messages.md and the schemas of docs/schemas that are made from the code, so that what people read
is what is in force.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from worker.core.envelope import DEAD_LETTER_REASONS
from worker.core.policy import BOUNDS, REASONS, WITHOUT_BOUND
from worker.core.schemas import SCHEMAS
from worker.core.ticket import Intake

BEGIN = "<!-- made by worker.offline.docs_tables: {name} -->"
END = "<!-- end of {name} -->"


def renew(document: Path) -> bool:
    """Makes the tables of the file anew; whether that changed it. Raises ValueError, OSError."""
    before = document.read_text(encoding="utf-8")
    after = with_tables(before)
    if after != before:
        document.write_text(after, encoding="utf-8")
    return after != before


def schema_files() -> Mapping[str, str]:
    """Name and content of every file of docs/schemas."""
    return {f"{name}.json": json.dumps(made(), indent=2) + "\n" for name, made in SCHEMAS.items()}


def renew_schemas(folder: Path) -> None:
    """Writes docs/schemas anew. Raises OSError."""
    for name, content in schema_files().items():
        (folder / name).write_text(content, encoding="utf-8")


def with_tables(document: str) -> str:
    """The document with every table made anew. Raises ValueError where a table's place is not there exactly once."""
    for name, table in TABLES.items():
        begin, end = BEGIN.format(name=name), END.format(name=name)
        before, *rest = document.split(begin)
        if len(rest) != 1 or rest[0].count(end) != 1:
            raise ValueError(f"'{begin}' and '{end}' must stand in the document once each, in this order")
        document = f"{before}{begin}\n{table()}{end}{rest[0].partition(end)[2]}"
    return document


def reasons_table() -> str:
    """Every reason code of a decision with its sentence; what is filled in stands in italics."""
    said = dict(REASONS)
    for code, otherwise in WITHOUT_BOUND.items():
        said[code] += f" Where there is no {BOUNDS[code]}: {otherwise}"
    rows = ((f"`{code}`", re.sub(r"\{(\w+)\}", r"*\1*", sentence)) for code, sentence in said.items())
    return _table("code", "sentence", rows)


def dead_letters_table() -> str:
    """Every reason code of a dead letter with its sentence."""
    return _table("code", "sentence", ((f"`{code}`", sentence) for code, sentence in DEAD_LETTER_REASONS.items()))


def intake_table() -> str:
    """Every key of `intake:` with its default."""
    return _table("key", "default", ((f"`{k}`", f"`{field.default}`") for k, field in Intake.model_fields.items()))


TABLES: Mapping[str, Callable[[], str]] = {
    "reasons": reasons_table,
    "dead letters": dead_letters_table,
    "intake": intake_table,
}


def _table(left: str, right: str, rows: Iterable[tuple[str, str]]) -> str:
    lines = [(left, right), ("---", "---"), *rows]
    return "".join(f"| {first} | {second} |\n" for first, second in lines)
