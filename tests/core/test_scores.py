"""Label scores and score requests: what no softmax can give, and what no engine can be asked, is refused."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.core.scores import MASS_TOLERANCE, LabelScores, Piece, ScoreRequest, check_batch
from worker.errors import RequestRefused

ODD = (0, -1, 800.0, 1e-3, -1e308, math.inf, -math.inf)
VALUES = st.one_of(st.floats(), st.floats(-8, 0.002), st.sampled_from(ODD))


@given(st.lists(VALUES, min_size=1, max_size=6).map(tuple))
def test_only_what_a_softmax_can_give_is_taken(logprobs: tuple[float, ...]) -> None:
    """None of them above 0 and all together not above 1, but for rounding."""
    possible = all(math.isfinite(value) and value <= MASS_TOLERANCE for value in logprobs)
    mass = math.fsum(map(math.exp, logprobs)) if possible else math.nan
    if possible and mass <= 1 + MASS_TOLERANCE:
        assert LabelScores.from_logprobs(logprobs) == LabelScores(logprobs, min(1.0, mass))
    else:
        with pytest.raises(ValueError, match=r"not finite|label mass"):
            LabelScores.from_logprobs(logprobs)


@pytest.mark.parametrize("bound", [800.0, 0.5, math.inf, math.nan])
def test_the_bound_of_an_unknown_label_is_looked_at_too(bound: float) -> None:
    with pytest.raises(ValueError, match="not finite"):
        LabelScores.from_logprobs((-0.5, bound), unknown=(1,))


@pytest.mark.parametrize(
    ("prefix", "items", "why"),
    [
        ("p", ("a", (1,)), "both be text"),
        ((1,), ((2,), "a"), "both be text"),
        ("", ("a", ""), "empty prompt"),
        ((), ((1,), ()), "empty prompt"),
        ((1,), ((2,), (-1,)), "non-negative integers"),
        ((1, True), ((2,), (3,)), "non-negative integers"),
    ],
)
def test_a_prompt_that_no_engine_takes_is_refused_wherever_it_stands(
    prefix: Piece, items: tuple[Piece, ...], why: str
) -> None:
    with pytest.raises(RequestRefused, match=why):
        check_batch([ScoreRequest(prefix, item, (1, 2)) for item in items])


@pytest.mark.parametrize("prefix", ["", "p", (), (1,)])
def test_either_part_of_a_prompt_may_be_empty(prefix: Piece) -> None:
    items: tuple[Piece, ...] = ("a", "b") if isinstance(prefix, str) else ((1,), (2,))
    check_batch([ScoreRequest(prefix, item, (1, 2)) for item in (*items, *((prefix[:0],) if prefix else ()))])


@pytest.mark.parametrize(
    "other", [ScoreRequest("q", "b", (1, 2)), ScoreRequest("p", "b", (1, 3)), ScoreRequest("p", "b", (1,))]
)
def test_requests_of_one_call_share_prefix_and_labels(other: ScoreRequest) -> None:
    with pytest.raises(RequestRefused, match="share"):
        check_batch([ScoreRequest("p", "a", (1, 2)), other])
