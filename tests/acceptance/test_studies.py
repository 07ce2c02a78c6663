"""The installed command, for those who calibrate: what is written, what is not, and what the exit code says."""

from __future__ import annotations

import csv
import os
import re
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import orjson
import pytest
import yaml

from tests.acceptance.served import COMMAND
from tests.acceptance.test_commands import run
from tests.core.sets import category_set
from tests.integration.desk import LABELS, StubProcess
from tests.offline.populations import name_of
from tests.waiting import wait_for

PROBES = 1
"""Items that are no tickets: at its start a command asks the engine what it can do."""

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def stub() -> Iterator[StubProcess]:
    with StubProcess(latency_s=0.0) as process:
        yield process


@pytest.fixture
def desk(tmp_path: Path, stub: StubProcess) -> Desk:
    stub.tell(mass=0.9, strength=3.0)
    return Desk(tmp_path, stub)


class Desk:
    """A rule set folder without a calibration, and files of tickets beside it."""

    def __init__(self, folder: Path, stub: StubProcess) -> None:
        self.folder, self.stub = folder, stub
        self.rules = folder / "rules"
        self.rules.mkdir()
        self.artefact = self.rules / "calibration.json"
        self.report = folder / "report"
        self.journal = folder / "scores.jsonl"
        categories = category_set(*LABELS).model_dump(mode="json", exclude_defaults=True)
        self._write("categories.yaml", categories)
        self.demand()

    def demand(self, **rules: object) -> None:
        self._write("rules.yaml", {"version": 1, "alpha": 0.1, "delta": 0.1, **rules})

    def _write(self, name: str, content: object) -> None:
        (self.rules / name).write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")

    def run(self, command: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        places = ["--rules", self.rules, "--report", self.report]
        places += ["--scores", self.journal] if command != "selftest" else []
        return run(command, *map(str, (*places, *arguments)), ROUTER_ENGINE_URL=self.stub.url)

    def calibrated(self) -> dict[str, Any]:
        found: dict[str, Any] = orjson.loads(self.artefact.read_bytes())
        return found

    def items(self) -> int:
        """Tickets that the engine was asked about until now."""
        found: int = self.stub.tell()["counters"]["items"]
        return found

    def file(self, name: str, tickets: Sequence[tuple[str, str]]) -> Path:
        path = self.folder / name
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["id", "text", "label"])
            writer.writerows([f"{name}-{i}", text, label] for i, (text, label) in enumerate(tickets))
        return path


def tickets(n: int, first: int = 0, *, wrong: bool = False) -> list[tuple[str, str]]:
    """Three of four name their category, which the stub follows; the others name none, and some belong to none. Where
    `wrong`, what they name is not what they are.
    """
    made = []
    for i in range(first, first + n):
        label = LABELS[i % 3]
        told = LABELS[(i + 1) % 3] if wrong else label
        if i % 4:
            made.append((f"ticket {name_of(i)}: trouble with {told}", label))
        else:
            made.append((f"ticket {name_of(i)} says nothing", label if i % 8 else "none"))
    return made


def test_calibrate_writes_an_artefact_and_a_report(desk: Desk) -> None:
    done = desk.run("calibrate", "--labelled", desk.file("good.csv", tickets(160)))
    assert done.returncode == 0, done.stderr
    assert "errors in" in done.stdout and f"written: {desk.artefact}" in done.stdout, done.stdout
    assert any(c["lambda"] != "inf" for c in desk.calibrated()["certificates"])
    page = (desk.report / "report.html").read_text(encoding="utf-8")
    assert "may route" in page
    assert sorted(path.suffix for path in desk.report.iterdir() if path.name != "report.html") == [".png"] * 6


@pytest.mark.parametrize("asked", [("--alpha", "0.2"), ("--form", "raw"), ("--target", "misroutes-per-ticket")])
def test_a_what_if_writes_a_report_and_nothing_else_unless_it_is_told_to(desk: Desk, asked: tuple[str, str]) -> None:
    labelled = desk.file("good.csv", tickets(160))
    done = desk.run("calibrate", "--labelled", labelled, *asked)
    assert done.returncode == 0, done.stderr
    assert "what if only" in done.stdout
    assert (desk.report / "report.html").exists()
    assert sorted(path.name for path in desk.rules.iterdir()) == ["categories.yaml", "rules.yaml"]
    told = desk.run("calibrate", "--labelled", labelled, *asked, "--write")
    assert told.returncode == 0, told.stderr
    certificate = desk.calibrated()["certificates"][0]
    assert {
        "--alpha": certificate["alpha"] == 0.2,
        "--form": desk.calibrated()["form"] == "raw_margin",
        "--target": certificate["procedure"] == "misroutes_per_ticket",
    }[asked[0]]


def test_a_bad_labelled_file_lists_everything_wrong_and_nothing_is_written_or_asked(desk: Desk) -> None:
    bad = desk.folder / "bad.csv"
    bad.write_text("id,text,label\na,fine,login\nb,,login\nc,odd,shipping\na,again,bug\n", encoding="utf-8")
    before = desk.items()
    done = desk.run("calibrate", "--labelled", bad)
    assert done.returncode == 2
    for said in ("3 problems", "line 3: no text", "line 4: label 'shipping'", "id 'a' stands 2 times"):
        assert said in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    assert not desk.artefact.exists() and not desk.report.exists() and not desk.journal.exists()
    assert desk.items() == before


def test_a_second_run_asks_the_engine_nothing_and_writes_the_same(desk: Desk) -> None:
    labelled = desk.file("good.csv", tickets(90))
    before = desk.items()
    assert desk.run("calibrate", "--labelled", labelled).returncode == 0
    between = desk.items()
    assert between >= before + 90
    first = desk.calibrated()
    again = desk.run("calibrate", "--labelled", labelled)
    assert again.returncode == 0
    assert desk.items() <= between + PROBES
    assert desk.calibrated()["certificates"] == first["certificates"]


def test_the_target_of_the_rules_is_what_is_certified(desk: Desk) -> None:
    desk.demand(target="misroutes_per_ticket")
    assert desk.run("calibrate", "--labelled", desk.file("good.csv", tickets(90))).returncode == 0
    assert {c["procedure"] for c in desk.calibrated()["certificates"]} == {"misroutes_per_ticket"}


def test_repeated_scoring_measures_stability_and_the_selftest_fills_its_panel(desk: Desk) -> None:
    labelled = desk.file("good.csv", tickets(320))
    before = desk.items()
    done = desk.run("calibrate", "--labelled", labelled, "--repeat", "--selftest")
    assert done.returncode == 0, done.stderr
    assert desk.items() >= before + 640
    gate = desk.calibrated()["margin_gate"]
    assert (gate["measured"], gate["n"], gate["k"]) == (True, 320, 0)
    assert (desk.report / "flips.png").exists()


def test_unlabelled_tickets_fix_the_thresholds_beforehand(desk: Desk) -> None:
    labelled, traffic = desk.file("good.csv", tickets(300)), desk.file("traffic.csv", tickets(800, first=10_000))
    done = desk.run("calibrate", "--labelled", labelled, "--unlabelled", traffic)
    assert done.returncode == 0, done.stderr
    assert {c["procedure"] for c in desk.calibrated()["certificates"]} == {"frozen"}
    assert desk.calibrated()["data"]["unlabelled"] == 800


def test_historical_shares_give_probabilities_and_certify_nothing(desk: Desk) -> None:
    traffic, shares = desk.file("traffic.csv", tickets(600)), desk.folder / "shares.csv"
    asked = ["--history-shares", shares, "--unlabelled", traffic]
    shares.write_text("category,share\nbilling,70\nlogin,-1\nshipping,x\n", encoding="utf-8")
    bad = desk.run("calibrate", *asked)
    assert bad.returncode == 2
    assert "line 3" in bad.stderr and "line 4" in bad.stderr and not desk.artefact.exists()
    shares.write_text("category,share\nbilling,70\nlogin,20\nbug,10\n", encoding="utf-8")
    done = desk.run("calibrate", *asked)
    assert done.returncode == 0, done.stderr
    assert "nothing is certified" in done.stdout and "70.0%" in done.stdout
    assert desk.calibrated()["certificates"] == []
    assert desk.run("calibrate", "--labelled", desk.file("good.csv", tickets(160))).returncode == 0
    refused = desk.run("calibrate", *asked)
    assert refused.returncode == 2
    assert "certify nothing" in refused.stderr and desk.calibrated()["certificates"]


CHOICES = ("evaluate", "--concurrency", "2", "--choices")


def test_multiple_choice_questions_are_answered_and_counted(desk: Desk) -> None:
    file, told = desk.folder / "choices.jsonl", desk.folder / "told.json"
    asked = [
        {"id": n, "question": f"What is {n} + 1?", "options": [n + 1, n, "no idea"], "answer": "A"} for n in (3, 5)
    ]
    file.write_bytes(b"\n".join(map(orjson.dumps, asked)))
    done = run(*CHOICES, str(file), "--json", str(told), ROUTER_ENGINE_URL=desk.stub.url)
    assert done.returncode == 0, done.stderr
    for said in ("2 questions", "accuracy", "p50", "2 at once", "place", "not calibrated"):
        assert said in done.stdout, done.stdout
    found = orjson.loads(told.read_bytes())
    assert (found["questions"], found["answered"], len(found["rows"])) == (2, 2, 2)
    assert [place["labelled"] for place in found["places"]] == [2, 0, 0]
    assert [flips["flips"] for flips in found["flips"]] == [0, 0]


def test_a_bad_file_of_choices_lists_everything_wrong_and_nothing_is_asked(desk: Desk) -> None:
    file, told = desk.folder / "bad.csv", desk.folder / "told.json"
    file.write_text("id,question,options,answer\na,Which?,x|y,z\na,Which?,x,x\nb,Which?,x|y,\n", encoding="utf-8")
    before = desk.items()
    done = run(*CHOICES, str(file), "--json", str(told), ROUTER_ENGINE_URL=desk.stub.url)
    assert done.returncode == 2
    for said in ("4 problems", "line 2: answer 'z' is not", "line 3: 1 options", "line 4: no answer", "'a' stands 2"):
        assert said in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and not told.exists() and desk.items() == before


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--choices", "x.csv", "--labelled", "y.csv"),
        ("--choices", "x.csv", "--chat-template", "gemma", "--rules", "z"),
        ("--rules", "z", "--writing", "word"),
        ("--choices", "x.csv", "--writing", "verse"),
    ],
)
def test_options_of_evaluate_that_contradict_each_other_are_refused(arguments: tuple[str, ...]) -> None:
    done = run("evaluate", *arguments)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert "Usage" in done.stderr


def test_evaluate_fails_where_alpha_is_exceeded_beyond_chance_and_only_if_asked_to(desk: Desk) -> None:
    assert desk.run("calibrate", "--labelled", desk.file("good.csv", tickets(160))).returncode == 0
    good = desk.run("evaluate", "--labelled", desk.file("fresh.csv", tickets(90, first=1_000)), "--fail-over")
    assert good.returncode == 0, good.stdout + good.stderr
    assert "not exceeded beyond chance" in good.stdout
    changed = desk.file("changed.csv", tickets(90, first=2_000, wrong=True))
    bad = desk.run("evaluate", "--labelled", changed, "--fail-over")
    assert bad.returncode == 1
    assert re.search(r"alpha +exceeded beyond chance", bad.stdout), bad.stdout
    assert desk.run("evaluate", "--labelled", changed).returncode == 0
    assert (desk.report / "report.html").exists()


def test_evaluate_without_a_calibration_says_what_to_do(desk: Desk) -> None:
    done = desk.run("evaluate", "--labelled", desk.file("fresh.csv", tickets(9)))
    assert done.returncode == 2
    assert "run `ticket-router calibrate`" in done.stderr


def test_selftest_tells_a_usable_engine_from_one_that_is_not_by_its_exit_code(desk: Desk) -> None:
    labelled = desk.file("good.csv", tickets(60))
    # The examples in the prompt name their category, so the stub is right about them.
    good = desk.run("selftest", "--labelled", labelled)
    assert good.returncode == 0, good.stdout + good.stderr
    assert (desk.report / "report.html").exists()
    desk.stub.tell(mass=0.02)
    bad = desk.run("selftest", "--unlabelled", labelled)
    assert bad.returncode == 1
    assert "would rather write something else" in bad.stdout


def test_the_guarantees_hold_in_the_quick_benchmark() -> None:
    done = run("benchmark", "guarantees", "--quick")
    assert done.returncode == 0, done.stdout
    for population in ("smooth", "badtop", "flat", "edge", "bumpy", "LLM-like"):
        assert done.stdout.count(population) == 4
    assert "no violation" in done.stdout


def test_the_calibration_benchmark_says_what_it_was_measured_on() -> None:
    done = run("benchmark", "calibration", "--tickets", "1000", "--categories", "5")
    assert done.returncode == 0, done.stderr
    assert re.search(r"5 categories; \d+ cores, .*; \d{4}-\d\d-\d\d", done.stdout), done.stdout


def test_splits_score_a_data_set_once_and_count_broken_promises(tmp_path: Path, desk: Desk) -> None:
    intents = ("card_arrival", "lost_or_stolen_card", "change_pin", "exchange_rate", "terminate_account")
    intents += ("Refund_not_showing_up", "age_limit", "verify_my_identity", "cash_withdrawal_charge")
    words = ("delivery", "lost", "pin", "exchange", "close", "refund", "age", "identity", "cash", "details")
    pairs = list(zip((*intents, "edit_personal_details"), words, strict=True))
    for part, first in (("train.csv", 0), ("test.csv", 5_000)):
        made = [(i, *pairs[i % 10]) for i in range(first, first + 200)]
        rows = [
            (f"ticket {name_of(i)} {'trouble with ' + word if i % 3 else 'says nothing'}", label)
            for i, label, word in made
        ]
        with (tmp_path / part).open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([("text", "label"), *rows])
    asked = ["splits", "banking77", "--data", str(tmp_path), "--rows", "100", "--splits", "3", "--size", "100"]
    asked += ["--to", str(tmp_path / "build"), "--engine", "sglang"]
    desk.stub.tell(keywords={word: f" {word}" for word in words})
    try:
        done = run(*asked, ROUTER_ENGINE_URL=desk.stub.url)
        items = desk.items()
        again = run(*asked, ROUTER_ENGINE_URL=desk.stub.url)
    finally:
        desk.stub.tell(keywords={label: f" {label}" for label in LABELS})
    assert done.returncode == 0, done.stderr
    assert again.returncode == 0 and desk.items() <= items + PROBES
    for said in ("3 random splits", "ECE before", "held-out error", "splits over alpha", "nothing certified"):
        assert said in done.stdout, done.stdout
    too_many = run(*asked, "--size", "190", ROUTER_ENGINE_URL=desk.stub.url)
    assert too_many.returncode == 2 and "at most 150" in too_many.stderr


def test_the_schema_of_decisions_is_a_schema() -> None:
    done = run("schema")
    assert done.returncode == 0
    schema = orjson.loads(done.stdout)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert {"decision_id", "action", "reasons"} <= set(schema["properties"])


def interrupted(desk: Desk, command: str, labelled: Path, journal: Path | None) -> subprocess.CompletedProcess[str]:
    """Ctrl-C as soon as the engine has scored some of the tickets."""
    before, places = desk.items(), ["--scores", str(journal)] if journal else []
    process = subprocess.Popen(
        [COMMAND, command, "--rules", desk.rules, "--report", desk.report, "--labelled", labelled, *places],
        env={**os.environ, "ROUTER_ENGINE": "sglang", "ROUTER_ENGINE_URL": desk.stub.url},
        cwd=desk.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    started = (
        (lambda: bool(journal and journal.exists() and journal.stat().st_size))
        if journal
        else (lambda: desk.items() > before + 100)
    )
    wait_for(started, "the first score", 120)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    return subprocess.CompletedProcess([], process.returncode, out, err)


def test_ctrl_c_says_how_far_it_came_and_what_the_same_command_does_next(desk: Desk) -> None:
    tickets = desk.file("many", [(f"invoice {name_of(i)}", LABELS[0]) for i in range(3000)])
    desk.stub.tell(latency_s=0.2)
    try:
        done = interrupted(desk, "calibrate", tickets, desk.journal)
        assert done.returncode == 130
        reached = re.search(
            r"stopped at: labelled tickets (\d+) of 3000\. Scores until here are kept in (\S+):", done.stderr
        )
        assert reached is not None and reached[2] == str(desk.journal)
        assert done.stderr.rstrip().endswith("the same command goes on from there")
        assert int(reached[1]) <= len(desk.journal.read_bytes().splitlines()) < 3000
        done = interrupted(desk, "selftest", tickets, None)
        assert done.returncode == 130
        assert re.search(r"stopped .*Nothing of it is kept: the same command begins anew", done.stderr)
    finally:
        desk.stub.tell(latency_s=0.0)
    assert not desk.artefact.exists()
