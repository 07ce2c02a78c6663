"""docs/pitfalls.md names tests that exist, and says of every line what shows it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "pitfalls.md").read_text(encoding="utf-8")
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ")][1:]
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py(?:::\w+)+)`", PAGE)))


@pytest.mark.parametrize("name", NAMED)
def test_every_test_that_the_page_names_exists(name: str) -> None:
    path, *parts = name.split("::")
    nodes: list[ast.stmt] = ast.parse((ROOT / path).read_text(encoding="utf-8")).body
    for part in parts:
        found = [
            node
            for node in nodes
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == part
        ]
        assert found, f"{name}: there is no {part}"
        nodes = found[0].body


def test_every_line_names_a_test() -> None:
    assert len(ROWS) >= 24
    for row in ROWS:
        cells = [cell.strip() for cell in row.strip("|").split(" | ")]
        assert len(cells) == 4, row
        assert re.search(r"`tests/.+::test_", cells[3]), row


def test_nothing_in_the_worker_forks() -> None:
    """A Kafka client that is made before a fork does nothing in the child."""
    for path in (ROOT / "worker").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Attribute):
                names = [ast.unparse(node)]
            for name in names:
                assert not name.startswith(("multiprocessing", "os.fork", "pty")), f"{path}: {name}"
                assert not name.endswith("ProcessPoolExecutor"), f"{path}: {name}"
