"""docs/operating.md says of every reason code, fault, alert and standstill what to do, and of nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.deploy.queries import rules
from worker.core.envelope import DEAD_LETTER_REASONS
from worker.core.policy import REASONS
from worker.runtime.watchdog import What

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs/operating.md").read_text(encoding="utf-8")
FAULTS = (ROOT / "docs/faults.md").read_text(encoding="utf-8")
SERVING = (ROOT / "docs/serving.md").read_text(encoding="utf-8")


def table(document: str, *header: str) -> list[list[str]]:
    """The cells of the one table with these columns, row by row."""
    _, *rest = document.split(f"| {' | '.join(header)} |\n")
    assert len(rest) == 1, f"one table has the columns {header}"
    lines = rest[0].splitlines()
    rows = []
    for line in lines[1:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))])
    assert all(len(row) == len(header) for row in rows), "every row has every column"
    return rows


def test_every_reason_code_says_what_to_do_in_the_order_of_the_code() -> None:
    rows = table(GUIDE, "code", "the ticket", "because", "what to do")
    assert [row[0] for row in rows] == [f"`{code}`" for code in REASONS]
    assert all(all(row) for row in rows)


def test_every_dead_letter_code_says_what_to_do() -> None:
    rows = table(GUIDE, "code", "the message", "what to do")
    assert [row[0] for row in rows] == [f"`{code}`" for code in DEAD_LETTER_REASONS]
    assert all(all(row) for row in rows)


def test_every_fault_of_the_matrix_says_what_is_noticed_and_what_to_do() -> None:
    """In the words and the order of docs/faults.md, so that both can be read side by side."""
    made = [line.split(" | ")[0].removeprefix("| ") for line in FAULTS.splitlines() if line.startswith("| ")]
    rows = table(GUIDE, "fault", "what you notice", "what to do")
    assert [row[0] for row in rows] == [fault for fault in made if fault != "fault"]
    assert all(all(row) for row in rows)


def test_every_standstill_has_its_row() -> None:
    rows = table(GUIDE, "`what`", "stands still", "for longer than", "usual causes")
    assert {row[0] for row in rows} == {f"`{what}`" for what in What}


@pytest.mark.parametrize("name", [rule["alert"] for rule in rules() if "alert" in rule])
def test_every_alert_has_a_runbook_with_something_to_do(name: str) -> None:
    _, text = GUIDE.split(f"### {name}\n")
    runbook = text.partition("\n### ")[0]
    assert len(runbook.split()) >= 20


def test_every_exit_code_of_the_program_is_explained() -> None:
    stated = {row[0] for row in table(GUIDE, "exit code", "says")}
    source = "".join(
        path.read_text(encoding="utf-8")
        for room in ("cli", "runtime")
        for path in (ROOT / "worker" / room).glob("*.py")
    )
    used = set(re.findall(r"(?:Exit|sys\.exit|_exit)\((?:code=)?(\d+)\)", source))
    assert {"1"} <= used
    assert used <= stated
    assert {"0", "2", "3", "130"} <= stated


def test_every_status_of_the_server_over_http_is_explained() -> None:
    """What it refuses with; those are its reason codes."""
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "worker/runtime").glob("*.py"))
    used = set(re.findall(r"Refusal\((\d{3})", source))
    assert {"400", "503"} <= used
    explained = set(re.findall(r"\b([45]\d\d)\b", SERVING))
    assert not used - explained


def test_a_code_that_is_missing_would_be_found() -> None:
    shortened = "\n".join(line for line in GUIDE.splitlines() if not line.startswith("| `steered`")) + "\n"
    rows = table(shortened, "code", "the ticket", "because", "what to do")
    assert [row[0] for row in rows] != [f"`{code}`" for code in REASONS]


def test_links_within_the_documents_lead_somewhere() -> None:
    """Files and headings, as GitHub makes anchors of them."""
    documents = sorted([*ROOT.glob("README*.md"), *(ROOT / "docs").rglob("*.md")])
    broken = [
        f"{document.name}: {target}"
        for document in documents
        for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text(encoding="utf-8"))
        if not re.match(r"[a-z]+:", target) and not leads_somewhere(document, target)
    ]
    assert broken == []


def leads_somewhere(document: Path, target: str) -> bool:
    path, _, anchor = target.partition("#")
    file = document if not path else (document.parent / path)
    if not file.exists():
        return False
    return not anchor or anchor in anchors(file)


def anchors(file: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
