"""Files of unlabelled tickets and of historical shares: read whole, or refused with everything that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from worker.errors import ConfigError
from worker.offline.traffic import load_shares, load_unlabelled


def written(folder: Path, name: str, content: str) -> Path:
    path = folder / name
    path.write_text(content, encoding="utf-8")
    return path


def test_unlabelled_tickets_come_from_csv_and_jsonl_and_labels_in_them_are_not_looked_at(tmp_path: Path) -> None:
    table = written(tmp_path, "t.csv", "text,label,language\nno toner,unheard of,de\n프린터 고장,,ko\n")
    first, second = load_unlabelled(table)
    assert (first.id, first.text, first.label, first.language) == ("row-2", "no toner", "", "de")
    assert second.text == "프린터 고장"
    lines = written(tmp_path, "t.jsonl", '{"id": 7, "text": "no toner"}\n\n{"text": "no paper", "id": null}\n')
    assert [t.id for t in load_unlabelled(lines)] == ["7", "row-3"]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("t.csv", "id,text\na,x\na,\nb,y\nb,z\n", ["2 problems", "line 3: no text", "id 'b' stands 2 times"]),
        ("t.csv", "id,body\na,x\n", ["no column text"]),
        ("t.csv", "text\n", ["no tickets in it"]),
        ("t.jsonl", '{"text": "x"}\nnot json\n', ["1 problems", "line 2: not JSON"]),
        ("t.jsonl", "[1]\n", ["line 1: not a JSON object"]),
        ("t.csv", 'text\n"never closed\n', ["not a UTF-8 CSV"]),
    ],
)
def test_a_bad_file_of_unlabelled_tickets_says_what_and_where(
    tmp_path: Path, name: str, content: str, said: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_unlabelled(written(tmp_path, name, content))
    assert all(word in str(caught.value) for word in said), caught.value


def test_shares_come_from_csv_and_json_as_shares_or_counts(tmp_path: Path) -> None:
    assert load_shares(written(tmp_path, "s.csv", "category,share\nbilling,0.25\nlogin,7e-1\n")) == {
        "billing": 0.25,
        "login": 0.7,
    }
    assert load_shares(written(tmp_path, "s.json", '{"billing": 120, "login": 0}')) == {"billing": 120.0, "login": 0.0}


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("s.csv", "category,share\na,-1\nb,\nc,nan\nc,1\nc,2\n", ["4 problems", "line 2", "line 3", "line 4", "twice"]),
        ("s.json", '{"a": true, "b": "many", "c": null}', ["3 problems"]),
        ("s.json", "[1]", ["one JSON object"]),
        ("s.json", "{", ["not JSON"]),
        ("s.csv", "name,share\na,1\n", ["no column category"]),
        ("missing.json", None, ["cannot be read"]),
        ("missing.csv", None, ["cannot be read"]),
    ],
)
def test_bad_shares_are_listed(tmp_path: Path, name: str, content: str | None, said: list[str]) -> None:
    path = tmp_path / name if content is None else written(tmp_path, name, content)
    with pytest.raises(ConfigError) as caught:
        load_shares(path)
    assert all(word in str(caught.value) for word in said), caught.value
