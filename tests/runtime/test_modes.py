"""What leaves the worker in each mode: in shadow and assist nothing reaches a category's topic, whoever says so."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.sets import artefact, category_set, certificate, scores
from tests.runtime.desks import RULES, broker, make_worker, send
from tests.runtime.engines import ScriptedEngine
from tests.waiting import until
from worker.core.answers import raise_by_answers, read_answer
from worker.core.envelope import CARD_HEADER, DECISION_HEADER, Envelope
from worker.core.modes import MODES, Mode
from worker.core.policy import Calibration, Decision, NoCalibration, decide, decide_override, read_in_part, reason
from worker.core.questions import Questions
from worker.core.rules import Rules, RuleSet
from worker.core.scores import LabelScores
from worker.core.ticket import Ticket
from worker.offline.check import check_modes
from worker.ports import Delivery, Partition, RefusedOutput
from worker.runtime.journal import Journal
from worker.runtime.known_tickets import KnownTickets
from worker.runtime.outputs import Outputs, Provenance
from worker.runtime.router import Routed
from worker.runtime.service import running
from worker.telemetry import MODE, Metrics

AT = "2026-03-02T08:14:52.311Z"
WHOLE_SET = category_set("billing", "login", "bug", none=True)
QUESTIONS = Questions.model_validate(
    {"questions": [{"kind": "yes_no", "id": "emergency", "ask": "An emergency?", "cue": "Emergency:"}]}, strict=False
)
OVERRIDES = [
    {"kind": "keyword", "name": "fire", "any": ["fire"]},
    {"kind": "field", "name": "alerts", "pointer": "/channel", "equals": "alerts", "then": "route", "category": "bug"},
    {"kind": "language", "name": "french", "any": ["fr"], "then": "route", "category": "login"},
]
DUTY = {
    "kind": "answer", "name": "duty", "question": "emergency", "is": "yes", "probability": 0.5, "then": "escalate",
    "topic": "desk.duty", "when_unknown": "ignore",
}  # fmt: skip


def rules(mode: Mode, **own: Mode) -> RuleSet:
    body: dict[str, Any] = {"version": 1, "alpha": 0.1, "delta": 0.1, "overrides": OVERRIDES, "answers": [DUTY]}
    body |= {"mode": mode, "categories": {name: {"mode": each} for name, each in own.items()}}
    return RuleSet(categories=WHOLE_SET, rules=Rules.model_validate(body, strict=False), questions=QUESTIONS)


AUTO = rules("auto")
FEWER = artefact(AUTO, certificate("billing", "login", threshold=0.6))


def by_router(ticket: Ticket, scored: LabelScores, emergency: LabelScores | None, rule_set: RuleSet) -> Decision:
    """As the router decides, with a part of the ticket read where its text says so."""
    decision = decide_override(ticket, rule_set)
    if decision is not None:
        return decision
    decision = decide(scored, rule_set, Calibration(FEWER))
    if "long" in ticket.text:
        decision = read_in_part(decision, rule_set, 16)
    own = artefact(rule_set.for_question(QUESTIONS.questions[0]))
    state = Calibration(own) if emergency is not None else NoCalibration(reason("uncalibrated", detail="x"))
    answer = read_answer(QUESTIONS.questions[0], emergency or scores(0.5, 0.4), state, 0.1)
    return raise_by_answers(decision, [answer], rule_set)


def published(decision: Decision, rule_set: RuleSet, number: int = 7) -> tuple[Envelope, dict[str, dict[str, bytes]]]:
    """The decision's record, and the headers of ours by topic."""
    outputs = Outputs(rule_set, Provenance("e", "m", "c" * 32))
    delivery = Delivery(Partition("tickets.desk", 0), number, 1, b"k", b"{}", (), 0)
    envelope = outputs.envelope(delivery, None, Routed(decision), AT, 0.1)
    made = outputs.decided(delivery, envelope)
    assert made[1].topic == "desk.decisions" and made[1].value == envelope.to_bytes()
    return envelope, {output.topic: {name: value or b"" for name, value in output.headers} for output in made}


TICKETS = st.builds(
    Ticket,
    id=st.just("1"),
    text=st.sampled_from(["hello", "fire!", "a long one"]),
    channel=st.sampled_from([None, "alerts"]),
    language=st.sampled_from([None, "fr"]),
)
LABELS = st.lists(st.floats(0.001, 1), min_size=4, max_size=4).map(lambda w: scores(*(0.99 * x / sum(w) for x in w)))
EMERGENCY = st.one_of(st.none(), st.floats(0.01, 0.98).map(lambda p: scores(p, 0.99 - p)))
CATEGORY_TOPICS = {AUTO.categories.topic(c.id) for c in AUTO.categories.routable}


@given(TICKETS, LABELS, EMERGENCY, st.sampled_from(MODES), st.sampled_from(MODES), st.sampled_from(MODES))
def test_nothing_reaches_a_category_but_in_auto_and_auto_does_what_would_have_been_done(
    ticket: Ticket, scored: LabelScores, emergency: LabelScores | None, of_set: Mode, own: Mode, brake: Mode
) -> None:
    held = rules(of_set, billing=own, bug=own).at_most(brake)
    decision = by_router(ticket, scored, emergency, held)
    record, topics = published(decision, held)
    live, live_topics = published(by_router(ticket, scored, emergency, AUTO), AUTO)
    assert record.mode == held.mode_of(record.category)
    if record.mode != "auto":
        assert not set(topics) & CATEGORY_TOPICS
        assert record.action == "escalate"
    if record.would is None:  # itself: what auto does
        assert (record.action, record.topic, record.category) == (live.action, live.topic, live.category)
        assert record.reasons == live.reasons
    else:
        assert (live.action, record.topic, live.mode) == ("route", "desk.human", "auto")
        found = record.would
        assert found.topic in live_topics
        assert (found.topic, found.category, found.probability) == (live.topic, live.category, live.probability)
        assert found.reasons == live.reasons
        assert [why.code for why in record.reasons] == [f"{record.mode}_mode"]
    assert (record.label_scores, record.top, record.answers) == (live.label_scores, live.top, live.answers)
    cards = [headers for headers in topics.values() if CARD_HEADER in headers]
    assert len(cards) == (record.action == "escalate")
    for headers in cards:
        card, shown = orjson.loads(headers[CARD_HEADER]), orjson.loads(headers[DECISION_HEADER])
        assert card["decision_id"] == shown["decision_id"] == record.decision_id
        if record.mode == "shadow":
            assert card["suggestions"] == [] and card["nearest"] is None and shown["category"] is None
        elif record.category is not None:
            assert card["suggestions"][0]["category"] in (record.category, record.top[0].category if record.top else "")


@pytest.mark.parametrize("mode", ["shadow", "assist"])
def test_who_raises_a_ticket_to_the_duty_desk_wins_in_every_mode(mode: Mode) -> None:
    held = rules(mode)
    decision = by_router(Ticket(id="1", text="x"), scores(0.9, 0.03, 0.03, 0.03), scores(0.9, 0.05), held)
    record, topics = published(decision, held)
    assert record.topic == "desk.duty" and record.reasons[0].code == "answer_escalation"
    assert orjson.loads(topics["desk.duty"][CARD_HEADER])["reasons"][0]["code"] == "answer_escalation"


@pytest.mark.parametrize("mode", ["shadow", "assist"])
async def test_a_worker_in_this_mode_sends_every_ticket_to_people_and_records_what_auto_would_do(mode: Mode) -> None:
    held = replace_mode(RULES, mode)
    on = broker(rules=held)
    ids = send(on, 12, rules=held)
    worker = make_worker(on, ScriptedEngine(), rules=held)
    async with running(worker):
        await until(lambda: worker.status().settled == 12)
    assert {orjson.loads(record.value or b"")["id"] for record in on.records("desk.human")} == set(ids)
    assert not any(on.records(held.categories.topic(c.id)) for c in held.categories.routable)
    records = [orjson.loads(record.value or b"") for record in on.records("desk.decisions")]
    assert {record["would"]["topic"] for record in records} == {"desk.billing", "desk.login", "desk.bug"}
    shown = [orjson.loads(dict(record.headers)[CARD_HEADER] or b"") for record in on.records("desk.human")]
    assert all(bool(card["suggestions"]) is (mode == "assist") for card in shown)
    assert all(card["duplicates"]["known"] == 0 for card in shown)


def replace_mode(rule_set: RuleSet, mode: Mode) -> RuleSet:
    return rule_set.model_copy(update={"rules": rule_set.rules.model_copy(update={"mode": mode})})


async def test_a_card_that_does_not_fit_is_left_off_before_a_ticket_becomes_a_dead_letter() -> None:
    outputs = Outputs(RULES, Provenance("e", "m", "c" * 32))
    delivery = Delivery(Partition("tickets.desk", 0), 7, 1, b"k", b"{}", (("a", b"b"),), 0)
    decision = decide(scores(0.4, 0.3, 0.25), RULES, Calibration(artefact(RULES)))
    made = outputs.decided(delivery, outputs.envelope(delivery, None, Routed(decision), AT, 0.1))
    refused = [RefusedOutput(delivery, made[0], "MSG_SIZE_TOO_LARGE", "")]
    instead = outputs.instead_of(refused, made, AT)
    assert instead is not None and [output.topic for output in instead] == ["desk.human", "desk.decisions"]
    assert [name for name, _ in instead[0].headers] == ["a", DECISION_HEADER]
    assert instead[1] == made[1]
    again = outputs.instead_of([RefusedOutput(delivery, instead[0], "MSG_SIZE_TOO_LARGE", "")], instead, AT)
    assert again is not None and [output.topic for output in again] == ["desk.dead-letter"]


def test_check_lists_the_categories_by_mode_and_those_that_the_brake_holds() -> None:
    careful = rules("assist", billing="auto", bug="shadow")
    found = check_modes(careful, "auto")
    assert (found.state, found.what) == ("ok", "shadow: bug; assist: login; auto: billing")
    braked = check_modes(careful, "assist")
    assert braked.state == "warning"
    assert braked.what == "shadow: bug; assist: billing, login (held back by ROUTER_MODE=assist: billing)"


def test_what_a_worker_runs_says_the_mode_of_each_category() -> None:
    metrics = Metrics()
    Journal(metrics, log_ticket_text=False).runs(rules("assist", billing="auto"), Calibration(FEWER))
    found = {tuple(value for _, value in sample.labels): sample.value for sample in metrics.samples(MODE)}
    assert found == {("billing", "auto"): 1, ("login", "assist"): 1, ("bug", "assist"): 1}


# -- duplicates --------------------------------------------------------------------------------------------------------


def met(known: KnownTickets, number: int, text: str = "the same", tenant: str | None = None) -> dict[str, Any]:
    decision = decide(scores(0.4, 0.3, 0.25), RULES, Calibration(artefact(RULES)))
    envelope, _ = published(decision, RULES, number)
    ticket = Ticket(id=f"T-{number}", text=text, tenant=tenant)
    return asdict(known.meet(ticket, replace(envelope, ticket_id=f"T-{number}")))


def test_tickets_of_the_same_text_are_named_and_counted() -> None:
    known = KnownTickets()
    counts = [met(known, number)["known"] for number in range(8)]
    assert counts == list(range(8))
    assert [ticket["ticket_id"] for ticket in met(known, 9)["tickets"]] == ["T-0", "T-1", "T-2", "T-3", "T-4"]
    assert met(known, 10, "another")["known"] == 0


def test_another_tenants_tickets_are_nobodys_duplicates() -> None:
    known = KnownTickets()
    met(known, 0, tenant="acme")
    assert met(known, 1, tenant="other")["known"] == met(known, 2, tenant=None)["known"] == 0
    assert met(known, 3, tenant="acme")["tickets"][0]["ticket_id"] == "T-0"


def test_a_ticket_that_is_delivered_again_is_not_its_own_duplicate() -> None:
    known = KnownTickets()
    assert [met(known, number)["known"] for number in (0, 0, 1, 0, 1)] == [0, 0, 1, 1, 1]
    for number in range(2, 7):
        met(known, number)
    assert [met(known, number)["known"] for number in (6, 7)] == [6, 7]  # it is none of those that are named


def test_what_is_remembered_is_bounded_and_the_oldest_goes_first() -> None:
    known = KnownTickets(most_texts=2)
    met(known, 0, "a"), met(known, 1, "b"), met(known, 2, "a"), met(known, 3, "c")
    assert [met(known, 4, text)["known"] for text in ("a", "b")] == [2, 0]
