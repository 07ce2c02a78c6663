"""The documents name tests that exist, and docs/faults.md has one, or a reason, for every fault."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
NAMED = sorted(
    {
        (document.relative_to(ROOT).as_posix(), name)
        for document in DOCUMENTS
        for name in re.findall(r"`(tests/[\w/.-]+\.py(?:::\w+)+)`", document.read_text(encoding="utf-8"))
    }
)
FAULTS = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
ROWS = [line for line in FAULTS.splitlines() if line.startswith("| ") and not line.startswith("| fault ")]

THREATS = (ROOT / "docs" / "threat-model.md").read_text(encoding="utf-8")
ATTACKS = [
    line
    for table in re.findall(r"^\| attack \|.*\n\|[-|]+\n((?:\|.*\n?)+)", THREATS, re.MULTILINE)
    for line in table.splitlines()
]
WHO = ("submit tickets", "write to Redis", "write to a topic", "edit rule sets", "sits at the engine", "reads what")
"""Of each there is a section with a table of attacks."""


@cache
def names_in(path: Path) -> frozenset[str]:
    """Functions as `test_x`, methods as `TestA::test_x`."""
    found = set()

    def look(nodes: list[ast.stmt], prefix: str) -> None:
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(prefix + node.name)
            elif isinstance(node, ast.ClassDef):
                look(node.body, f"{prefix}{node.name}::")

    look(ast.parse(path.read_text(encoding="utf-8")).body, "")
    return frozenset(found)


@pytest.mark.parametrize(("document", "name"), NAMED)
def test_every_test_that_a_document_names_exists(document: str, name: str) -> None:
    path, _, parts = name.partition("::")
    assert (ROOT / path).is_file(), f"{document}: there is no {path}"
    assert parts in names_in(ROOT / path), f"{document}: there is no {parts} in {path}"


def test_nothing_that_looks_like_a_test_is_named_in_another_way() -> None:
    """Else the check above would pass it by."""
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        for loose in re.findall(r"tests/[\w/.-]*\.py::[\w:]+", text):
            assert f"`{loose}`" in text, f"{document.name}: write `{loose}` in backquotes, whole"


@pytest.mark.parametrize("row", ROWS, ids=[row.split(" | ")[0].strip("| ")[:50] for row in ROWS])
def test_every_fault_has_a_test_or_a_reason_why_not(row: str) -> None:
    fault, act, holds, shown = (cell.strip() for cell in row.strip().strip("|").split("|"))
    assert fault
    if shown:
        assert re.search(r"`tests/.+::test_", shown)
        assert re.fullmatch(r"I[1-8]( I[1-8]| to I[1-8])*", holds)
    else:
        assert act.startswith("no test: "), "say why there is none"


def test_the_matrix_is_whole() -> None:
    assert len(ROWS) >= 41


@pytest.mark.parametrize("row", ATTACKS, ids=[row.split(" | ")[0].strip("| ")[:50] for row in ATTACKS])
def test_every_attack_has_a_test_or_remains(row: str) -> None:
    # Not at `\|`, which stands in a cell.
    attack, tries, why_not, shown = (cell.strip() for cell in re.split(r"(?<!\\)\|", row.strip()[1:-1]))
    assert attack
    assert tries
    if not shown:
        assert why_not.startswith("remains: "), "say what remains, and what an operator can do"
    for named in shown.split(", ") if shown else ():
        assert re.fullmatch(r"`tests/[\w/.-]+\.py(?:::\w+)+`", named), f"name one test: {named}"


def test_everybody_whom_the_threat_model_names_has_attacks() -> None:
    sections = re.split(r"^## ", THREATS, flags=re.MULTILINE)
    for who in WHO:
        (own,) = (section for section in sections if who in section.splitlines()[0])
        assert "| attack |" in own
    assert len(ATTACKS) >= 45
