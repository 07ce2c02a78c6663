"""Every bound keeps its promise on populations whose true error rate is known, and the same tests catch
wrong bounds.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest

from worker.core.certificate_groups import certify_categories
from worker.core.fitting import fit
from worker.core.guarantees import certify, certify_misroutes, margin_gate
from worker.offline.guarantee_simulation import (
    CURVES,
    LANGUAGE_MODEL,
    POPULATIONS,
    LanguageModelPopulation,
    Outcome,
    Population,
    simulate,
    simulate_form,
)

SEED = 20_240_601
SIZES = (100, 200, 500, 2000)
DRAWS = 1000
SMALL_MODEL = LanguageModelPopulation("small model", bias=(0.2, -0.3, 1.1, 0.2, -1.0, 0.7, 2.3, 1.7), sharpness=0.8)
"""Strong label bias: its raw argmax is wrong for more than a quarter of the tickets."""

each_population = pytest.mark.parametrize("population", POPULATIONS, ids=lambda population: population.name)
each_size = pytest.mark.parametrize("n", SIZES)


BY_NAME = {population.name: population for population in POPULATIONS}


@lru_cache
def _outcomes(name: str, n: int) -> dict[str, Outcome]:
    procedures = ["rank", "naive", "uncorrected_scan"] + ["frozen"] * (n in (200, 2000))
    return {outcome.procedure: outcome for outcome in simulate(BY_NAME[name], procedures, n=n, draws=DRAWS, seed=SEED)}


def outcomes(population: Population, n: int) -> dict[str, Outcome]:
    """All procedures on the same draws, simulated once."""
    return _outcomes(population.name, n)


@each_population
@each_size
def test_rank_form_breaks_alpha_in_at_most_delta_of_the_draws(population: Population, n: int) -> None:
    assert outcomes(population, n)["rank"].holds, outcomes(population, n)["rank"]


@each_population
@pytest.mark.parametrize("n", [200, 2000])
def test_frozen_form_breaks_alpha_in_at_most_delta_of_the_draws(population: Population, n: int) -> None:
    assert outcomes(population, n)["frozen"].holds, outcomes(population, n)["frozen"]


@each_population
@each_size
def test_naive_threshold_is_caught_everywhere(population: Population, n: int) -> None:
    naive = outcomes(population, n)["naive"]
    assert not naive.holds
    assert naive.violation > 0.4


@pytest.mark.parametrize("n", [500, 2000])
def test_uncorrected_scan_of_exact_bounds_is_caught_on_flat(n: int) -> None:
    assert not outcomes(BY_NAME["flat"], n)["uncorrected_scan"].holds


@pytest.mark.parametrize(("n", "coverage"), [(100, 0.35), (200, 0.56), (500, 0.75), (2000, 0.81)])
def test_rank_form_routes_what_is_published_for_it(n: int, coverage: float) -> None:
    assert outcomes(LANGUAGE_MODEL, n)["rank"].coverage == pytest.approx(coverage, abs=0.05)


def test_bounds_by_binary_search_route_less_on_few_labels() -> None:
    theirs, ours = simulate(LANGUAGE_MODEL, ["geifman_el_yaniv", "rank"], n=200, draws=200, seed=SEED)
    assert theirs.holds
    assert theirs.coverage < ours.coverage - 0.1


@pytest.mark.parametrize("population", CURVES, ids=lambda population: population.name)
def test_a_population_knows_its_own_risk(population: Population) -> None:
    scores, errors = population.draw(np.random.default_rng(0), 400_000)
    for lambda_ in (-np.inf, 0.3, 0.65, 0.9):
        coverage, risk = population.outcome(lambda_)
        assert coverage == pytest.approx((scores > lambda_).mean(), abs=0.004)
        assert risk == pytest.approx(errors[scores > lambda_].mean(), abs=0.004)
    assert population.outcome(np.inf) == (0.0, 0.0)


def test_the_language_model_is_about_as_good_as_it_says() -> None:
    coverage, risk = LANGUAGE_MODEL.outcome(-np.inf)
    assert coverage == 1.0
    assert risk == pytest.approx(0.135, abs=0.01)
    assert LANGUAGE_MODEL.outcome(np.inf) == (0.0, 0.0)
    oracle = max(c for c, r in map(LANGUAGE_MODEL.outcome, np.linspace(0, 5, 201)) if r <= 0.05)
    assert oracle == pytest.approx(0.84, abs=0.01)


# --- calibrated scores ---


@pytest.mark.parametrize(("n", "draws", "coverage"), [(500, 150, 0.70), (2000, 60, 0.83)])
def test_split_form_keeps_the_promise(n: int, draws: int, coverage: float) -> None:
    outcome = simulate_form(LANGUAGE_MODEL, "split", n=n, draws=draws, seed=SEED, evaluate_on=30_000)
    assert outcome.holds, outcome
    assert outcome.coverage == pytest.approx(coverage, abs=0.05)


def test_choosing_the_form_on_the_fit_part_keeps_the_promise_and_pays_for_a_small_model() -> None:
    chosen = simulate_form(SMALL_MODEL, "chosen", n=160, draws=60, seed=SEED, evaluate_on=20_000, alpha=0.1, delta=0.1)
    raw = simulate(SMALL_MODEL, ["rank"], n=160, draws=200, seed=SEED, alpha=0.1, delta=0.1)[0]
    assert chosen.holds, chosen
    assert raw.holds, raw
    assert chosen.coverage > raw.coverage + 0.1


def test_certifying_on_the_labels_that_fitted_is_caught() -> None:
    outcome = simulate_form(
        LANGUAGE_MODEL,
        "same_labels",
        n=160,
        draws=60,
        seed=SEED,
        alpha=0.1,
        delta=0.1,
        fitting=lambda z, y: fit(z, y, "dirichlet", ridge=30.0),
        evaluate_on=20_000,
    )
    assert not outcome.holds, outcome


# --- other promises ---


def test_misroutes_per_ticket_stay_within_alpha() -> None:
    generator, draws, broken, covered = np.random.default_rng(SEED), 1000, 0, 0.0
    for _ in range(draws):
        found = certify_misroutes(*LANGUAGE_MODEL.draw(generator, 200), alpha=0.05, delta=0.05)
        coverage, risk = LANGUAGE_MODEL.outcome(found.lambda_)
        broken += coverage * risk > 0.05
        covered += coverage / draws
    assert 0.01 < broken / draws <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / draws)  # the bound is tight, and holds
    assert covered > 0.6  # a looser target than the error rate among the routed


def test_joint_certificates_hold_for_every_category_at_once_where_one_threshold_does_not() -> None:
    logprobs, labels = LANGUAGE_MODEL.population
    pool_predicted, pool_wrong = logprobs.argmax(axis=1), logprobs.argmax(axis=1) != labels
    ordered = np.sort(logprobs, axis=1)
    pool_scores = ordered[:, -1] - ordered[:, -2]
    names = [f"c{i}" for i in range(logprobs.shape[1])]
    generator, draws, broken = np.random.default_rng(SEED), 60, {"joint": 0, "one threshold": 0}
    for _ in range(draws):
        z, y = LANGUAGE_MODEL.draw_logprobs(generator, 2000)
        predicted, wrong = z.argmax(axis=1), z.argmax(axis=1) != y
        top = np.sort(z, axis=1)
        scores = top[:, -1] - top[:, -2]
        joint = certify_categories(predicted, scores, wrong, names, alpha=0.05, delta=0.05, joint=True)
        lambdas = {"joint": np.full(len(names), np.inf), "one threshold": np.zeros(len(names))}
        for certificate in joint:
            for member in certificate.members:
                if certificate.basis == "own":
                    lambdas["joint"][names.index(member)] = certificate.lambda_
        lambdas["one threshold"] += certify(scores, wrong, alpha=0.05, delta=0.05).lambda_
        for way, lambda_ in lambdas.items():
            routed = pool_scores > lambda_[pool_predicted]
            risks = [
                pool_wrong[routed & (pool_predicted == k)].mean()
                for k in range(len(names))
                if (routed & (pool_predicted == k)).any()
            ]
            broken[way] += max(risks, default=0.0) > 0.05
    assert broken["joint"] / draws <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / draws)
    assert broken["one threshold"] / draws > 0.7


def test_margin_gate_lets_through_at_most_phi_flips() -> None:
    """Flips thin out with the margin; the gate's flip rate beyond it is known exactly."""
    generator, draws, broken, opened = np.random.default_rng(SEED), 600, 0, 0
    for _ in range(draws):
        margins = generator.random(1000)
        gate = margin_gate(margins, generator.random(1000) < 0.05 * (1 - margins) ** 2)
        beyond = 0.05 * (1 - gate.m_star) ** 2 / 3 if gate.m_star < 1 else 0.0
        broken += beyond > 0.01
        opened += gate.m_star < 1
    assert broken / draws <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / draws)
    assert opened > draws / 2
