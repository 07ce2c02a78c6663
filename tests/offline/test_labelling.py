"""Labels from people's answers: garbage is refused with its line, and nothing is taken for more than it proves."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest
from typer.testing import CliRunner

from tests.core.sets import artefact, certificate, rule_set, scores
from tests.offline.test_backtest import SEEN_BY, decided, line, side
from worker import cli
from worker.adapters.files import load_labelled, load_rule_set
from worker.adapters.topic_log import Record
from worker.core.envelope import DECISION_HEADER
from worker.core.modes import Mode
from worker.core.policy import carried_out, escalate_unscored, reason
from worker.errors import ConfigError
from worker.offline.answer_files import SKEW, Texts, read_texts
from worker.offline.exporting import lines_of
from worker.offline.labelling import Labelling, as_csv, label
from worker.offline.rules_diff import Side
from worker.ports import Partition
from worker.runtime.outputs import would_of

SURE, UNSURE = scores(0.9, 0.03, 0.03, 0.03), scores(0.4, 0.3, 0.2, 0.05)
BY = side()
RULES = BY.rule_set
DECIDED = datetime(2026, 3, 2, 8, tzinfo=UTC)
NOW = datetime(2026, 5, 1, tzinfo=UTC)
"""When `labels` is run."""


class Case:
    """A log, answers to it, and the tickets' texts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log: list[bytes] = []
        self.answers: list[bytes] = []
        self.texts: dict[str, tuple[str, str]] = {}
        self.tickets: Texts | None = None

    def ticket(self, mode: Mode = "shadow", *, sure: bool = True, at: datetime = DECIDED, **answer: Any) -> str:
        """One decision; with `answer` one to it. The id of the decision."""
        number = len(self.log)
        name = f"{number:032x}"
        decision = decided(BY, SURE if sure else UNSURE)
        held = RULES.model_copy(update={"rules": RULES.rules.model_copy(update={"mode": mode})})
        done = carried_out(decision, held)
        would = None if done is decision else would_of(decision)
        decided_at = at.isoformat()
        self.log.append(line(BY, done, number, decision_id=name, mode=mode, would=would, decided_at=decided_at))
        self.texts[f"T-{number}"] = (f"text {number}", "en")
        if answer:
            self.answer(name, **answer)
        return name

    def answer(self, name: str, **changes: Any) -> None:
        body = {"schema": "ticket-router/answer/1", "decision_id": name, "answered_at": "2026-03-02T09:00:00Z"}
        self.answers.append(orjson.dumps({**body, **changes}))

    def run(self, *include: str) -> Labelling:
        path = self.folder / "answers.jsonl"
        path.write_bytes(b"\n".join(self.answers) + b"\n")
        return label(RULES, path, [self.log], self.tickets or Texts({}, self.texts), NOW, include)


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def test_what_people_found_in_shadow_becomes_a_file_that_calibrate_reads(case: Case, tmp_path: Path) -> None:
    case.ticket(category="billing")
    case.ticket(category="none", sure=False)
    case.ticket(not_a_ticket=True)
    found = case.run()
    (tmp_path / "labelled.csv").write_bytes(as_csv(found))
    labelled = load_labelled(tmp_path / "labelled.csv", RULES.categories.ids)
    assert [(t.id, t.text, t.label) for t in labelled] == [
        ("T-0", "text 0", "billing"), ("T-1", "text 1", "none"), ("T-2", "text 2", "none"),
    ]  # fmt: skip
    assert not found.warnings


@pytest.mark.parametrize("text", ['=HYPERLINK("http://x/?"&A1)', "+82 2 123", "-1", "@SUM(A1)", "\t=1"])
def test_cells_that_a_spreadsheet_would_compute_are_written_as_they_are_and_counted(
    case: Case, tmp_path: Path, text: str
) -> None:
    case.ticket(category="billing")
    case.texts["T-0"] = (text, "en")
    found = case.run()
    assert any(warning.startswith("1 cells begin with = + - or @") for warning in found.warnings)
    (tmp_path / "labelled.csv").write_bytes(as_csv(found))
    assert [row.text for row in load_labelled(tmp_path / "labelled.csv", RULES.categories.ids)] == [text.strip()]


def test_what_auto_would_have_got_wrong_is_counted_on_blind_answers_only(case: Case) -> None:
    for n in range(20):
        case.ticket(category="billing" if n else "login")
    case.ticket("assist", category="bug")
    case.ticket(category="bug", sure=False)  # auto would have asked people too
    found = case.run("assist")
    n, wrong = found.wrong[""]
    assert (n, wrong.value) == (20, 0.05) and wrong.upper > 0.2
    assert found.wrong["billing"] == found.wrong[""]


def test_answers_in_sight_of_a_suggestion_are_left_out_and_marked_where_they_are_wanted(
    case: Case, tmp_path: Path
) -> None:
    case.ticket(category="billing")
    case.ticket("assist", category="billing")
    case.ticket("auto", sure=False, category="login")
    alone = case.run()
    assert [row.mode for row in alone.rows] == ["shadow"]
    assert sum("suggestion" in why for why in alone.left) == 2
    assert any("were not in shadow" in warning for warning in alone.warnings)
    mixed = case.run("assist", "auto")
    assert [(row.mode, row.blind) for row in mixed.rows] == [("shadow", True), ("assist", False), ("auto", False)]
    assert sum("blind=false" in warning for warning in mixed.warnings) == 2
    (tmp_path / "mixed.csv").write_bytes(as_csv(mixed))
    with pytest.raises(ConfigError, match="line 3: labelled in sight of a suggestion"):
        load_labelled(tmp_path / "mixed.csv", RULES.categories.ids)


def test_a_file_of_nothing_but_answers_to_suggestions_is_none(case: Case) -> None:
    case.ticket("assist", category="billing")
    with pytest.raises(ConfigError, match="no answer is left to label with: 1 were given in assist"):
        case.run()


def test_the_later_answer_holds_whatever_their_order(case: Case) -> None:
    name = case.ticket(category="billing", answered_at="2026-03-02T10:00:00Z")
    case.answer(name, category="login", answered_at="2026-03-02T18:30:00+09:00")  # half an hour earlier
    case.answer(name, category="billing", answered_at="2026-03-02T10:00:00Z")  # sent twice
    (row,) = case.run().rows
    assert row.label == "billing"
    case.answers.reverse()
    assert case.run().rows == (row,)


def test_answers_that_are_none_are_refused_with_their_lines(case: Case) -> None:
    name = case.ticket(category="billing")
    case.answers.append(b"{")
    case.answer(name, category="logout")
    case.answer(name, category="login")
    with pytest.raises(ConfigError) as caught:
        case.run()
    said = str(caught.value)
    assert "line 2: invalid_json" in said and "line 3: category: 'logout'" in said
    assert "line 4: contradicts line 1" in said


@pytest.mark.parametrize("later_first", [True, False])
def test_a_later_answer_settles_what_two_of_one_moment_left_open(case: Case, later_first: bool) -> None:
    name = case.ticket()
    later = partial(case.answer, name, category="bug", answered_at="2026-04-02T09:00:00Z")
    if later_first:
        later()
    for category in ("billing", "login"):
        case.answer(name, category=category)
    if not later_first:
        later()
    assert [row.label for row in case.run().rows] == ["bug"]


@pytest.mark.parametrize(
    "broken",
    [
        {"would": {}},
        {"would": {"category": None, "certificate": "c"}},
        {"origin": None},
        {"ticket_id": [1]},
        {"ticket_id": None},
        {"decided_at": "yesterday"},
        {"decided_at": "2026-03-02T08:00:00"},
        {"decided_at": None},
    ],
)
def test_a_log_of_something_else_is_refused_with_its_line(case: Case, broken: dict[str, object]) -> None:
    case.ticket(category="billing")
    case.ticket(category="billing")
    case.log[1] = orjson.dumps({**orjson.loads(case.log[1]), **broken})
    with pytest.raises(ConfigError, match="the log, decision 2: no decision of this software"):
        case.run()


def test_answers_that_fit_no_decision_are_refused_with_their_lines(case: Case) -> None:
    case.ticket(category="billing", ticket_id="T-9")
    case.ticket(category="billing", origin={"topic": "tickets.desk", "partition": 1, "offset": 1})
    case.answer("f" * 32, category="billing")
    with pytest.raises(ConfigError) as caught:
        case.run()
    said = str(caught.value)
    assert "line 1: its decision is about ticket 'T-0'" in said
    assert "line 2: its decision is about a ticket from elsewhere" in said
    assert f"line 3: decision {'f' * 32} is none" in said


def test_repeats_and_what_was_never_scored_are_left_out_and_counted(case: Case) -> None:
    case.ticket(category="billing")
    case.ticket(duplicate_of="T-0")
    case.ticket(category="billing")
    del case.texts["T-2"]
    by_rule = escalate_unscored(RULES, reason("override_escalation", name="vip"))
    case.log.append(line(BY, by_rule, 3, decision_id="e" * 32, mode="shadow"))
    case.answer("e" * 32, category="login")
    found = case.run()
    assert len(found.rows) == 1 and sum(found.left.values()) == 3
    assert {why.split()[0] for why in found.left} == {"repeat", "have", "were"}


def moment(at: datetime) -> str:
    return at.isoformat().replace("+00:00", "Z")


def test_an_answer_from_the_future_is_left_out_named_and_never_the_latest(case: Case) -> None:
    name = case.ticket(category="billing")
    case.ticket(category="login", answered_at=moment(NOW + SKEW + timedelta(seconds=1)))
    case.answer(name, category="billing", answered_at="9999-12-31T23:59:59Z")
    found = case.run()
    assert [(row.label, row.answered_at) for row in found.rows] == [("billing", "2026-03-02T09:00:00+00:00")]
    assert found.left == {"are dated in the future": 2}
    assert any("dated in the future were not used: line 2, 3. Whose clock" in warning for warning in found.warnings)
    assert any("1 tickets in shadow have no answer" in warning for warning in found.warnings)


def test_what_an_answer_from_the_future_contradicts_is_left_open(case: Case) -> None:
    case.ticket(category="billing")
    name = case.ticket(category="billing")
    case.answer(name, category="login", answered_at=moment(NOW + timedelta(hours=2)))
    found = case.run()
    assert [row.id for row in found.rows] == ["T-0"]
    assert sorted(found.left.values()) == [1, 1] and any("contradicted by one" in why for why in found.left)
    assert any("contradicted by one dated in the future" in w and "line 2." in w for w in found.warnings)


def test_an_answer_from_before_its_decision_is_left_out_and_named(case: Case) -> None:
    case.ticket(category="billing", answered_at=moment(DECIDED))
    case.ticket(category="login", answered_at=moment(DECIDED - SKEW - timedelta(seconds=1)))
    found = case.run()
    assert [row.label for row in found.rows] == ["billing"]
    assert found.left == {"are dated before their decision was made": 1}
    assert any("before their decision was made were not used: line 2." in warning for warning in found.warnings)


def test_clocks_may_differ_by_minutes(case: Case) -> None:
    case.ticket(category="billing", answered_at=moment(DECIDED - SKEW))
    case.ticket(category="login", answered_at=moment(NOW + SKEW))
    found = case.run()
    assert len(found.rows) == 2 and not found.left and not found.warnings


def test_an_answer_to_the_first_delivery_is_not_before_its_decision(case: Case) -> None:
    case.ticket(category="billing")
    first = orjson.loads(case.log[0])
    case.log.insert(0, orjson.dumps({**first, "decided_at": "2026-03-09T08:00:00Z"}))
    assert len(case.run().rows) == 1


def test_answers_of_impossible_moments_only_are_none(case: Case) -> None:
    case.ticket(category="billing", answered_at="2199-01-01T00:00:00Z")
    case.ticket(category="billing", answered_at="1970-01-01T00:00:00Z")
    with pytest.raises(
        ConfigError, match="no answer is left to label with: 1 are dated in the future; 1 are dated"
    ) as told:
        case.run()
    assert "not used: line 1." in str(told.value) and "not used: line 2." in str(told.value)


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_of_two_texts_under_one_decision_none_is_used_and_both_are_named(
    case: Case, tmp_path: Path, suffix: str
) -> None:
    names = [case.ticket(category="billing") for _ in range(3)]
    told = [("T-0", "a", names[0]), ("T-1", "b", names[1]), ("T-1", "b", names[1]), ("T-0", "forged", names[0]),
            ("T-0", "a", names[0]), ("T-2", "c", names[2]), ("T-0", "fallback", "")]  # fmt: skip
    path = tmp_path / f"tickets.{suffix}"
    rows = [dict(zip(("id", "text", "decision_id"), row, strict=True)) for row in told]
    as_rows = ["id,text,decision_id", *(",".join(row) for row in told)]
    lines = as_rows if suffix == "csv" else [orjson.dumps(row).decode() for row in rows]
    path.write_text("\n".join(lines) + "\n")
    case.tickets = read_texts(path)
    found = case.run()
    assert [(row.id, row.text) for row in found.rows] == [("T-1", "b"), ("T-2", "c")]
    assert found.left == {"are about a decision under which two different texts stand": 1}
    first, second = (2, 5) if suffix == "csv" else (1, 4)
    assert any(f"decision {names[0]} in lines {first} and {second} of" in warning for warning in found.warnings)


def test_answers_that_are_no_random_part_are_warned_of(case: Case) -> None:
    for n in range(60):
        case.ticket(**({"category": "billing"} if n < 55 else {}))
        case.ticket(sure=False, **({"category": "login"} if n < 10 else {}))
    found = case.run()
    assert found.in_shadow == 120
    assert any("no random part" in warning for warning in found.warnings)
    assert any("55 tickets in shadow have no answer" in warning for warning in found.warnings)


def test_a_decision_that_stands_twice_in_the_log_counts_once(case: Case) -> None:
    case.ticket(category="billing")
    case.log *= 2
    found = case.run()
    assert (len(found.rows), found.in_shadow, found.wrong[""][0]) == (1, 1, 1)


def test_two_texts_under_one_id_are_refused_unless_the_decision_says_which(tmp_path: Path) -> None:
    path = tmp_path / "tickets.csv"
    path.write_text("id,text\nT-1,a\nT-1,b\n")
    with pytest.raises(ConfigError, match="line 3: id 'T-1' stands twice"):
        read_texts(path)
    path.write_text("id,text,decision_id\nT-1,a,d1\nT-1,b,d2\n")
    assert read_texts(path).of("d2", "T-1") == ("b", "")


def test_exported_tickets_hold_the_text_that_was_scored() -> None:
    rules = rule_set(topics={"answers": "desk.answers"})
    topics, line_of = lines_of("tickets", rules, 10_000)
    headers = ((DECISION_HEADER, b'{"decision_id": "d", "ticket_id": "T-1"}'),)
    record = Record(
        Partition("desk.human", 0), 1, None, b'{"subject": "Hi", "body": "no\\tlogin", "language": "en"}', headers, 0
    )
    assert topics == ("desk.human",)
    assert orjson.loads(line_of(record) or b"") == {
        "id": "T-1",
        "decision_id": "d",
        "text": "Hi no login",
        "language": "en",
    }
    assert line_of(Record(Partition("desk.human", 0), 2, None, b"{}", headers, 0)) is None
    topics, line_of = lines_of("answers", rules, 10_000)
    assert topics == ("desk.answers",)
    assert line_of(Record(Partition("desk.answers", 0), 1, None, b'{\r\n"a": 1}', (), 0)) == b'{  "a": 1}'
    with pytest.raises(ConfigError, match="topics.answers"):
        lines_of("answers", rule_set(), 10_000)


def test_the_command_writes_the_file_and_says_what_it_proves(tmp_path: Path) -> None:
    folder = Path(__file__).parents[2] / "routing_rules/helpdesk"
    rules = load_rule_set(folder)
    prints = SEEN_BY.model_copy(update={"categories": rules.categories.fingerprint})
    by = Side(rules, artefact(rules, certificate("billing", threshold=0.5), fingerprints=prints), {})
    held = rules.at_most("shadow")
    decision = decided(by, scores(0.04, 0.9, 0.02, 0.01, 0.01, 0.01))
    files = {name: tmp_path / name for name in ("log.jsonl", "answers.jsonl", "texts.jsonl", "out.csv")}
    shadow = {"mode": "shadow", "would": would_of(decision), "decision_id": "a" * 32, "decided_at": DECIDED.isoformat()}
    files["log.jsonl"].write_bytes(line(by, carried_out(decision, held), **shadow))
    files["texts.jsonl"].write_text('{"id": "T-0", "decision_id": "%s", "text": "=a, \\"b\\""}' % ("a" * 32))
    answer = {"schema": "ticket-router/answer/1", "decision_id": "a" * 32, "answered_at": "2026-03-02T09:00:00Z"}
    arguments = [
        "labels",
        "--rules",
        str(folder),
        "--log",
        str(files["log.jsonl"]),
        "--tickets",
        str(files["texts.jsonl"]),
    ]
    arguments += ["--answers", str(files["answers.jsonl"]), "--out", str(files["out.csv"])]
    files["answers.jsonl"].write_bytes(orjson.dumps({**answer, "category": "x"}))
    refused = CliRunner().invoke(cli.app, arguments)
    assert isinstance(refused.exception, ConfigError) and not files["out.csv"].exists()
    files["answers.jsonl"].write_bytes(orjson.dumps({**answer, "category": "network"}))
    done = CliRunner().invoke(cli.app, arguments)
    assert done.exit_code == 0, done.output
    assert "1 labelled tickets, 1 of them answered in shadow" in done.output and "100.0%" in done.output
    (found,) = load_labelled(files["out.csv"], rules.categories.ids)
    assert (found.id, found.text, found.label) == ("T-0", '=a, "b"', "network")
    for read in ("answers.jsonl", "log.jsonl", "texts.jsonl"):
        before = files[read].read_bytes()
        over = CliRunner().invoke(cli.app, [*arguments, "--out", str(files[read])])
        assert isinstance(over.exception, ConfigError) and "written over" in str(over.exception)
        assert files[read].read_bytes() == before
