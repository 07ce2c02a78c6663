"""A further question is calibrated, evaluated, tested and checked like a rule set of its own, beside the others."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import yaml

from tests.core.sets import artefact, category_set
from tests.core.test_questions import EMERGENCY, URGENCY
from tests.offline.populations import name_of
from tests.servers.stub_engine import StubEngine
from worker import studies, wiring
from worker.adapters.files import load_artefact, load_labelled
from worker.core.policy import Calibration
from worker.errors import ConfigError
from worker.offline.calibration_run import CalibrateOptions
from worker.offline.check import check_further
from worker.offline.demo import Progress
from worker.runtime.question import prepare_question
from worker.settings import Settings
from worker.wiring import Desk

LEVELS = [{"name": word, "label": word} for word in ("later", "soon", "now")]
KEYWORDS = {"trifle": " later", "matter": " soon", "alarm": " now"}


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[tuple[Path, Settings, StubEngine]]:
    base = category_set("billing", "login", "bug").model_dump(mode="json", exclude_unset=True, exclude_none=True)
    questions = {"questions": [EMERGENCY, {**URGENCY, "levels": LEVELS}]}
    rules = {"version": 1, "alpha": 0.1, "delta": 0.1}
    for name, content in (("categories", base), ("questions", questions), ("rules", rules)):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    rows = [
        f"t{i},ticket {name_of(i)} {word},{('billing', 'login', 'bug')[i % 3]},{level if i % 7 else ''}"
        for i in range(210)
        for level, word in [((1, "trifle"), (2, "matter"), (3, "alarm"))[i // 3 % 3]]
    ]
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples/tickets.csv").write_text("\n".join(["id,text,label,urgency", *rows]), encoding="utf-8")
    async with StubEngine() as stub:
        stub.behaviour.keywords, stub.behaviour.strength = KEYWORDS, 4.0
        yield tmp_path, Settings(engine_url=stub.url), stub


def quiet(_: str) -> Progress:
    return lambda *_: None


async def calibrate(folder: Path, settings: Settings, question: str | None) -> Path:
    run = await studies.calibrate_command(
        settings, folder, None, "all", None, CalibrateOptions(), None, quiet, question
    )
    return studies.write_artefact(run.result.artefact, folder, question)


async def test_a_score_question_is_calibrated_from_the_column_of_its_name_into_a_file_of_its_own(
    desk: tuple[Path, Settings, StubEngine],
) -> None:
    folder, settings, _ = desk
    path = await calibrate(folder, settings, "urgency")
    assert path.name == "calibration.urgency.json"
    assert not (folder / "calibration.json").exists()
    made = load_artefact(path)
    assert made is not None
    assert (made.labels, made.rule_set, made.data["labelled"]) == (("1", "2", "3"), "desk_urgency", 180)
    loaded = Desk.load(folder)
    assert loaded.further["emergency"] is None
    assert loaded.further["urgency"] == made
    engines = wiring.make_engines(settings)
    question = await wiring.ask_once(loaded.rule_set, engines[0][1])
    found = await wiring.further_for(loaded, question, engines, lambda _: None)
    await engines[0][1].aclose()
    assert [isinstance(own, Calibration) for _, own in found] == [False, True]
    result = await studies.evaluate_command(settings, folder, labelled(folder), "all", None, quiet, "urgency")
    assert result.measures.accuracy.value > 0.9


def labelled(folder: Path) -> Path:
    """Later tickets, in a file that has one question only."""
    path = folder / "later.csv"
    words = ((1, "trifle"), (2, "matter"), (3, "alarm"))
    rows = [f"later {name_of(i)} {words[i % 3][1]},{words[i % 3][0]}" for i in range(60)]
    path.write_text("\n".join(["text,label", *rows]), encoding="utf-8")
    return path


async def test_an_unknown_question_and_a_missing_calibration_are_named(desk: tuple[Path, Settings, StubEngine]) -> None:
    folder, settings, stub = desk
    with pytest.raises(ConfigError, match=r"no question 'weather' \(emergency, urgency\)"):
        await calibrate(folder, settings, "weather")
    with pytest.raises(ConfigError, match=r"calibration\.urgency\.json: no calibration to evaluate"):
        await studies.evaluate_command(settings, folder, None, "all", None, quiet, "urgency")
    assert stub.counters.items == 0


def test_answers_that_are_none_are_listed_and_a_file_without_the_column_is_read_by_label(
    desk: tuple[Path, Settings, StubEngine],
) -> None:
    folder = desk[0]
    assert len(load_labelled(labelled(folder), ("1", "2", "3"), "urgency")) == 60
    with pytest.raises(ConfigError, match="'3' is no answer to 'urgency'"):
        load_labelled(folder / "samples/tickets.csv", ("1", "2"), "urgency")
    (folder / "bare.csv").write_text("text\nx\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="no column 'urgency' with its answers.*; the columns are text"):
        load_labelled(folder / "bare.csv", ("1", "2"), "urgency")


async def test_the_selftest_turns_the_answers_behind_the_same_prompt(desk: tuple[Path, Settings, StubEngine]) -> None:
    folder, settings, _ = desk
    found = await studies.selftest_command(settings, folder, None, None, 2, 1, quiet, "urgency")
    assert [label.word for label in found.labels] == ["later", "soon", "now"]
    assert found.accuracy is not None
    assert found.accuracy.value > 0.9
    assert found.question.behind is not None


async def test_check_says_for_each_question_what_is_wrong_with_it(desk: tuple[Path, Settings, StubEngine]) -> None:
    folder, settings, _ = desk
    await calibrate(folder, settings, "urgency")
    loaded = Desk.load(folder)
    ((_, engine),) = wiring.make_engines(settings)
    question = await prepare_question(loaded.rule_set, engine)
    findings = await check_further(folder, question, engine)
    assert [(f.part, f.state) for f in findings] == [("question emergency", "warning"), ("question urgency", "ok")]
    assert "calibrate" in findings[0].todo
    assert "--question emergency" in findings[0].todo
    path = folder / "calibration.emergency.json"
    path.write_bytes(artefact(loaded.rule_set).to_bytes().replace(b'"login"', b'"logon"'))
    assert [f.state for f in await check_further(folder, question, engine)] == ["wrong", "ok"]
    await engine.aclose()


async def test_the_cost_of_each_added_question_is_measured_in_one_run_and_nothing_comes_from_the_cache(
    desk: tuple[Path, Settings, StubEngine],
) -> None:
    folder, settings, stub = desk
    costs = await studies.question_costs(settings, folder, 6, 2, quiet)
    assert [(cost.questions, cost.added) for cost in costs] == [(1, "category"), (2, "emergency"), (3, "urgency")]
    assert [cost.unanswered for cost in costs] == [0, 0, 0]
    assert all(len(cost.seconds) == 2 and cost.median_s > 0 for cost in costs)
    assert 0 < costs[0].tokens < costs[1].tokens < costs[2].tokens
    assert stub.counters.items >= 2 * 6 * (1 + 2 + 3)  # besides checks and warming up
