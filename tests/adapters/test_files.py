"""Files people write: refused whole, with file, line and what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from worker.adapters.files import load_artefact, load_labelled, load_rule_set, write_atomically
from worker.errors import ArtefactError, ConfigError, RuleSetError

CATEGORIES = """\
id: desk
version: 1
language: en
prompt:
  instruction: Sort them.
categories:
  - id: billing
    name: Billing
    description: money
    label: NO
  - id: login
    name: Login
    description: sign-in
    label: login
"""
RULES = """\
version: 1
alpha: 0.1
delta: 0.1
"""


def write(folder: Path, categories: str = CATEGORIES, rules: str = RULES) -> Path:
    (folder / "categories.yaml").write_text(categories, encoding="utf-8")
    (folder / "rules.yaml").write_text(rules, encoding="utf-8")
    return folder


def test_a_label_called_NO_stays_a_word(tmp_path: Path) -> None:
    rule_set = load_rule_set(write(tmp_path))
    assert rule_set.categories.categories[0].label == "NO"
    assert rule_set.input_topic == "tickets.desk"
    assert rule_set.categories.topic("billing") == "desk.billing"


BAD: list[tuple[str, str, int, str]] = [
    ("duplicate key", "version: 1\nalpha: 0.1\ndelta: 0.1\nalpha: 0.5\n", 4, "stands twice"),
    ("not a number", "version: 1\nalpha: .nan\ndelta: 0.1\n", 2, "not a number"),
    ("infinite", "version: 1\nalpha: 0.1\ndelta: -.inf\n", 3, "not a number"),
    ("alias", "version: &a 1\nalpha: 0.1\ndelta: 0.1\n", 1, "anchors"),
    ("tag", "version: 1\nalpha: !!python/object:os.system x\ndelta: 0.1\n", 2, "tag"),
    ("unknown key", "version: 1\nalpha: 0.1\ndelta: 0.1\ngate:\n  x: 1\n", 5, "not permitted"),
    ("string for a number", 'version: 1\nalpha: "0.1"\ndelta: 0.1\n', 2, "number"),
    ("out of bounds", "version: 1\nalpha: 0.9\ndelta: 0.1\n", 2, "less than or equal"),
    ("broken", "version: 1\nalpha: [0.1\ndelta: 0.1\n", 3, "not YAML"),
    ("two documents", "version: 1\nalpha: 0.1\ndelta: 0.1\n---\na: 1\n", 4, "not YAML"),
    ("unknown category", "version: 1\nalpha: 0.1\ndelta: 0.1\ncategories:\n  refund: {alpha: 0.01}\n", 0, "refund"),
    ("huge number", "version: 99999999999999999999999\nalpha: 0.1\ndelta: 0.1\n", 1, "too large"),
    (
        "unknown kind",
        "version: 1\nalpha: 0.1\ndelta: 0.1\noverrides:\n  - kind: regex\n    name: x\n",
        5,
        "expected tags",
    ),
    (
        "keyword that routes",
        "version: 1\nalpha: 0.1\ndelta: 0.1\noverrides:\n  - kind: keyword\n    name: x\n    any: [y]\n"
        "    then: route\n",
        8,
        "not permitted",
    ),
    ("a loop", "version: 1\nalpha: 0.1\ndelta: 0.1\ntopics:\n  input: desk.human\n", 0, "round for ever"),
    ("same topic twice", "version: 1\nalpha: 0.1\ndelta: 0.1\ntopics:\n  human: desk.billing\n", 0, "different topics"),
]


@pytest.mark.parametrize(("text", "line", "problem"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_bad_rules_are_refused_with_file_and_line(tmp_path: Path, text: str, line: int, problem: str) -> None:
    with pytest.raises(RuleSetError) as caught:
        load_rule_set(write(tmp_path, rules=text))
    assert "rules.yaml" in caught.value.where
    if line:
        assert caught.value.where.endswith(f":{line}"), str(caught.value)
    assert problem in str(caught.value)


def test_a_deep_file_and_a_missing_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RuleSetError, match="deeply"):
        load_rule_set(write(tmp_path, rules="a: " + "[" * 40 + "]" * 40))
    with pytest.raises(RuleSetError):
        load_rule_set(write(tmp_path, rules="a: " + "[" * 9000 + "]" * 9000))
    with pytest.raises(RuleSetError, match="no such rule set folder"):
        load_rule_set(tmp_path / "nowhere")


def test_labels_that_stand_twice_and_none_with_a_topic_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RuleSetError, match="label used twice: login"):
        load_rule_set(write(tmp_path, CATEGORIES.replace("label: NO", "label: login")))
    with pytest.raises(RuleSetError, match="has no topic"):
        load_rule_set(write(tmp_path, CATEGORIES.replace("id: login", "id: none\n    topic: x")))


def test_labelled_tickets_are_read_from_csv_and_jsonl(tmp_path: Path) -> None:
    table, lines = tmp_path / "t.csv", tmp_path / "t.jsonl"
    table.write_text('id,text,label,lang\n1,"Hello, you",billing,en\n2,안녕,none,ko\n', encoding="utf-8")
    lines.write_text('{"id": 1, "text": "Hello, you", "label": "billing", "language": "en"}\n\n', encoding="utf-8")
    rows = load_labelled(table, ["billing"])
    assert [(t.id, t.text, t.label, t.language) for t in rows] == [
        ("1", "Hello, you", "billing", "en"),
        ("2", "안녕", "none", "ko"),
    ]
    assert load_labelled(lines, ["billing"]) == rows[:1]


def test_everything_wrong_with_a_labelled_file_is_listed_at_once(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text("id,text,label\n1,,billing\n2,hi,refund\n3,hi,billing\n3,ho,billing\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_labelled(table, ["billing"])
    message = str(caught.value)
    for part in ("line 2: no text", "line 3: label 'refund'", "id '3' stands 2 times", "nothing was used"):
        assert part in message
    table.write_text("id,body,label\n1,x,billing\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="no column text; the columns are id, body, label"):
        load_labelled(table, ["billing"])


def test_an_artefact_is_absent_or_trusted_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    assert load_artefact(path) is None
    path.write_bytes(b"{}")
    with pytest.raises(ArtefactError, match="calibration.json"):
        load_artefact(path)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_atomically(path, b"old")
    with pytest.raises(TypeError):
        write_atomically(path, "not bytes")  # type: ignore[arg-type]
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
