"""The schedule follows from the seed, and holds every kind of fault."""

from __future__ import annotations

import pytest

from tests.chaos.__main__ import FULL, ONE_NODE, SHORT, Part
from tests.chaos.schedule import FIRST, HOLD_S, LAST, WORKERS, Fault, Kind, plan, together

SEEDS = range(200)
PARTS = [*FULL.parts, *SHORT.parts]


def faults(part: Part, seed: int) -> tuple[Fault, ...]:
    return plan(seed, part.nodes, part.faults, part.kinds)


@pytest.mark.parametrize("part", PARTS)
def test_the_same_seed_makes_the_same_faults_and_another_seed_others(part: Part) -> None:
    assert faults(part, 7) == faults(part, 7)
    assert len({faults(part, seed) for seed in SEEDS}) == len(SEEDS)


@pytest.mark.parametrize("part", PARTS)
def test_every_kind_happens_and_every_broker_is_killed(part: Part) -> None:
    for seed in SEEDS:
        planned = faults(part, seed)
        assert len(planned) == part.faults
        assert {fault.kind for fault in planned} == set(part.kinds)
        if Kind.BROKER_KILL in part.kinds:
            assert {fault.target for fault in planned if fault.kind is Kind.BROKER_KILL} == {1, 2, 3}


def test_a_short_run_has_every_kind_and_never_kills_the_only_broker() -> None:
    assert {kind for part in SHORT.parts for kind in part.kinds} == set(Kind)
    for length in (FULL, SHORT):
        assert all(set(part.kinds) <= set(ONE_NODE) for part in length.parts if part.nodes == 1)
    assert Kind.BROKER_KILL not in ONE_NODE


@pytest.mark.parametrize("part", PARTS)
def test_faults_are_in_order_have_targets_that_exist_and_at_most_two_strike_at_once(part: Part) -> None:
    for seed in SEEDS:
        planned = faults(part, seed)
        assert [fault.at for fault in planned] == sorted(fault.at for fault in planned)
        for fault in planned:
            low, high = HOLD_S[fault.kind]
            assert FIRST <= fault.at <= LAST
            assert low <= fault.hold_s <= high
            if fault.kind.family == "broker":
                assert 1 <= fault.target <= part.nodes
            else:
                assert 0 <= fault.target < WORKERS
        for group in together(planned):
            assert len(group) <= 2
            assert len({fault.kind.family for fault in group}) == len(group), "two faults of one thing at once"


def test_too_few_faults_for_the_kinds_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot hold"):
        plan(1, 3, 3, tuple(Kind))
