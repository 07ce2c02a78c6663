"""Backtests: a log under its own rules changes nothing, under others what the evaluator says; the rest is counted."""

from __future__ import annotations

import dataclasses
import math
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import orjson
import pytest

from tests.core.sets import PRINTS, artefact, certificate, rule_set
from worker.adapters.decision_log import LINES, read_decision_lines
from worker.core.answers import raise_by_answers, read_answer
from worker.core.artefact import Artefact
from worker.core.digest import fingerprint
from worker.core.envelope import ENVELOPE_SCHEMA, Answer, Envelope, Origin, Timings
from worker.core.policy import (
    Calibration,
    Decision,
    carried_out,
    decide,
    escalate_unscored,
    read_in_part,
    reason,
    vetoed,
)
from worker.core.questions import Questions, YesNoQuestion
from worker.core.rules import Rules, RuleSet
from worker.core.scores import LabelScores
from worker.errors import ConfigError
from worker.offline.backtest import MALFORMED, PEOPLE, Backtest, backtest
from worker.offline.backtest_report import backtest_report, limits
from worker.offline.counted import Counted, expected
from worker.offline.redecide import Terms
from worker.offline.rules_diff import Side, version_of
from worker.runtime.outputs import would_of

ENGINE, MODEL = "stub", "a model"
IDS = ("billing", "login", "bug", "none")
SEEN_BY = PRINTS.model_copy(update={"model": fingerprint(ENGINE, MODEL)})


def side(threshold: float = 0.8, questions: Questions | None = None, **rules: object) -> Side:
    """A version of the desk's rules; its calibration was fitted on what its own files say."""
    made = rule_set(*IDS[:3], none=True, **rules)
    prints = SEEN_BY.model_copy(update={"categories": made.categories.fingerprint})
    return Side(made, artefact(made, certificate(*IDS[:3], threshold=threshold), fingerprints=prints), {})


def drawn(n: int, seed: int = 1) -> list[LabelScores]:
    generator = random.Random(seed)
    found = []
    for _ in range(n):
        weights = [generator.random() ** 6 + 1e-4 for _ in IDS]
        mass = generator.choice((0.05, 0.9, 0.99))
        found.append(LabelScores.from_logprobs(tuple(math.log(mass * w / sum(weights)) for w in weights)))
    return found


def line(made_by: Side, decision: Decision, number: int = 0, **changes: object) -> bytes:
    """The record of a decision, as the worker writes it."""
    scores, origin = decision.scores, Origin("tickets.desk", 0, number)
    envelope = Envelope(
        schema=ENVELOPE_SCHEMA,
        decision_id="0" * 32,
        ticket_id=f"T-{number}",
        tenant=None,
        origin=origin,
        decided_at=f"2026-03-02T{number % 24:02d}:14:52.311Z",
        action=decision.action,
        category=decision.category,
        topic=decision.topic,
        probability=decision.probability,
        top=decision.top,
        margin=decision.margin,
        label_mass=scores.mass if scores else None,
        reasons=decision.reasons,
        rule_set=version_of(made_by.rule_set),
        calibration=made_by.artefact.digest if made_by.artefact else None,
        engine=ENGINE if scores else None,
        model=MODEL if scores else None,
        cached=False,
        timings=Timings(1.0),
        labels=made_by.rule_set.categories.ids,
        label_scores=scores.returned if scores else None,
        label_scores_bound=scores.bound if scores else None,
        answers=decision.answers,
    )
    return dataclasses.replace(envelope, **changes).to_bytes() + b"\n"  # type: ignore[arg-type]


def decided(by: Side, scores: LabelScores) -> Decision:
    return decide(scores, by.rule_set, Calibration(artefact_of(by)))


def artefact_of(by: Side) -> Artefact:
    assert by.artefact is not None
    return by.artefact


def log(by: Side, n: int = 400) -> list[bytes]:
    return [line(by, decided(by, scores), i) for i, scores in enumerate(drawn(n))]


def run(lines: Sequence[bytes], new: Side, old: Side | None = None) -> Backtest:
    return backtest([lines], new, old)


def same(one: Counted, other: Counted) -> bool:
    """But for the last digits: chances are added up in another order (and from Python 3.12 on with more of them)."""

    def rounded(value: object) -> object:
        if isinstance(value, float):
            return f"{value:.9g}"
        if isinstance(value, dict):
            return {name: rounded(inner) for name, inner in value.items()}
        return [rounded(inner) for inner in value] if isinstance(value, list | tuple) else value

    return rounded(dataclasses.asdict(one)) == rounded(dataclasses.asdict(other))


def test_a_log_under_the_rules_that_made_it_moves_nothing() -> None:
    by = side()
    found = run(log(by), by)
    assert found.moved == 0 and found.redecided == 400 and same(found.recorded, found.replayed)
    assert found.recorded.routed > 50 and found.recorded.people > 50
    assert not found.refused and not found.other_calibration


def test_other_rules_say_of_each_ticket_what_the_evaluator_says() -> None:
    by, new = side(), side(0.6, gates={"min_label_mass": 0.2})
    found = run(log(by), new, by)
    pairs = [(decided(by, scores), decided(new, scores)) for scores in drawn(400)]
    where = [tuple(d.category if d.action == "route" else PEOPLE for d in pair) for pair in pairs]
    assert found.moves == Counter(where) and found.moved > 10
    assert found.replayed.reasons == Counter(after.reasons[0].code for _, after in pairs)
    routed = [after for _, after in pairs if after.action == "route"]
    assert found.replayed.routed == len(routed)
    assert math.isclose(found.replayed.expected_wrong.value, sum(1 - (d.probability or 0) for d in routed))
    waiting = Counter((d.category, i % 24) for i, (_, d) in enumerate(pairs) if d.action == "escalate")
    assert {(c, h): n for c, hours in found.replayed.queue.items() for h, n in enumerate(hours) if n} == waiting


def test_what_it_says_does_not_depend_on_how_the_file_is_cut() -> None:
    by, new = side(), side(0.6)
    lines = log(by)
    assert backtest([lines[:7], lines[7:8], lines[8:]], new, by) == run(lines, new, by)


def test_overrides_and_tickets_without_scores_are_kept_and_counted() -> None:
    by, new = side(), side(0.99)
    overridden = Decision("route", "desk.bug", "bug", (reason("override", name="alerts"),))
    lines = [
        *log(by, 50),
        line(by, overridden, calibration="unknown"),
        line(by, escalate_unscored(by.rule_set, reason("override_escalation", name="phishing"))),
        line(by, escalate_unscored(by.rule_set, reason("over_quota", characters=9))),
    ]
    found = run(lines, new, by)
    assert (found.kept_overrides, found.kept_unscored, found.redecided) == (2, {"over_quota": 1}, 50)
    assert found.moves["bug", "bug"] >= 1 and found.replayed.reasons["override"] == 1
    assert found.replayed.judged == found.replayed.routed - 1
    said = " ".join(limits(found))
    assert "2 decisions of overrides kept as they were" in said and "1 decisions without scores" in said


@pytest.mark.parametrize("code", ["steered", "other_order", "engine_timeout"])
def test_a_second_look_is_kept_where_the_new_rules_would_route(code: str) -> None:
    by, new = side(0.9), side(0.6)
    sure = LabelScores.from_logprobs((math.log(0.93), math.log(0.02), math.log(0.02), math.log(0.02)))
    values = {"parts": "one part", "what": "it would not", "category": "bug", "deadline": "60"}
    looked = vetoed(decided(by, sure), by.rule_set, reason(code, **values))
    found = run([line(by, looked), line(by, decided(by, sure))], new, by)
    assert found.kept_second_look == {code: 1}
    assert found.moves == {(PEOPLE, PEOPLE): 1, ("billing", "billing"): 1}


def test_a_ticket_read_in_part_routes_as_before_and_no_more() -> None:
    by, new = side(0.9, length={"when_cut": "decide"}), side(0.6, length={"when_cut": "decide"})
    sure, fair = (LabelScores.from_logprobs(tuple(map(math.log, (p, 0.02, 0.02, 0.02)))) for p in (0.93, 0.2))
    lines = [line(by, read_in_part(decided(by, scores), by.rule_set, 99)) for scores in (sure, fair)]
    assert run(lines, new, by).moves == {("billing", "billing"): 1, (PEOPLE, "billing"): 1}


def test_labels_that_were_not_returned_are_decided_by_their_bound() -> None:
    by, new = side(0.9), side(0.5)
    partial = LabelScores.from_logprobs((math.log(0.7), math.log(0.05), math.log(0.06), math.log(0.06)), (2, 3))
    found = run([line(by, decided(by, partial)), *log(by, 5)], new, by)
    assert decided(new, partial).action == "route" and decided(by, partial).action == "escalate"
    assert found.moves[PEOPLE, "billing"] >= 1 and found.redecided == 6


def test_what_does_not_fit_the_new_rules_is_refused_and_counted() -> None:
    by, new = side(), side(0.6)
    sure = decided(by, drawn(1)[0])
    lines = [
        *log(by, 10),
        b"not JSON\n",
        b"{}\n",
        line(by, sure, label_scores=(-1.0, -2.0)),
        line(by, sure, label_scores=("a", -2.0, -3.0, -4.0)),
        line(by, sure, label_scores=([1.0], -2.0, -3.0, -4.0)),
        line(by, sure, decided_at="yesterday"),
        line(by, sure, label_scores=(-1.0, None, -2.0, -3.0)),
        line(by, sure, rule_set="other/1/0"),
        line(by, sure, labels=("billing", "bug", "login", "none")),
        line(by, sure, model="another model"),
        line(by, sure, calibration=None, rule_set="desk/1/unknown"),
    ]
    found = run(lines, new, by)
    assert found.redecided == 10 and found.lines == 21
    assert found.refused[MALFORMED] == 7 and sum(found.refused.values()) == 11
    for words in ("another rule set's", "other categories", "another model", "not at hand"):
        assert any(words in why for why in found.refused), words
    assert found.recorded.n == found.replayed.n == 10


def test_scores_of_another_prompt_are_refused_by_the_calibration_that_they_were_made_under() -> None:
    by, new = side(), side(0.6)
    prints = artefact_of(new).fingerprints.model_copy(update={"prompt": "another"})
    refitted = dataclasses.replace(new, artefact=artefact(new.rule_set, fingerprints=prints))
    with pytest.raises(ConfigError, match="asked otherwise than the new rules do: prompt changed"):
        run(log(by, 5), refitted, by)


def test_scores_of_another_wording_are_refused_though_the_calibration_was_copied() -> None:
    by = side()
    style = by.rule_set.categories.prompt.model_copy(update={"instruction": "Sort these."})
    categories = by.rule_set.categories.model_copy(update={"prompt": style})
    new = dataclasses.replace(by, rule_set=by.rule_set.model_copy(update={"categories": categories}))
    with pytest.raises(ConfigError, match="prompt changed"):
        run(log(by, 5), new, by)


def test_decisions_made_before_there_was_a_calibration_are_decided_by_the_new_one() -> None:
    new = side(0.6)
    shadow = dataclasses.replace(new, artefact=None)
    lines = [
        line(shadow, vetoed(Decision("escalate", "desk.human", "bug", (), scores=scores), new.rule_set, why), i)
        for i, scores in enumerate(drawn(100))
        for why in [reason("uncalibrated", detail="x")]
    ]
    found = run(lines, new)
    assert found.recorded.routed == 0 and found.replayed.routed > 10 and found.other_calibration


def test_without_a_calibration_beside_the_new_rules_nothing_routes_and_it_says_so() -> None:
    by = side()
    found = run(log(by, 50), dataclasses.replace(by, artefact=None), by)
    assert found.replayed.routed == 0 and found.recorded.routed > 0
    assert "no calibration" in (found.not_in_force or "")


def asking(probability: float, *, rule: bool = True) -> Side:
    question = YesNoQuestion(kind="yes_no", id="urgent", ask="Is it urgent?", cue="Urgent:")
    answers = [{"kind": "answer", "name": "r", "question": "urgent", "is": "yes", "probability": probability,
                "then": "escalate", "topic": "desk.duty"}]  # fmt: skip
    base = side()
    rules = Rules.model_validate({"version": 1, "alpha": 0.1, "delta": 0.1, "answers": answers * rule}, strict=False)
    whole = RuleSet(categories=base.rule_set.categories, rules=rules, questions=Questions(questions=(question,)))
    means = whole.for_question(question)
    prints = SEEN_BY.model_copy(update={"categories": means.categories.fingerprint})
    return Side(whole, base.artefact, {"urgent": artefact(means, fingerprints=prints)})


def answer_of(by: Side, yes: float) -> Answer:
    terms = Terms.of(by, None)
    scores = LabelScores.from_logprobs((math.log(yes), math.log(0.99 - yes)))
    return read_answer(by.rule_set.questions.questions[0], scores, terms.further["urgent"], 0.1)


def test_rules_over_answers_are_applied_to_the_recorded_answers() -> None:
    by, new = asking(0.8), asking(0.3)
    lines, moves = [], Counter[tuple[str, str]]()
    for i, scores in enumerate(drawn(120)):
        answer = answer_of(by, 0.1 + 0.8 * i / 120)
        pair = [raise_by_answers(decided(one, scores), [answer], one.rule_set) for one in (by, new)]
        lines.append(line(by, pair[0], i))
        ends = [d.category if d.action == "route" else {"desk.human": PEOPLE}.get(d.topic, d.topic) for d in pair]
        moves[str(ends[0]), str(ends[1])] += 1
    found = run(lines, new, by)
    assert found.moves == moves and found.moved > 10 and ("billing", "desk.duty") in found.moves
    assert not found.questions_left_out


def test_rules_over_answers_that_the_log_does_not_hold_are_left_out_and_counted() -> None:
    by = side()
    new = asking(0.3)
    found = run(log(by, 20), new, by)
    assert found.questions_left_out == {"urgent": 20} and found.moved == 0


def test_answers_in_another_order_of_labels_are_left_out() -> None:
    by, new = asking(0.8), asking(0.3)
    scores = drawn(1)[0]
    answer = dataclasses.replace(answer_of(by, 0.5), labels=("no", "yes"))
    found = run([line(by, raise_by_answers(decided(by, scores), [answer], by.rule_set))], new, by)
    assert found.questions_left_out == {"urgent": 1}


def test_a_calibration_of_other_categories_routes_nothing_as_in_a_worker() -> None:
    by = side()
    first, *others = by.rule_set.categories.categories
    renamed = (first.model_copy(update={"description": "something else"}), *others)
    categories = by.rule_set.categories.model_copy(update={"categories": renamed})
    new = dataclasses.replace(by, rule_set=by.rule_set.model_copy(update={"categories": categories}))
    found = run(log(by, 50), new)
    assert found.replayed.routed == 0 and "categories changed" in (found.not_in_force or "")


def test_the_interval_of_expected_errors_holds_for_the_number_that_is_drawn() -> None:
    generator = random.Random(3)
    chances = [generator.random() ** 4 * 0.4 for _ in range(300)]
    measured = expected(sum(chances), len(chances))
    drawn_errors = [sum(generator.random() < p for p in chances) for _ in range(1000)]
    assert sum(measured.lower <= k <= measured.upper for k in drawn_errors) >= 950
    assert measured.lower < measured.value < measured.upper
    assert math.isnan(expected(0.0, 0).value)
    assert expected(0.0, 10).upper == 0


def test_the_log_is_read_in_pieces_and_a_missing_one_is_said(tmp_path: Path) -> None:
    path, told = tmp_path / "log.jsonl", []
    path.write_bytes(b'{"a":1}\n\n' * LINES + b"{}")
    pieces = list(read_decision_lines(path, lambda done, total: told.append((done, total))))
    assert [len(piece) for piece in pieces] == [LINES, 1]
    assert told[-1] == (path.stat().st_size, path.stat().st_size)
    with pytest.raises(ConfigError, match="cannot be read"):
        list(read_decision_lines(tmp_path / "none.jsonl"))


def test_the_page_and_the_json_say_the_same_and_refer_to_nothing_outside() -> None:
    by, new = side(), side(0.6)
    found = run(log(by), new, by)
    html = backtest_report(found).html
    assert f"{found.moved} of {found.replayed.n} tickets would go elsewhere" in html
    assert "default-src 'none'" in html and "<script" not in html
    data = orjson.loads(orjson.dumps(found.to_dict()))
    assert data["replayed"]["routed"] == found.replayed.routed
    assert sum(move["tickets"] for move in data["moves"]) == found.replayed.n


# -- modes -------------------------------------------------------------------------------------------------------------


def held(by: Side, decision: Decision, number: int, **changes: object) -> bytes:
    """The record of a decision in the mode that these rules state."""
    done = carried_out(decision, by.rule_set)
    would = None if done is decision else would_of(decision)
    return line(by, done, number, mode=by.rule_set.mode_of(decision.category), would=would, **changes)


@pytest.mark.parametrize("mode", ["shadow", "assist"])
def test_a_log_of_shadow_or_assist_shows_what_auto_does(mode: str) -> None:
    careful, live = side(mode=mode), side()
    kept = [held(careful, decided(careful, scores), i) for i, scores in enumerate(drawn(400))]
    there = run(log(live), live)
    stays, goes = run(kept, careful), run(kept, live, careful)
    assert stays.moved == 0 and same(stays.recorded, stays.replayed) and stays.recorded.routed == 0
    assert stays.recorded.reasons[f"{mode}_mode"] == there.recorded.routed > 50
    assert same(goes.replayed, there.replayed) and goes.moved == there.recorded.routed
    for side_of in (stays.recorded, stays.replayed, goes.recorded):
        assert side_of.if_auto == there.recorded.automation
        assert math.isclose(side_of.if_auto_wrong.value, there.recorded.expected_wrong.value)
        assert sum(side_of.held.values()) == there.recorded.routed
    assert goes.replayed.held == {} and goes.replayed.if_auto_error == goes.replayed.expected_error


def test_a_category_that_is_held_back_anew_shows_as_a_move_to_people() -> None:
    live, careful = side(), side(categories={"bug": {"mode": "assist"}})
    found = run(log(live), careful, live)
    gone = found.recorded.ends["bug"]
    assert found.moves["bug", PEOPLE] == gone == found.replayed.held["bug"] > 5
    assert found.replayed.reasons["assist_mode"] == gone
    assert found.replayed.if_auto == found.recorded.automation


def test_what_a_rule_routes_goes_where_the_new_mode_lets_it() -> None:
    override = Decision("route", "desk.bug", "bug", (reason("override", name="alerts"),))
    careful, live = side(mode="shadow"), side()
    found = run([*log(live, 20), held(careful, override, 21)], live)
    assert (found.kept_overrides, found.moves[PEOPLE, "bug"]) == (1, 1)
    back = run([*log(live, 20), held(live, override, 21)], careful)
    assert back.moves["bug", PEOPLE] >= 1 and back.replayed.held["bug"] >= 1


def test_a_ticket_read_in_part_is_held_by_its_cut_and_not_by_the_mode() -> None:
    careful = side(mode="shadow", length={"when_cut": "decide"})
    scores = next(s for s in drawn(400) if decided(careful, s).action == "route")
    cut = read_in_part(decided(careful, scores), careful.rule_set, 100)
    whole = held(careful, cut, 1)
    assert run([whole], side(length={"when_cut": "decide"})).replayed.routed == 1
    stays = run([whole], side())
    assert stays.replayed.routed == 0 and stays.kept_second_look == {"truncated": 1}


def test_a_file_that_is_no_decision_log_is_said_to_be_none() -> None:
    with pytest.raises(ConfigError, match="none of the log's 2 lines is a decision.*not what `ticket-router export`"):
        backtest([[b"Dear all,\n", b"see you on Monday.\n"]], side())
