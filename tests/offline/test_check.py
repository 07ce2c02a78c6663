"""Check: what was found is told, also where an engine stops answering half way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
import yaml

from tests.core.sets import artefact, category_set, certificate, rule_set
from tests.servers.stub_engine import StubEngine
from worker import serving
from worker.adapters.files import load_rule_set
from worker.adapters.sglang import SGLangEngine
from worker.core.certificates import Certificate, MarginGate
from worker.core.primitives import Primitive
from worker.core.rules import RuleSet
from worker.core.scores import LabelScores
from worker.errors import EngineUnavailable
from worker.offline.check import Finding, check_calibration, check_engine
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


async def calibration_row(folder: Path, rules: RuleSet, *certificates: Certificate, **changes: object) -> Finding:
    """Of a calibration that these rules find, fitted on what runs."""
    async with StubEngine() as stub:
        engine = SGLangEngine(stub.url)
        try:
            question = await prepare_question(rules, engine)
        finally:
            await engine.aclose()
    made = artefact(rules, *certificates, fingerprints=question.fingerprints, **changes)
    (folder / "calibration.json").write_bytes(made.to_bytes())
    return check_calibration(folder, question)


async def test_a_calibration_that_the_rules_accept_names_what_is_certified(tmp_path: Path) -> None:
    row = await calibration_row(tmp_path, rule_set())
    assert (row.state, row.what) == ("ok", "certified: billing, login, bug (fitted 2026-01-01T00:00:00Z)")


async def test_a_certificate_that_today_s_rules_find_too_weak_is_a_warning(tmp_path: Path) -> None:
    """The rules became stricter since: the worker routes nothing, and `certified` alone would say that all is well."""
    row = await calibration_row(tmp_path, rule_set(alpha=0.01))
    assert row.state == "warning"
    assert row.what.startswith(
        "every ticket goes to people; certified, and never routed under the rules as they are: billing, login, bug."
    )
    assert "10 %" in row.what and "demand at most 1 %" in row.what
    assert "calibrate" in row.todo and "alpha" in row.todo


async def test_a_warning_tells_those_that_the_rules_refuse_from_those_that_route(tmp_path: Path) -> None:
    rules = rule_set(categories={"login": {"alpha": 0.01}})
    own = [certificate(name) for name in ("billing", "login")]
    row = await calibration_row(tmp_path, rules, *own, certificate("bug", threshold=float("inf")))
    assert row.state == "warning"
    assert row.what.startswith("certified: billing (fitted")
    assert "never routed under the rules as they are: login. " in row.what


async def test_a_stability_gate_that_nothing_passes_is_a_warning(tmp_path: Path) -> None:
    gate = MarginGate(measured=True, m_star=float("inf"), n=50, m=0, k=0, phi=0.01, delta=0.1)
    row = await calibration_row(tmp_path, rule_set(), margin_gate=gate)
    assert (row.state, "stability gate" in row.what) == ("warning", True)
