"""Thresholds, bounds and groups; that they keep their promise is simulated in tests/guarantees."""

from __future__ import annotations

import json
import math
import tracemalloc
from collections import Counter
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from worker.core.binomial import critical_sizes
from worker.core.calibration import Calibrator
from worker.core.certificate_groups import certify_categories, form_groups
from worker.core.guarantees import (
    Certificate,
    FrozenThresholds,
    MarginGate,
    Subject,
    certify,
    certify_frozen,
    certify_misroutes,
    clopper_pearson,
    clopper_pearson_lower,
    clopper_pearson_upper,
    freeze_thresholds,
    kmax,
    labels_needed,
    margin_gate,
    n_min,
)
from worker.core.score_form import choose_form, fit_part, in_fit_part, max_probability, raw_margin, routed_label
from worker.errors import ArtefactError

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())["clopper_pearson"]

# --- exact binomial bounds ---


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: f"{case['k']}of{case['n']}")
def test_upper_bound_equals_two_independent_implementations(case: dict[str, Any]) -> None:
    found = clopper_pearson_upper(case["k"], case["n"], case["delta"])
    assert found == pytest.approx(case["upper_scipy"], abs=1e-12)
    assert found == pytest.approx(case["upper_statsmodels"], abs=1e-9)


def test_twelve_errors_in_310_do_not_certify_five_percent() -> None:
    assert clopper_pearson_upper(12, 310, 0.05) > 0.06


@given(st.integers(0, 60), st.integers(0, 60), st.floats(0.001, 0.5))
@settings(deadline=None)
def test_bounds_bracket_the_rate_and_mirror_each_other(a: int, b: int, delta: float) -> None:
    k, n = min(a, b), max(a, b)
    lower, upper = clopper_pearson_lower(k, n, delta), clopper_pearson_upper(k, n, delta)
    assert 0 <= lower <= (k / n if n else 0) <= upper <= 1
    assert 1 - clopper_pearson_upper(n - k, n, delta) == pytest.approx(lower, abs=1e-9)
    if 0 < k < n:
        assert stats.binom.cdf(k, n, upper) == pytest.approx(delta, rel=1e-6)
        assert clopper_pearson(k, n, 1 - 2 * delta) == pytest.approx((lower, upper))


@pytest.mark.parametrize(
    ("alpha", "delta", "sizes"),
    [
        (0.05, 0.05, [59, 93, 124, 153, 181]),
        (0.10, 0.10, [22, 38, 52, 65, 78]),
        (0.05, 0.005, [104, 146, 182, 216, 248]),
    ],
)
def test_accepted_items_needed_for_each_number_of_errors(alpha: float, delta: float, sizes: list[int]) -> None:
    assert critical_sizes(sizes[-1], alpha, delta).tolist() == sizes
    assert n_min(alpha, delta) == sizes[0]


@given(st.integers(0, 400), st.floats(0.01, 0.4), st.floats(0.001, 0.4))
@settings(deadline=None)
def test_kmax_is_the_largest_number_of_errors_whose_bound_is_at_most_alpha(m: int, alpha: float, level: float) -> None:
    brute = np.flatnonzero(stats.binom.cdf(np.arange(m + 1), m, alpha) <= level)
    assert kmax(m, alpha, level) == (brute[-1] if brute.size else -1)
    for k in (kmax(m, alpha, level), kmax(m, alpha, level) + 1):
        if 0 <= k <= m and m > 0:
            assert (clopper_pearson_upper(k, m, level) <= alpha) == (k <= kmax(m, alpha, level))
    assert (kmax(m, alpha, level) >= 0) == (m >= n_min(alpha, level))


@pytest.mark.parametrize(("alpha", "delta"), [(0.0, 0.05), (0.05, 1.0), (1.5, 0.05), (0.05, math.nan)])
def test_rates_outside_the_open_unit_interval_are_refused(alpha: float, delta: float) -> None:
    with pytest.raises(ValueError, match="strictly between"):
        certify([1.0], [0], alpha=alpha, delta=delta)
    with pytest.raises(ValueError, match="cannot be"):
        clopper_pearson_upper(3, 2, 0.05)


# --- the rank form ---


@lru_cache
def largest(m: int, alpha: float, level: float) -> int:
    """max{k : BinomCDF(k; m, alpha) <= level}, -1 if none."""
    return int(np.sum(stats.binom.cdf(np.arange(m + 1), m, alpha) <= level)) - 1


def reference(scores: list[float], errors: list[int], alpha: float, delta: float) -> tuple[int, float, float]:
    """The procedure as it is published in the documentation, step by step, with nothing made fast: m, level,
    lambda.
    """

    def critical(level: float) -> list[int]:
        return [m for m in range(1, n + 1) if largest(m, alpha, level) > largest(m - 1, alpha, level)]

    n = len(scores)
    fewest = math.ceil(math.log(delta) / math.log(1 - alpha))
    if n < fewest:
        return 0, 0.0, math.inf
    spread = min(max(n // (4 * fewest), 1), 4)
    for_start = critical(delta / spread)
    first = min(for_start)
    wanted = [first + (0.9 * n - first) * i / spread for i in range(spread)]
    starts = sorted({next((m for m in for_start if m >= point), 0) for point in wanted} - {0})
    grid = sorted({*starts, *(m for m in critical(delta) if m >= starts[0]), n})
    order = sorted(range(n), key=lambda i: -scores[i])
    level, best, best_level = 0.0, 0, 0.0
    for m in grid:
        level += 1 / len(starts) if m in starts else 0
        if level == 0:
            continue
        end = sum(score >= scores[order[m - 1]] for score in scores)
        k = sum(errors[i] for i in order[:end])
        if k <= largest(end, alpha, min(level, 1.0) * delta):
            best, best_level = end, level * delta
        else:
            level = 0.0
    if best == 0:
        return 0, 0.0, math.inf
    return best, best_level, scores[order[best]] if best < n else -math.inf


@st.composite
def labelled_sets(draw: st.DrawFn, max_n: int = 260) -> tuple[list[float], list[int]]:
    """Scores with or without ties, errors that thin out towards the top."""
    n = draw(st.integers(0, max_n))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    scores = generator.random(n)
    power, worst = draw(st.floats(0.5, 4)), draw(st.floats(0, 0.6))
    errors = generator.random(n) < worst * (1 - scores) ** power
    if levels := draw(st.sampled_from([0, 1, 3, 10, 40])):
        scores = np.floor(scores * levels)
    return scores.tolist(), errors.astype(int).tolist()


rates = st.sampled_from([(0.05, 0.05), (0.10, 0.10), (0.20, 0.05), (0.10, 0.01)])


@given(labelled_sets(max_n=400), rates)
@settings(deadline=None, max_examples=60)
def test_certify_is_the_published_procedure(sample: tuple[list[float], list[int]], rate: tuple[float, float]) -> None:
    alpha, delta = rate
    found = certify(*sample, alpha=alpha, delta=delta)
    m, level, lambda_ = reference(*sample, alpha, delta)
    assert (found.m, found.lambda_) == (m, lambda_)
    assert found.level == pytest.approx(level)


@pytest.mark.parametrize("n", [500, 2000])
def test_certify_is_the_published_procedure_with_several_starts(n: int) -> None:
    generator = np.random.default_rng(n)
    for worst in (0.1, 0.2, 0.3, 0.45):
        scores = np.round(generator.random(n), 3)
        errors = (generator.random(n) < 0.01 + worst * (1 - scores) ** 2).astype(int)
        found = certify(scores, errors, alpha=0.05, delta=0.05)
        m, level, lambda_ = reference(scores.tolist(), errors.tolist(), 0.05, 0.05)
        assert (found.m, found.lambda_) == (m, lambda_)
        assert found.level == pytest.approx(level)


@given(labelled_sets(), rates)
@settings(deadline=None)
def test_certificate_counts_what_its_threshold_routes(
    sample: tuple[list[float], list[int]], rate: tuple[float, float]
) -> None:
    alpha, delta = rate
    scores, errors = sample
    found = certify(scores, errors, alpha=alpha, delta=delta)
    routed = [error for score, error in zip(scores, errors, strict=True) if found.routes(score)]
    assert (len(routed), sum(routed)) == (found.m, found.k)
    if found.certified:
        assert 0 < found.level <= delta
        assert found.m >= n_min(alpha, delta)
        assert clopper_pearson_upper(found.k, found.m, found.level) <= alpha + 1e-12
        assert found.missing == 0


@given(labelled_sets(), rates, st.randoms(use_true_random=False))
@settings(deadline=None)
def test_certify_does_not_depend_on_order_or_scale(
    sample: tuple[list[float], list[int]], rate: tuple[float, float], random: Any
) -> None:
    alpha, delta = rate
    found = certify(*sample, alpha=alpha, delta=delta)
    rows = list(zip(*sample, strict=True))
    random.shuffle(rows)
    shuffled = certify([s for s, _ in rows], [e for _, e in rows], alpha=alpha, delta=delta)
    assert shuffled == found
    scaled = certify([3 * s - 50 for s in sample[0]], sample[1], alpha=alpha, delta=delta)
    assert (scaled.m, scaled.k, scaled.level) == (found.m, found.k, found.level)


@given(labelled_sets(), rates, st.data())
@settings(deadline=None)
def test_one_error_less_never_routes_less(
    sample: tuple[list[float], list[int]], rate: tuple[float, float], data: st.DataObject
) -> None:
    alpha, delta = rate
    scores, errors = sample
    if wrong := [i for i, error in enumerate(errors) if error]:
        righted = list(errors)
        righted[data.draw(st.sampled_from(wrong))] = 0
        before, after = (certify(scores, e, alpha=alpha, delta=delta) for e in (errors, righted))
        assert after.m >= before.m


def test_59_right_answers_certify_and_58_do_not() -> None:
    for n, certified in ((58, False), (59, True)):
        found = certify(range(n), [0] * n, alpha=0.05, delta=0.05)
        assert found.certified is certified
        assert found.lambda_ == (-math.inf if certified else math.inf)


def test_threshold_is_the_next_lower_score_and_strict() -> None:
    scores = [*range(100, 41, -1), *range(41)]  # 59 right, 41 wrong below them
    found = certify(scores, [0] * 59 + [1] * 41, alpha=0.05, delta=0.05)
    assert (found.m, found.k, found.lambda_) == (59, 0, 40.0)
    assert not found.routes(40.0)
    assert found.routes(math.nextafter(40.0, 41.0))
    assert not found.routes(math.nan)


def test_a_tie_block_is_routed_whole_or_not_at_all() -> None:
    """59 right answers and one wrong one, all with the same score: no order of the sixty may certify."""
    for order in ([0] * 59 + [1], [1] + [0] * 59):
        found = certify([1.0] * 60, order, alpha=0.05, delta=0.05)
        assert not found.certified
    assert certify([1.0] * 93, [1] + [0] * 92, alpha=0.05, delta=0.05).m == 93


def test_infinite_scores_are_scores() -> None:
    found = certify([math.inf] * 60 + [-math.inf], [0] * 60 + [1], alpha=0.05, delta=0.05)
    assert (found.m, found.lambda_) == (60, -math.inf)
    assert found.routes(math.inf)
    assert not found.routes(-math.inf)


@pytest.mark.parametrize("errors", [[], [1] * 10, [1] * 500, [0] * 10])
def test_what_cannot_certify_escalates_everything(errors: list[int]) -> None:
    found = certify(range(len(errors)), errors, alpha=0.05, delta=0.05)
    assert (found.m, found.lambda_, found.level) == (0, math.inf, 0.0)
    assert not found.routes(1e300)


@pytest.mark.parametrize(
    ("scores", "errors"), [([math.nan], [0]), ([1.0], [0, 1]), ([[1.0]], [[0]]), ([1.0], [2]), ([1.0], [-1])]
)
def test_impossible_samples_are_refused(scores: Any, errors: Any) -> None:
    with pytest.raises(ValueError, match=r"score|error"):
        certify(scores, errors, alpha=0.05, delta=0.05)


# --- how many labels are missing ---


def test_too_few_labels_say_how_many_would_do() -> None:
    found = certify(range(37), [0] * 37, alpha=0.05, delta=0.05)
    assert found.summary() == "suggest only: n=37, need 59"
    assert found.missing == 22
    assert certify([], [], alpha=0.05, delta=0.05).need == 59


def test_need_grows_with_the_errors_among_the_best() -> None:
    n = 58
    perfect = [0] * n
    one = [0] * 45 + [1] + [0] * 12  # 45 right at the top: a third more labels would give 59 of them
    needs = [labels_needed(range(n, 0, -1), errors, alpha=0.05, delta=0.05) for errors in (perfect, one)]
    assert needs[0] == 59 and needs[1] is not None and math.ceil(59 / 45 * n) <= needs[1] <= 1.05 * 59 / 45 * n
    assert labels_needed(range(100), [1] * 100, alpha=0.05, delta=0.05) is None
    assert certify(range(100), [1] * 100, alpha=0.05, delta=0.05).missing is None


def test_as_many_labels_as_are_asked_for_mostly_suffice() -> None:
    """Where the model tells right from wrong; the first labels are drawn anew until they certify nothing."""
    generator = np.random.default_rng(11)
    for alpha, delta, n in ((0.1, 0.1, 15), (0.1, 0.1, 40), (0.05, 0.05, 40), (0.05, 0.05, 90)):
        asked = sufficed = 0
        while asked < 20:
            sure = generator.beta(3.6, 0.4, n)
            wrong = generator.random(n) > sure
            first = certify(sure, wrong, alpha=alpha, delta=delta)
            if first.certified or first.missing is None:
                continue
            more = generator.beta(3.6, 0.4, first.missing)
            more_wrong = generator.random(first.missing) > more
            asked += 1
            scores, errors = np.concatenate((sure, more)), np.concatenate((wrong, more_wrong))
            sufficed += certify(scores, errors, alpha=alpha, delta=delta).certified
        assert sufficed > asked / 2, (alpha, delta, n, sufficed)


def test_few_labels_do_not_say_that_more_would_not_help_unless_their_errors_show_it() -> None:
    unclear = certify(range(9, 0, -1), [1, 0, 1, 0, 0, 0, 1, 0, 0], alpha=0.1, delta=0.1)
    assert (unclear.need, unclear.summary()) == (None, "suggest only: n=9, too few to tell what it needs")
    for hopeless in (
        certify(range(9), [1] * 9, alpha=0.1, delta=0.1),
        certify(range(400), [1] * 400, alpha=0.1, delta=0.1),
    ):
        assert hopeless.summary() == f"suggest only: n={hopeless.n}, need other scores than these"


def test_need_asks_for_a_deeper_start_where_an_early_one_spent_the_budget() -> None:
    """Two errors in 200 would certify; two within the first 59 fail the only start that 200 labels allow."""
    errors = [1, 1] + [0] * 198
    found = certify(range(200, 0, -1), errors, alpha=0.05, delta=0.05)
    assert clopper_pearson_upper(2, 200, 0.05) < 0.05
    assert (found.certified, found.need) == (False, 2 * 4 * 59)


@given(labelled_sets(), rates)
@settings(deadline=None)
def test_need_is_more_than_there_is(sample: tuple[list[float], list[int]], rate: tuple[float, float]) -> None:
    alpha, delta = rate
    found = certify(*sample, alpha=alpha, delta=delta)
    if not found.certified and found.need is not None:
        assert found.need > found.n
        assert found.need >= n_min(alpha, delta)


# --- frozen thresholds, misroutes, stability ---


def test_frozen_thresholds_lie_at_twentieths_and_merge_ties() -> None:
    frozen = freeze_thresholds(np.arange(1000))
    assert len(frozen.thresholds) == 20
    assert frozen.coverages == pytest.approx([i / 20 for i in range(1, 21)])
    assert frozen.thresholds[0] == 949.0
    assert frozen.thresholds[-1] == -math.inf
    tied = freeze_thresholds([1.0] * 600 + [0.0] * 400)
    assert tied.thresholds == (1.0, 0.0, -math.inf)
    assert tied.coverages == (0.0, 0.6, 1.0)
    with pytest.raises(ValueError, match="500"):
        freeze_thresholds(np.arange(499))


@given(labelled_sets(), rates)
@settings(deadline=None)
def test_frozen_form_routes_at_one_of_its_thresholds_and_counts_it(
    sample: tuple[list[float], list[int]], rate: tuple[float, float]
) -> None:
    alpha, delta = rate
    unlabelled = np.random.default_rng(0).choice(sample[0] or [0.0], 500)  # thresholds that are labelled scores
    frozen = freeze_thresholds(unlabelled)
    found = certify_frozen(*sample, frozen, alpha=alpha, delta=delta)
    routed = [error for score, error in zip(*sample, strict=True) if found.routes(score)]
    assert (len(routed), sum(routed)) == (found.m, found.k)
    assert found.procedure == "frozen"
    if found.certified:
        assert found.lambda_ in frozen.thresholds
        assert clopper_pearson_upper(found.k, found.m, found.level) <= alpha + 1e-12


def test_frozen_form_starts_where_enough_labels_are_expected() -> None:
    frozen = FrozenThresholds((0.9, 0.5, -math.inf), (0.1, 0.5, 1.0))
    scores = np.linspace(0, 1, 160)
    errors = (scores > 0.95).astype(int)  # the very top is bad, and far too small to be tested
    assert certify_frozen(scores, errors * 0, frozen, alpha=0.05, delta=0.05).lambda_ == -math.inf
    assert certify_frozen(scores, errors, frozen, alpha=0.05, delta=0.05).certified is False
    assert certify_frozen(scores[:60], [0] * 60, frozen, alpha=0.05, delta=0.05).lambda_ == -math.inf
    assert certify_frozen(scores[:58], [0] * 58, frozen, alpha=0.05, delta=0.05).need == 59


def test_misroutes_are_counted_per_ticket_of_all_traffic() -> None:
    errors = [0] * 30 + [1] * 29
    found = certify_misroutes(range(59, 0, -1), errors, alpha=0.05, delta=0.05)
    assert (found.m, found.k, found.lambda_, found.procedure) == (30, 0, 29.0, "misroutes_per_ticket")
    assert not certify(range(59, 0, -1), errors, alpha=0.05, delta=0.05).certified
    short = certify_misroutes(range(58), [0] * 58, alpha=0.05, delta=0.05)
    assert (short.certified, short.need) == (False, 59)
    assert certify_misroutes([], [], alpha=0.05, delta=0.05).certified is False
    assert certify_misroutes([1.0] * 100, [1] + [0] * 99, alpha=0.05, delta=0.05).m == 100


def test_gate_is_off_and_says_so_below_299_repeats() -> None:
    gate = margin_gate(np.arange(298), [0] * 298)
    assert (gate.measured, gate.m_star) == (False, -math.inf)
    assert gate.passes(-5.0)
    assert gate.summary() == "stability unmeasured: 298 tickets scored twice"
    assert margin_gate(np.arange(299), [0] * 299).measured


def test_gate_closes_where_answers_flip() -> None:
    margins = np.linspace(0, 1, 1000)
    gate = margin_gate(margins, margins < 0.1)
    assert 0.1 <= gate.m_star < 0.3  # nothing flips above .1; the next size to be tested took 13 flips in
    assert not gate.passes(gate.m_star)
    assert margin_gate(margins, np.ones(1000)).m_star == math.inf


# --- records ---


def example(**changes: Any) -> Certificate:
    found = certify(range(100), [0] * 100, alpha=0.05, delta=0.05, subject=Subject("hardware", ("hardware",), "own"))
    return replace(found, fingerprints=(("model", "abc"),), certified_on="2026-01-01", **changes)


@pytest.mark.parametrize("lambda_", [math.inf, -math.inf, 0.1 + 0.2])
def test_certificate_survives_strict_json(lambda_: float) -> None:
    certificate = example(lambda_=lambda_)
    text = json.dumps(certificate.to_dict(), allow_nan=False)
    assert Certificate.from_dict(json.loads(text)) == certificate
    gate = MarginGate(True, lambda_, 1000, 900, 3, 0.01, 0.05)
    assert MarginGate.from_dict(json.loads(json.dumps(gate.to_dict(), allow_nan=False))) == gate


@pytest.mark.parametrize(
    "change",
    [{"lambda": "high"}, {"lambda": "nan"}, {"basis": "hope"}, {"procedure": "scan"}, {"score": "mean"}, {"extra": 1},
     {"members": None}, {"k": 101}, {"m": "many"}, {"alpha": 0.0}],
)  # fmt: skip
def test_a_damaged_certificate_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ArtefactError):
        Certificate.from_dict({**example().to_dict(), **change})
    for gate in ({}, {"m_star": "nan"}):
        with pytest.raises(ArtefactError):
            MarginGate.from_dict({**MarginGate(True, 0.0, 1, 1, 0, 0.01, 0.05).to_dict(), **gate} if gate else gate)


# --- which label, which score ---


def test_split_of_a_ticket_is_its_own() -> None:
    ids = [f"ticket-{i}" for i in range(20_000)]
    parts = fit_part(ids)
    assert sum(parts) / len(parts) == pytest.approx(0.35, abs=0.01)
    assert fit_part(ids[::-1]) == parts[::-1]
    assert [in_fit_part(name) for name in ("a", "b", "c", "표 1")] == [True, False, False, False]  # never changes
    assert all(fit_part(ids, 1.0))
    assert not any(fit_part(ids, 0.0))


@pytest.mark.parametrize(
    ("n", "fewest", "gain", "gain_se", "form"),
    [
        (181, 59, 0.5, 0.1, "raw_margin"),  # .65 * 181 < 2 * 59
        (182, 59, 0.5, 0.1, "max_probability"),
        (182, 59, 0.1, 0.1, "raw_margin"),
        (399, 59, 0.0, 0.0, "raw_margin"),
        (400, 59, -0.5, 0.1, "max_probability"),
        (500, 299, 0.5, 0.1, "raw_margin"),
        (160, 22, 0.2, 0.1, "max_probability"),
    ],
)
def test_form_follows_from_counts_and_the_fit_part(n: int, fewest: int, gain: float, gain_se: float, form: str) -> None:
    assert choose_form(n, fewest, gain, gain_se) == form


def test_routed_label_and_its_score_come_from_one_vector() -> None:
    calibrator = Calibrator("bias_temperature", (1.0,) * 3, (0.0, 5.0, 0.0))
    assert (raw_margin([-1.0, -2.0, -4.0]).index, raw_margin([-1.0, -2.0, -4.0]).score) == (0, 1.0)
    assert routed_label("raw_margin", calibrator, [-1.0, -2.0, -4.0]) == raw_margin([-1.0, -2.0, -4.0])
    routed = routed_label("max_probability", calibrator, [-1.0, -2.0, -4.0])
    assert routed.index == 1
    assert routed.score == max(calibrator.apply_one([-1.0, -2.0, -4.0]))
    assert max_probability([0.5, 0.5]).index == 0
    assert raw_margin([3.0]).score == math.inf
    assert raw_margin([-1.0, -math.inf]).score == math.inf
    for row in ([math.nan, 0.0], [0.0, math.nan], [-math.inf, -math.inf]):
        with pytest.raises(ValueError, match="not a number"):
            raw_margin(row)


# --- groups ---


def test_groups_climb_the_taxonomy_and_end_in_a_pool() -> None:
    counts = {"vpn": 60, "wifi": 70, "laptop": 300, "screen": 40, "mouse": 30, "leave": 20, "none": 90, "rare": 0}
    parents = {"vpn": "network", "wifi": "network", "laptop": "hardware", "screen": "hardware", "mouse": "hardware",
               "network": "it", "hardware": "it"}  # fmt: skip
    groups = {g.name: g for g in form_groups(counts, fewest=59, parents=parents, excluded={"none"})}
    assert {name: (g.basis, g.members, g.count) for name, g in groups.items()} == {
        "none": ("excluded", ("none",), 90),
        "rare": ("excluded", ("rare",), 0),
        "laptop": ("own", ("laptop",), 300),
        "network": ("taxonomy", ("vpn", "wifi"), 130),
        "pool": ("pool", ("screen", "mouse", "leave"), 90),
    }
    # what is too small under hardware meets its cousins one level higher
    counts["screen"], counts["mouse"], counts["wifi"] = 50, 10, 40
    groups = {g.name: g for g in form_groups(counts, fewest=59, parents=parents, excluded={"none"})}
    assert groups["it"].members == ("vpn", "wifi", "screen", "mouse")
    assert groups["it"].count == 160
    assert groups["pool"].members == ("leave",)


def test_a_category_may_itself_be_a_node_of_the_taxonomy() -> None:
    groups = form_groups({"it": 100, "vpn": 30, "hr": 5}, fewest=59, parents={"vpn": "it"})
    assert [(g.name, g.members, g.basis) for g in groups] == [
        ("it", ("it", "vpn"), "taxonomy"),
        ("pool", ("hr",), "pool"),
    ]


def test_a_taxonomy_that_bites_its_tail_is_refused() -> None:
    with pytest.raises(ValueError, match="cycle: a > b > a"):
        form_groups({"a": 1}, fewest=59, parents={"a": "b", "b": "a"})


@given(
    st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 150), max_size=8),
    st.dictionaries(st.sampled_from("abcdefgh"), st.sampled_from("xyz"), max_size=8),
    st.sets(st.sampled_from("abcdefgh")),
)
def test_every_category_is_in_exactly_one_group(counts: dict[str, int], parents: dict[str, str], out: set[str]) -> None:
    groups = form_groups(counts, fewest=30, parents={**parents, "x": "y"}, excluded=out)
    members = [member for group in groups for member in group.members]
    assert sorted(members) == sorted(counts)
    for group in groups:
        assert group.count == sum(counts[member] for member in group.members)
        assert group.count >= 60 or group.basis in ("pool", "excluded")


def categories_sample(n: int = 2000, seed: int = 0) -> tuple[Any, Any, Any]:
    generator = np.random.default_rng(seed)
    predicted = generator.choice(5, n, p=[0.5, 0.3, 0.15, 0.045, 0.005])
    scores = generator.random(n)
    return predicted, scores, (generator.random(n) < 0.2 * (1 - scores) ** 3) & (predicted < 3)


def test_each_category_is_certified_on_its_own_tickets() -> None:
    predicted, scores, errors = categories_sample()
    found = certify_categories(predicted, scores, errors, "abcde", alpha=0.05, delta=0.05, excluded=("b",))
    by_group = {certificate.group: certificate for certificate in found}
    assert {name: c.basis for name, c in by_group.items()} == {"a": "own", "b": "excluded", "c": "own", "pool": "pool"}
    for name, rows in (("a", predicted == 0), ("c", predicted == 2), ("pool", predicted >= 3)):
        alone = certify(scores[rows], errors[rows], alpha=0.05, delta=0.05)
        assert (by_group[name].lambda_, by_group[name].m, by_group[name].k) == (alone.lambda_, alone.m, alone.k)
    assert by_group["b"].lambda_ == math.inf
    assert by_group["pool"].members == ("d", "e")
    assert "never routed" in by_group["b"].summary()
    assert by_group["pool"].summary().startswith("certified as a pool")


def test_a_joint_statement_divides_delta_among_the_groups() -> None:
    found = certify_categories(*categories_sample(), "abcde", alpha=0.05, delta=0.05, joint=True)
    tested = [certificate for certificate in found if certificate.basis != "excluded"]
    assert sum(certificate.delta for certificate in tested) <= 0.05 + 1e-12
    assert {certificate.delta for certificate in tested} == {0.05 / 4}


def test_a_pool_under_n_min_escalates_and_groups_ignore_errors() -> None:
    predicted = [0] * 200 + [1] * 30 + [2] * 28
    scores = np.linspace(0, 1, 258)
    found = certify_categories(predicted, scores, [0] * 258, "abc", alpha=0.05, delta=0.05)
    pool = found[-1]
    assert (pool.basis, pool.n, pool.certified, pool.need) == ("pool", 58, False, 59)
    wrong = certify_categories(predicted, scores, [1] * 258, "abc", alpha=0.05, delta=0.05)
    assert [(c.group, c.members, c.n) for c in wrong] == [(c.group, c.members, c.n) for c in found]


def test_ten_thousand_tickets_in_fifty_categories_take_memory_linear_in_their_number() -> None:
    generator = np.random.default_rng(0)
    predicted = generator.integers(0, 50, 10_000)
    scores = generator.random(10_000)
    errors = generator.random(10_000) < 0.3 * (1 - scores) ** 2
    tracemalloc.start()
    found = certify_categories(predicted, scores, errors, [f"c{i}" for i in range(50)], alpha=0.05, delta=0.05)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert Counter(c.basis for c in found) == {"own": 50}
    assert peak < 100 * 10_000 * 8


@pytest.mark.parametrize(("predicted", "scores"), [([0, 5], [1.0, 2.0]), ([-1, 0], [1.0, 2.0]), ([0], [1.0, 2.0])])
def test_predictions_outside_the_categories_are_refused(predicted: list[int], scores: list[float]) -> None:
    with pytest.raises(ValueError, match=r"predicted label|expected one"):
        certify_categories(predicted, scores, [0, 0], "abc", alpha=0.05, delta=0.05)
