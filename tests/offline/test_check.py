"""Check: what was found is told, also where an engine stops answering half way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
import yaml

from tests.core.sets import category_set, rule_set
from tests.servers.stub_engine import StubEngine
from worker import serving
from worker.adapters.files import load_rule_set
from worker.adapters.sglang import SGLangEngine
from worker.core.primitives import Primitive
from worker.core.scores import LabelScores
from worker.errors import EngineUnavailable
from worker.offline.check import check_engine
from worker.runtime.question import Ask, check_easy_tickets, easy_tickets, prepare_question, score_texts
from worker.settings import Settings

CATEGORIES = 999


class SlowOnMany(SGLangEngine):
    """A server that reads a few texts in time, and a thousand not."""

    async def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        if len(texts) > CATEGORIES:
            raise EngineUnavailable("no answer within 5 s")
        return await super().tokenize(texts)


def written(folder: Path) -> Path:
    row = category_set().model_dump(mode="json", exclude_defaults=True)
    row["two_levels"] = {
        "departments": [{"id": f"d{n}", "name": f"Department {n}", "description": "d"} for n in range(2)]
    }
    row["categories"] = [
        {"id": f"c{n}", "parent": f"d{int(n > 0)}", "name": f"C{n}", "description": "c", "examples": ["x"]}
        for n in range(CATEGORIES + 1)
    ]
    (folder / "categories.yaml").write_text(yaml.safe_dump(row), encoding="utf-8")
    (folder / "rules.yaml").write_text("version: 1\nalpha: 0.1\ndelta: 0.1\n", encoding="utf-8")
    return folder


async def test_an_engine_that_times_out_at_one_department_is_a_row_that_names_it(tmp_path: Path) -> None:
    rules = load_rule_set(written(tmp_path))
    async with StubEngine() as stub:
        engine = SlowOnMany(stub.url)
        try:
            findings, question = await check_engine(rules, engine)
        finally:
            await engine.aclose()
    assert question is None
    assert [(f.part, f.state) for f in findings if f.state != "warning"] == [("engine", "ok"), ("labels", "wrong")]
    assert findings[-1].what == f"department 'd1', {CATEGORIES} labels: no answer within 5 s"
    assert "fewer categories in one question" in findings[-1].todo


async def test_a_part_that_cannot_be_set_up_takes_no_other_row_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenizer file that cannot be read; no engine, broker or cache is there at all."""
    monkeypatch.chdir(tmp_path)
    settings = Settings(engine_url="http://127.0.0.1:1", tokenizer_file=tmp_path / "nowhere.json")
    found = {finding.part: finding for finding in await serving.check(settings, written(tmp_path))}
    assert {"rules", "topics", "engine", "calibration", "cache"} <= set(found)
    assert "nowhere.json" in found["engine"].what and found["rules"].state == found["cache"].state == "ok"


async def test_an_easy_ticket_that_is_refused_is_left_out_of_what_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = rule_set()
    refused: list[int] = []

    async def refusing(primitive: Primitive, texts: Iterable[str], ask: Ask) -> dict[str, LabelScores | str]:
        found = await score_texts(primitive, texts, ask)
        return found | dict.fromkeys(list(found)[: refused[0]], "engine_refused")

    async with StubEngine() as stub:
        engine = SGLangEngine(stub.url)
        try:
            asked = await prepare_question(rules, engine)
            monkeypatch.setattr("worker.runtime.question.score_texts", refusing)
            refused.append(1)
            most = await check_easy_tickets(asked, engine)
            refused[0] = 100
            none = await check_easy_tickets(asked, engine)
        finally:
            await engine.aclose()
    assert len(most.masses) == len(easy_tickets(rules)) - 1
    assert most.right <= len(most.masses)
    assert none.problem(0.5) == "the engine refused every easy ticket; its log says why"
