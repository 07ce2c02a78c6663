"""The evaluator for many tickets says what `core.policy.decide` says of each, ties and thresholds included."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.sets import artefact, certificate, rule_set
from worker.core.artefact import Artefact
from worker.core.calibration import Calibrator, CorrectnessCalibrator
from worker.core.certificates import MarginGate, ScoreForm
from worker.core.policy import REASONS, Calibration, NoCalibration, reason
from worker.core.rules import RuleSet
from worker.core.scores import LabelScores
from worker.offline import fast_decide
from worker.offline.fast_decide import FastEvaluator, Verdict

IDS = ("billing", "login", "bug", "none")
# Few distinct values, so that equal labels, equal scores and scores on a threshold come up all the time.
logprob = st.one_of(st.sampled_from((-0.1, -0.7, -0.7000000000000001, -2.0, -9.0, -60.0)), st.floats(-150.0, 0.0))
FREE = rule_set(gates={"min_label_mass": 0.0}).rules
row = st.lists(logprob, min_size=4, max_size=4)
weight = st.sampled_from((0.5, 1.0, 1.3, 1.7252719525181512))
bias = st.sampled_from((0.0, 0.1, -0.5, 1.4984166725606234))


@st.composite
def calibrators(draw: st.DrawFn) -> Calibrator:
    biases = tuple(draw(bias) for _ in IDS)
    kind = draw(st.sampled_from(("identity", "bias_temperature", "vector", "dirichlet")))
    if kind == "identity":
        return Calibrator.identity(len(IDS))
    if kind == "dirichlet":
        matrix = tuple(tuple(draw(weight) if i == j else draw(bias) for j in range(4)) for i in range(4))
        return Calibrator("dirichlet", (1.0,) * 4, biases, matrix)
    if kind == "vector":
        return Calibrator("vector", tuple(draw(weight) for _ in IDS), biases)
    return Calibrator("bias_temperature", (draw(weight),) * 4, biases)


@st.composite
def desks(draw: st.DrawFn) -> tuple[RuleSet, Artefact, list[list[float]]]:
    """Rules, an artefact, and rows; thresholds, gates and steps lie on the scores of some rows, or just beside them."""
    rules = rule_set(
        *IDS[:3],
        none=True,
        gates={"min_label_mass": draw(st.sampled_from((0.0, 0.1, 0.5)))},
        categories={"login": {"alpha": draw(st.sampled_from((0.05, 0.1)))}},
        target=draw(st.sampled_from(("error_among_routed", "misroutes_per_ticket"))),
    )
    rows = draw(st.lists(row, min_size=1, max_size=12))
    calibrator = draw(calibrators())
    form: ScoreForm = draw(st.sampled_from(("max_probability", "raw_margin")))
    own = [score for logprobs in rows for score in _scores(form, calibrator, logprobs)]
    nearby = st.sampled_from(own).flatmap(
        lambda x: st.sampled_from((x, math.nextafter(x, -math.inf), math.nextafter(x, math.inf)))
    )
    limit = st.one_of(nearby, st.sampled_from((math.inf, -math.inf, 0.5)))
    gates = st.builds(
        MarginGate,
        measured=st.booleans(),
        m_star=limit,
        n=st.just(9),
        m=st.just(9),
        k=st.just(0),
        phi=st.just(0.1),
        delta=st.just(0.1),
    )
    steps = sorted(set(draw(st.lists(nearby, max_size=3))))
    corrects = [
        None,
        CorrectnessCalibrator("platt", 0.9, 0.5),
        CorrectnessCalibrator(
            "venn_abers", breaks=tuple(steps), values=tuple(i / 10 for i in range(2 * len(steps) + 1))
        ),
    ]
    procedures = st.sampled_from(("rank", "misroutes_per_ticket"))
    issued = [
        certificate(name, threshold=draw(limit), score=form, procedure=draw(procedures))
        for name in draw(st.lists(st.sampled_from(IDS[:3]), unique=True, min_size=1))
    ]
    made = artefact(
        rules,
        *issued,
        form=form,
        calibrator=calibrator,
        correctness=draw(st.sampled_from(corrects)),
        margin_gate=draw(st.one_of(st.none(), gates)),
    )
    return rules, made, rows


def _scores(form: ScoreForm, calibrator: Calibrator, logprobs: list[float]) -> list[float]:
    values = calibrator.apply_one(logprobs) if form == "max_probability" else logprobs
    first, second = sorted(values, reverse=True)[:2]
    return [first, first - second]


def scores(logprobs: list[float]) -> LabelScores:
    return LabelScores(tuple(logprobs), min(1.0, math.fsum(map(math.exp, logprobs))))


def same(fast: Verdict, exact: Verdict) -> bool:
    return (fast.code, fast.category) == (exact.code, exact.category) and all(
        (math.isnan(a) and math.isnan(b)) or math.isclose(a, b, rel_tol=0, abs_tol=1e-9)
        for a, b in ((fast.probability, exact.probability), (fast.margin, exact.margin))
    )


@settings(max_examples=400, deadline=None)
@given(desks())
def test_many_tickets_at_once_are_decided_as_each_by_itself(desk: tuple[RuleSet, Artefact, list[list[float]]]) -> None:
    rules, made, rows = desk
    evaluator = FastEvaluator(rules, Calibration(made))
    tickets = [scores(logprobs) for logprobs in rows]
    verdicts, unsure = evaluator.decide(rows, [ticket.mass for ticket in tickets])
    for place, ticket in enumerate(tickets):
        if place not in unsure:
            assert same(verdicts[place], evaluator.exactly(ticket)), (place, verdicts[place])


@settings(max_examples=50, deadline=None)
@given(st.lists(row, min_size=1, max_size=8))
def test_without_a_calibration_the_guess_and_the_reason_are_the_same(rows: list[list[float]]) -> None:
    evaluator = FastEvaluator(rule_set(*IDS[:3], none=True), NoCalibration(reason("uncalibrated", detail="x")))
    verdicts, unsure = evaluator.decide(rows, [scores(logprobs).mass for logprobs in rows])
    assert not unsure
    assert all(same(v, evaluator.exactly(scores(r))) for v, r in zip(verdicts, rows, strict=True))


def test_ordinary_tickets_are_not_left_to_the_slow_way() -> None:
    """Else equality would be won by never being fast."""
    rules = rule_set(*IDS[:3], none=True)
    drawn = np.random.default_rng(1).normal(-4.0, 1.0, (2000, 4)).clip(max=-0.01)
    z = (drawn - np.log(np.exp(drawn).sum(axis=1, keepdims=True)) - 0.1).tolist()
    evaluator = FastEvaluator(rules, Calibration(artefact(rules, certificate(*IDS[:3], threshold=0.6))))
    verdicts, unsure = evaluator.decide(z, [0.9] * len(z))
    assert len(unsure) < 5
    assert {verdict.code for verdict in verdicts} == {"certified", "below_threshold", "none_of_the_above"}


@pytest.mark.parametrize("kind", ["bias_temperature", "vector", "dirichlet"])
def test_a_ticket_on_its_threshold_is_decided_to_the_last_bit(kind: str) -> None:
    """With a dozen labels numpy's sums differ from one ticket's in the last bits: only the guard makes them one."""
    names = tuple(f"c{number}" for number in range(12))
    rules, generator = rule_set(*names), np.random.default_rng(7)
    matrix = (
        tuple(map(tuple, (np.eye(12) + generator.normal(0, 0.1, (12, 12))).tolist())) if kind == "dirichlet" else ()
    )
    calibrator = Calibrator(kind, (1.3,) * 12, tuple(generator.normal(0, 1, 12).tolist()), matrix)  # type: ignore[arg-type]
    for logprobs in generator.normal(-5.0, 2.0, (150, 12)).clip(max=-2.5).tolist():
        threshold = max(calibrator.apply_one(logprobs))
        for limit in (threshold, math.nextafter(threshold, 0.0)):
            made = artefact(rules, certificate(*names, threshold=limit), calibrator=calibrator, min_label_mass=0.0)
            evaluator = FastEvaluator(rules.model_copy(update={"rules": FREE}), Calibration(made))
            (verdict,), unsure = evaluator.decide([logprobs], [scores(logprobs).mass])
            exact = evaluator.exactly(scores(logprobs))
            assert exact.routes is (limit < threshold)
            assert unsure or same(verdict, exact)


def test_labels_that_were_not_returned_are_left_to_the_evaluator() -> None:
    rules = rule_set(*IDS[:3], none=True)
    evaluator = FastEvaluator(rules, Calibration(artefact(rules)))
    _, unsure = evaluator.decide([[-0.1, -3.0, -4.0, -5.0], [-0.1, None, -4.0, -5.0]], [0.99, 0.93])
    assert unsure == {1}


def test_every_code_is_one_that_the_evaluator_knows() -> None:
    assert set(fast_decide.CODES) <= REASONS.keys()


def test_a_row_of_another_length_is_refused() -> None:
    rules = rule_set(*IDS[:3], none=True)
    with pytest.raises(ValueError):
        FastEvaluator(rules, Calibration(artefact(rules))).decide([[-0.1, -3.0, -4.0]], [0.9])
