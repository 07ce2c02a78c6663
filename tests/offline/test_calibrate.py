"""Calibration of a labelled file: what is certified is what the worker routes, and nothing looks where it must not."""

from __future__ import annotations

import dataclasses
import math
import random
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.offline.populations import FLOOR, IDS, name_of, question, scored
from worker.core.artefact import Artefact
from worker.core.guarantees import n_min
from worker.core.policy import Calibration, calibration_in_force, decide, decide_override
from worker.core.score_form import in_fit_part
from worker.errors import ConfigError
from worker.offline.calibrate import CalibrationResult, calibrate
from worker.offline.prior import match_history
from worker.offline.scoring import ScoredTicket
from worker.runtime.question import Question

NOW = "2026-02-03T04:05:06Z"


def fitted(asked: Question, tickets: Sequence[ScoredTicket], **changes: Any) -> CalibrationResult:
    return calibrate(asked, tickets, **{"seed": 7, "created_at": NOW, **changes})


def pairs(n: int, seed: int, noise: float = 0.02) -> list[tuple[ScoredTicket, ScoredTicket]]:
    """Tickets scored twice by an engine with a little noise."""
    generator = np.random.default_rng(seed)
    first = scored(n, seed, prefix="u", low_mass=0.0)
    return [
        (t, dataclasses.replace(t, logprobs=tuple((t.logprobs + generator.normal(0, noise, len(t.logprobs))).tolist())))
        for t in first
    ]


def with_words(tickets: list[ScoredTicket], word: str, every: int) -> list[ScoredTicket]:
    return [dataclasses.replace(t, text=f"{word} {t.text}") if i % every == 0 else t for i, t in enumerate(tickets)]


KEYWORD: dict[str, Any] = {"overrides": [{"kind": "keyword", "name": "lawyers", "any": ["lawyer"]}]}
PER_TICKET: dict[str, Any] = {"target": "misroutes_per_ticket"}
STRICT: dict[str, Any] = {"categories": {"access": {"alpha": 0.04}, "travel": {"delta": 0.02}}}
LOOSE: dict[str, Any] = {"categories": {"billing": {"alpha": 0.2}, "facilities": {"alpha": 0.3}}}

CASES: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "raw margin, one pool": ({}, 60, {}),
    "split": ({}, 400, {}),
    "split, own certificates": ({}, 2000, {}),
    "none is a label": ({"none": True}, 600, {}),
    "a rule decides some": (KEYWORD, 600, {}),
    "stricter demands": (STRICT, 1500, {}),
    "looser demands": (LOOSE, 1500, {}),
    "jointly": (STRICT, 1500, {"joint": True}),
    "misroutes per ticket": ({"none": True, **PER_TICKET}, 500, PER_TICKET),
    "misroutes, everything routes": ({"none": True, "alpha": 0.4, **PER_TICKET}, 500, PER_TICKET),
    "misroutes, with a stricter demand": ({**STRICT, **PER_TICKET}, 500, PER_TICKET),
    "margin gate": ({}, 600, {"repeated": pairs(1200, 3)}),
    "margin gate, raw": ({}, 600, {"repeated": pairs(1200, 3), "form": "raw_margin"}),
    "frozen thresholds": ({}, 900, {"unlabelled": scored(900, 4, prefix="u")}),
    "frozen thresholds, raw": ({}, 900, {"unlabelled": scored(900, 4, prefix="u"), "form": "raw_margin"}),
    "under a taxonomy": ({}, 500, {"parents": {"hardware": "it", "software": "it", "printing": "it", "network": "it"}}),
    "what if": ({}, 400, {"alpha": 0.05, "delta": 0.05}),
}


@pytest.mark.parametrize("case", CASES)
def test_every_certificate_counts_exactly_the_tickets_that_the_worker_would_route(case: str) -> None:
    rules, n, changes = CASES[case]
    asked = question(**rules)
    tickets = with_words(scored(n, 1, categories=len(asked.rule_set.categories.ids)), "lawyer", 9)
    result = fitted(asked, tickets, **changes)
    artefact = Artefact.from_bytes(result.artefact.to_bytes(), "calibration.json")
    state = calibration_in_force(artefact, asked.fingerprints)
    assert isinstance(state, Calibration)
    split = artefact.form == "max_probability"
    routed: Counter[str] = Counter()
    wrong: Counter[str] = Counter()
    passing: Counter[str] = Counter()
    scores_seen = 0
    ids = asked.rule_set.categories.ids
    for ticket in tickets:
        if decide_override(ticket.ticket, asked.rule_set) is not None or (split and in_fit_part(ticket.id)):
            continue
        decision = decide(ticket.scores, asked.rule_set, state)
        assert decision.category is not None
        scores_seen += ticket.mass >= FLOOR
        group = next((c.group for c in artefact.certificates if decision.category in c.members), None)
        gated = decision.reasons[0].code in {"low_label_mass", "none_of_the_above", "inside_flip_band"}
        assert group is not None or decision.category == "none"
        if group is None or gated:
            continue
        passing[group] += 1
        routed[group] += decision.action == "route"
        truth = ids[ticket.label] if ticket.label >= 0 else None
        wrong[group] += decision.action == "route" and truth != decision.category
    for certificate in artefact.certificates:
        if certificate.procedure == "misroutes_per_ticket":
            assert certificate.n == scores_seen
        else:
            assert certificate.n == passing[certificate.group]
        assert (certificate.m, certificate.k) == (routed[certificate.group], wrong[certificate.group])
    assert sum(routed.values()) == len(result.routed) > 0
    assert sorted(m for c in artefact.certificates for m in c.members) == sorted(IDS)
    assert scores_seen == len(result.certifying)


def test_the_same_tickets_in_any_order_give_the_same_artefact_to_the_last_bit() -> None:
    tickets = scored(500, 2)
    changes: dict[str, Any] = {"repeated": pairs(400, 3), "unlabelled": scored(800, 4, prefix="u")}
    first = fitted(question(), tickets, **changes).artefact.to_bytes()
    for seed in range(2):
        shuffled = {name: random.Random(seed).sample(value, len(value)) for name, value in changes.items()}
        again = fitted(question(), random.Random(seed).sample(tickets, len(tickets)), **shuffled)
        assert again.artefact.to_bytes() == first


def test_labels_that_certify_move_nothing_but_the_thresholds() -> None:
    tickets = scored(600, 2)
    spoilt = [t if in_fit_part(t.id) else dataclasses.replace(t, label=(t.label + 1) % len(IDS)) for t in tickets]
    before, after = fitted(question(), tickets), fitted(question(), spoilt)
    assert before.artefact.form == "max_probability"
    assert after.artefact.calibrator == before.artefact.calibrator
    assert after.excluded == before.excluded
    assert [(c.group, c.members, c.n) for c in after.certificates] == [
        (c.group, c.members, c.n) for c in before.certificates
    ]
    assert any(c.certified for c in before.certificates)
    assert not any(c.certified for c in after.certificates)


def test_labels_that_fit_certify_nothing() -> None:
    tickets = scored(600, 2)
    result = fitted(question(), tickets)
    assert not any(in_fit_part(row.ticket.id) for row in result.certifying)
    assert result.artefact.data["fitted"] + len(result.certifying) == result.artefact.data["usable"]
    assert sum(c.n for c in result.certificates) == len(result.certifying)


@pytest.mark.parametrize("n", [60, 600])
@pytest.mark.parametrize("labels", [0, 1])
@pytest.mark.parametrize("rules", [{}, {"categories": {"billing": {"delta": 0.05}}}], ids=["as others", "stricter"])
def test_a_category_with_no_or_one_label_never_raises_and_never_routes(
    n: int, labels: int, rules: dict[str, Any]
) -> None:
    lonely = IDS.index("billing")
    tickets = scored(n, 3)
    kept = [t for t in tickets if t.label == lonely and in_fit_part(t.id) and t.mass >= FLOOR][:labels]
    tickets = [t if t.label != lonely or t in kept else dataclasses.replace(t, label=1) for t in tickets]
    asked = question(**rules)
    result = fitted(asked, tickets)
    certificate = result.artefact.by_category["billing"]
    assert certificate.basis == "excluded" and not certificate.certified and certificate.n > 0
    assert "billing" in result.excluded
    assert not any("never routed" in note for note in result.artefact.notes)  # its certificate's line says so
    state = Calibration(result.artefact)
    decisions = [decide(t.scores, asked.rule_set, state) for t in tickets]
    assert any(d.category == "billing" for d in decisions)
    assert not any(d.category == "billing" and d.action == "route" for d in decisions)


def test_labels_that_certify_do_not_admit_a_category() -> None:
    lonely = IDS.index("billing")
    tickets = scored(600, 3)
    tickets = [dataclasses.replace(t, label=1) if t.label == lonely and in_fit_part(t.id) else t for t in tickets]
    assert sum(t.label == lonely for t in tickets) > 50
    assert not fitted(question(), tickets).artefact.by_category["billing"].certified


def test_a_stricter_demand_stands_alone_and_is_never_satisfied_by_the_pool() -> None:
    result = fitted(question(**STRICT), scored(500, 5))
    by_name = result.artefact.by_category
    assert by_name["access"].members == ("access",) and by_name["access"].alpha == 0.04
    assert by_name["travel"].members == ("travel",) and by_name["travel"].delta == 0.02
    pool = next(c for c in result.certificates if c.basis == "pool")
    assert not {"access", "travel"} & set(pool.members)
    assert (pool.alpha, pool.delta) == (0.1, 0.1)


def test_a_looser_demand_stands_alone_where_it_can_and_else_joins_the_pool_at_its_rates() -> None:
    by_name = fitted(question(**LOOSE), scored(500, 5)).artefact.by_category
    assert (by_name["billing"].basis, by_name["billing"].alpha) == ("own", 0.2)
    by_name = fitted(question(categories={"facilities": {"alpha": 0.11}}), scored(500, 5)).artefact.by_category
    assert (by_name["facilities"].basis, by_name["facilities"].alpha) == ("pool", 0.1)


def test_own_certificates_go_to_categories_with_twice_the_fewest_tickets_and_to_no_others() -> None:
    result = fitted(question(), scored(600, 6))
    fewest = n_min(0.1, 0.1)
    own = [c for c in result.certificates if c.basis == "own"]
    pooled = next(c for c in result.certificates if c.basis == "pool")
    labels = result.artefact.labels
    counts = Counter(labels[row.predicted] for row in result.certifying if row.gate is None)
    assert own and all(counts[c.group] >= 2 * fewest for c in own)
    assert all(counts[name] < 2 * fewest for name in pooled.members)


def test_together_makes_one_certificate_of_all_but_the_stricter_ones() -> None:
    strict = IDS[0]
    asked = question(certify="together", categories={strict: {"alpha": 0.02}})
    result = fitted(asked, scored(1500, 5))
    own, pool = (next(c for c in result.certificates if (strict in c.members) is wanted) for wanted in (True, False))
    assert own.members == (strict,)
    assert pool.basis == "pool"
    assert set(pool.members) == {c.id for c in asked.rule_set.categories.routable} - {strict}
    assert pool.certified


def test_a_parent_in_the_category_set_merges_small_categories_before_the_pool() -> None:
    asked = question()
    small = ("hardware", "software", "printing", "network")
    categories = asked.rule_set.categories
    nested = tuple(c.model_copy(update={"parent": "it"}) if c.id in small else c for c in categories.categories)
    rules = asked.rule_set.model_copy(update={"categories": categories.model_copy(update={"categories": nested})})
    told = fitted(dataclasses.replace(asked, rule_set=rules), scored(500, 1)).certificates
    given = fitted(asked, scored(500, 1), parents=dict.fromkeys(small, "it")).certificates
    assert [(c.group, c.members, c.n) for c in told] == [(c.group, c.members, c.n) for c in given]
    assert any(c.basis == "taxonomy" for c in told)


def test_joint_certificates_share_delta() -> None:
    result = fitted(question(), scored(2000, 6), joint=True)
    parts = [c for c in result.certificates if c.basis != "excluded"]
    assert len({c.delta for c in parts}) == 1
    assert sum(c.delta for c in parts) <= 0.1 + 1e-12
    strict = fitted(question(categories={"access": {"delta": 0.02}}), scored(2000, 6), joint=True)
    parts = [c for c in strict.certificates if c.basis != "excluded"]
    assert sum(c.delta for c in parts) <= 0.1 + 1e-12
    assert strict.artefact.by_category["access"].delta * len(parts) == pytest.approx(0.02)


def test_misroutes_per_ticket_need_few_labels_and_leave_stricter_categories_out() -> None:
    result = fitted(question(**STRICT), scored(120, 7), target="misroutes_per_ticket")
    everything = next(c for c in result.certificates if c.basis == "all")
    assert everything.certified and everything.procedure == "misroutes_per_ticket"
    assert {"access", "travel"}.isdisjoint(everything.members)
    assert {c.group for c in result.certificates if c.basis == "excluded"} == {"access", "travel"}


def test_near_duplicates_count_once() -> None:
    tickets = scored(300, 8)
    echoes = [
        dataclasses.replace(t, id=f"z{t.id}{i}", text=f"{t.text.upper()} {i}!") for t in tickets[:40] for i in range(5)
    ]
    alone, echoed = fitted(question(), tickets), fitted(question(), [*tickets, *echoes])
    assert echoed.artefact.data["near_duplicates"] == 200
    assert echoed.certificates == alone.certificates
    assert echoed.artefact.calibrator == alone.artefact.calibrator


def test_tickets_that_a_rule_decides_neither_fit_nor_certify() -> None:
    tickets = scored(500, 9)
    result = fitted(question(**KEYWORD), with_words(tickets, "lawyer", 4))
    alone = fitted(question(**KEYWORD), [t for i, t in enumerate(tickets) if i % 4])
    assert result.artefact.data["decided_by_rules"] == 125
    assert result.certificates == alone.certificates
    assert result.artefact.calibrator == alone.artefact.calibrator


def test_tickets_under_the_label_mass_neither_fit_nor_certify() -> None:
    tickets = scored(500, 9, low_mass=0.2)
    result = fitted(question(), tickets)
    alone = fitted(question(), [t for t in tickets if t.mass >= FLOOR])
    assert result.artefact.data["low_label_mass"] > 60
    assert result.certificates == alone.certificates
    assert result.artefact.calibrator == alone.artefact.calibrator
    assert result.artefact.min_label_mass == FLOOR


def test_a_set_that_is_too_small_says_how_many_labels_it_lacks() -> None:
    result = fitted(question(), scored(15, 10, low_mass=0.0))
    assert not any(c.certified for c in result.certificates)
    pool = next(c for c in result.certificates if c.basis == "pool")
    assert re.fullmatch(
        rf"suggest only: n={pool.n}, need \d+: label about \d+ more tickets, as they come", pool.summary()
    )
    assert result.artefact.form == "raw_margin" and result.artefact.correctness is None


@pytest.mark.parametrize(
    ("n", "rules"),
    [(60, {"alpha": 0.05, "delta": 0.05}), (420, {"alpha": 0.02, "delta": 0.05}), (15, {})],
    ids=["raw", "split", "from raw to split"],
)
def test_as_many_tickets_labelled_as_are_asked_for_mostly_certify(n: int, rules: dict[str, Any]) -> None:
    asked = question(**rules)
    tried = sufficed = 0
    for seed in range(30, 40):
        for certificate in fitted(asked, scored(n, seed)).certificates:
            if certificate.to_label is not None and certificate.to_label < 2000:
                more = scored(certificate.to_label, seed + 100, prefix="v")
                now = fitted(asked, [*scored(n, seed), *more]).artefact.by_category
                tried += 1
                sufficed += any(now[member].certified for member in certificate.members)
    assert tried >= 3 and sufficed > tried / 2, (sufficed, tried)


def test_what_is_asked_for_are_tickets_to_label_not_those_that_certify() -> None:
    """The group sees 65 % of the labels, and of those only what is predicted as one of its members."""
    result = fitted(question(alpha=0.02, delta=0.05), scored(200, 34), form="max_probability")
    short = [c for c in result.certificates if c.to_label is not None]
    assert short and result.artefact.form == "max_probability"
    for certificate in short:
        assert certificate.need is not None and certificate.to_label is not None
        exactly = (certificate.need - certificate.n) * 200 / certificate.n
        assert exactly <= certificate.to_label <= 1.1 * exactly + 1


def test_labels_that_lead_to_the_split_form_are_asked_for_with_those_that_will_fit() -> None:
    result = fitted(question(alpha=0.05, delta=0.05), scored(15, 10, low_mass=0.0))
    pool = next(c for c in result.certificates if c.basis == "pool")
    assert result.artefact.form == "raw_margin" and pool.need is not None and pool.to_label is not None
    exactly = pool.need * 15 / pool.n / 0.65 - 15
    assert exactly <= pool.to_label <= 1.1 * exactly + 1


def test_a_looser_what_if_never_routes_under_the_rules() -> None:
    result = fitted(question(), scored(400, 11), alpha=0.3)
    assert any(c.certified for c in result.certificates)
    state = Calibration(result.artefact)
    codes = Counter(decide(row.ticket.scores, question().rule_set, state).reasons[0].code for row in result.certifying)
    assert codes["certificate_too_weak"] > 0 and codes["certified"] == 0


def test_an_engine_that_flips_at_every_margin_routes_nothing() -> None:
    restless = [(first, dataclasses.replace(second, logprobs=second.logprobs[::-1])) for first, second in pairs(600, 3)]
    result = fitted(question(), scored(600, 12), repeated=restless)
    assert result.artefact.margin_gate is not None and result.artefact.margin_gate.m_star == math.inf
    assert not any(c.certified for c in result.certificates)
    assert {row.gate for row in result.certifying} == {"inside_flip_band"}


@pytest.mark.parametrize("form", ["raw_margin", "max_probability"])
def test_the_margin_gate_counts_the_repeated_tickets_on_the_scale_that_the_worker_compares(form: str) -> None:
    repeated = pairs(1200, 3, noise=0.25)
    result = fitted(question(), scored(600, 12), repeated=repeated, form=form)
    gate = result.artefact.margin_gate
    assert gate is not None and gate.measured and math.isfinite(gate.m_star)
    state = Calibration(result.artefact)
    codes = [[decide(t.scores, question().rule_set, state) for t in pair] for pair in repeated]
    inside = [(a, b) for a, b in codes if a.reasons[0].code != "inside_flip_band"]
    assert 0 < len(inside) == gate.m < gate.n == 1200
    assert sum(a.category != b.category for a, b in inside) == gate.k


def test_too_few_repeats_leave_the_gate_off_and_say_so() -> None:
    result = fitted(question(), scored(300, 12), repeated=pairs(100, 3))
    assert result.artefact.margin_gate is not None and not result.artefact.margin_gate.measured
    assert any("stability unmeasured: 100 tickets" in note for note in result.artefact.notes)


def test_frozen_thresholds_need_enough_independent_tickets() -> None:
    tickets = scored(300, 12)
    with pytest.raises(ConfigError, match="unlabelled tickets pass the gates"):
        fitted(question(), tickets, unlabelled=scored(200, 4, prefix="u"))
    with pytest.raises(ConfigError, match="0 unlabelled tickets pass the gates"):
        fitted(question(), tickets, unlabelled=[dataclasses.replace(t, id=f"u{t.id}") for t in tickets])


def test_nothing_usable_is_refused_with_the_reasons() -> None:
    with pytest.raises(ConfigError, match="none of 30 labelled tickets"):
        fitted(question(), scored(30, 1, low_mass=1.0))
    with pytest.raises(ConfigError, match="none of 0"):
        fitted(question(), [])


def test_tickets_with_labels_that_were_not_returned_are_refused_with_their_number() -> None:
    """Left out, they would be missing from what is certified, and not from what a worker routes."""
    tickets = scored(200, 1)
    partial = [dataclasses.replace(t, unknown=(0, 1)) for t in tickets[:3]]
    for arguments in (
        {"scored": partial + tickets[3:]},
        {"scored": tickets, "unlabelled": partial},
        {"scored": tickets, "repeated": [(t, t) for t in partial]},
    ):
        labelled = arguments.pop("scored")
        with pytest.raises(
            ConfigError, match=r"on 3 of \d+ tickets the engine did not return every label \(up to 2 of"
        ):
            fitted(question(), labelled, **arguments)  # type: ignore[arg-type]


def test_certificates_carry_fingerprints_and_a_date() -> None:
    result = fitted(question(), scored(200, 1))
    prints = question().fingerprints.model_dump()
    assert all(dict(c.fingerprints) == prints and c.certified_on == "2026-02-03" for c in result.certificates)


def test_unscored_tickets_are_counted_by_reason() -> None:
    tickets = scored(200, 1)
    tickets[:3] = [dataclasses.replace(t, logprobs=(), mass=0.0, problem="too_long") for t in tickets[:3]]
    result = fitted(question(), tickets)
    assert result.artefact.data["unscored"] == {"too_long": 3}


def test_promises_hold_end_to_end_in_at_least_one_minus_delta_of_draws() -> None:
    """Coarse, on purpose: tests/guarantees has the fine simulation of the procedure itself."""
    asked, traffic = question(), scored(1500, 999)
    ids = asked.rule_set.categories.ids
    draws, broken = 0, 0
    for seed in range(25):
        result = fitted(asked, scored(160, 100 + seed), seed=seed)
        decided = [(t, decide(t.scores, asked.rule_set, Calibration(result.artefact))) for t in traffic]
        routed = [(d.category, t.label >= 0 and ids[t.label] == d.category) for t, d in decided if d.action == "route"]
        for certificate in result.certificates:
            if certificate.certified:
                right = [hit for category, hit in routed if category in certificate.members]
                draws += 1
                broken += right.count(False) > certificate.alpha * len(right)
    assert draws >= 20
    assert broken <= 0.1 * draws + 3 * math.sqrt(0.1 * 0.9 * draws)


def test_fifty_categories_and_ten_thousand_tickets_fit_and_certify() -> None:
    ids = tuple(f"c{name_of(i)}" for i in range(50))
    result = fitted(question(ids), scored(10_000, 1, categories=50))
    assert sum(c.certified for c in result.certificates) > 10


def test_history_gives_suggestions_and_routes_nothing() -> None:
    shares = {name: float(i + 1) for i, name in enumerate(IDS)}
    unlabelled = scored(700, 3)
    artefact = match_history(question(), unlabelled, shares, created_at=NOW)
    state = calibration_in_force(Artefact.from_bytes(artefact.to_bytes(), "x"), question().fingerprints)
    assert isinstance(state, Calibration)
    decisions = [decide(t.scores, question().rule_set, state) for t in unlabelled if t.mass >= FLOOR]
    assert {d.reasons[0].code for d in decisions} == {"uncertified_category"}
    with pytest.raises(ConfigError, match="no share for billing"):
        match_history(question(), unlabelled, dict.fromkeys(IDS[1:], 1.0), created_at=NOW)
    with pytest.raises(ConfigError, match="at least 500"):
        match_history(question(), unlabelled[:100], shares, created_at=NOW)
