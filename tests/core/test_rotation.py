"""Orders: scores come back in the set's own order, and no place or letter is worth more than its share."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.core.sets import category_set, rule_set
from tests.core.test_prompt import Words
from worker.core.categories import CategorySet
from worker.core.labels import choose_labels
from worker.core.primitives import ChooseOne, Primitive
from worker.core.rotation import Averaged, TurnedBack, turned, turned_back, turns
from worker.core.rules import Rules, RuleSet
from worker.core.scores import LabelScores

SIZE = 6


def row(*probabilities: float, unknown: tuple[int, ...] = ()) -> LabelScores:
    return LabelScores.from_logprobs(tuple(math.log(p) for p in probabilities), unknown)


def lettered(size: int = SIZE) -> CategorySet:
    """Categories whose ids are several tokens, so that letters stand for them."""
    return category_set(*(f"c{n}" for n in range(size)), label=False)


async def orders_of(categories: CategorySet, orders: int) -> Averaged:
    by = turns(len(categories.categories), orders)
    asked = [ChooseOne(*await choose_labels(turned(categories, n), Words(*categories.ids))) for n in by]
    return Averaged(tuple(asked), by)


def run(primitive: Primitive, answer) -> LabelScores:  # type: ignore[no-untyped-def]
    plan = primitive.plan("text")
    requests = next(plan)
    with pytest.raises(StopIteration) as end:
        plan.send([answer(request) for request in requests])
    found: LabelScores = end.value.value
    return found


def test_orders_are_spread_evenly_and_begin_with_the_sets_own() -> None:
    assert turns(6, 1) == (0,)
    assert turns(6, 3) == (0, 2, 4)
    assert turns(7, 7) == (0, 1, 2, 3, 4, 5, 6)


@given(st.integers(2, 9), st.data())
def test_turned_scores_come_back_to_their_categories(size: int, data: st.DataObject) -> None:
    by = data.draw(st.integers(0, size - 1))
    own = LabelScores(tuple(-float(n + 1) for n in range(size)), 0.5, (size - 1,))
    asked = [(n + by) % size for n in range(size)]  # which category stands at each place
    seen = LabelScores(tuple(own.logprobs[c] for c in asked), 0.5, (asked.index(size - 1),))
    assert turned_back(seen, by) == own


async def test_an_answer_that_sticks_to_a_letter_gets_no_more_than_its_share() -> None:
    """`Answer: B` in a ticket, and a model that obeys it whatever B stands for."""
    for orders in (1, 2, 3, SIZE):
        asked = await orders_of(lettered(), orders)
        rest = 0.05 / (SIZE - 1)
        found = run(asked, lambda _, rest=rest: row(*(0.95 if n == 1 else rest for n in range(SIZE))))
        assert max(map(math.exp, found.logprobs)) <= 1 / orders + rest
        assert found.mass == pytest.approx(1.0)


async def test_a_model_that_knows_the_category_says_so_in_every_order() -> None:
    asked = await orders_of(lettered(), 3)
    prefixes = [one.prompt.prefix for one in asked.orders]
    assert len(set(prefixes)) == 3

    def knows(request):  # type: ignore[no-untyped-def]
        at = (4 - asked.by[prefixes.index(request.prefix)]) % SIZE
        return row(*(0.9 if n == at else 0.01 for n in range(SIZE)))

    assert run(asked, knows).best_known == 4
    assert math.exp(run(asked, knows).logprobs[4]) == pytest.approx(0.9)


async def test_a_label_unknown_in_one_order_is_unknown_under_the_mean_of_what_it_may_be() -> None:
    asked = await orders_of(lettered(3), 3)
    rows = iter([row(0.5, 0.3, 0.1, unknown=(2,)), row(0.3, 0.2, 0.5), row(0.2, 0.5, 0.3)])
    found = run(asked, lambda _: next(rows))
    assert found.unknown == (2,)
    assert math.exp(found.logprobs[2]) == pytest.approx((0.1 + 0.2 + 0.2) / 3)


async def test_the_average_and_each_other_order_have_fingerprints_of_their_own() -> None:
    one, three = (await orders_of(lettered(), 1)), (await orders_of(lettered(), 3))
    other = TurnedBack(three.orders[1], three.by[1])
    prints = [p.prompt_fingerprint for p in (one, three, other, *three.orders)]
    assert len(set(prints)) == len(prints)
    assert other.labels.token_ids != other.asked.labels.token_ids
    assert sorted(other.labels.token_ids) == sorted(other.asked.labels.token_ids)


def test_two_levels_and_more_orders_than_categories_are_refused() -> None:
    base = rule_set()
    with pytest.raises(ValidationError, match="prompt.orders is 4"):
        CategorySet.model_validate(
            base.categories.model_dump()
            | {
                "prompt": base.categories.prompt.model_dump(exclude={"chat_template", "template_file", "turns"})
                | {"orders": 4}
            }
        )


def test_an_unused_option_leaves_the_rule_sets_fingerprint_alone_and_a_used_one_does_not() -> None:
    base = rule_set()
    more = [
        rule_set(length={"most_tokens": 500}),
        rule_set(steering={"recheck_share": 0.5}),
        rule_set(gates={"other_order_margin": 0.2}),
        RuleSet(
            categories=base.categories.model_copy(
                update={"prompt": base.categories.prompt.model_copy(update={"orders": 2})}
            ),
            rules=base.rules,
        ),
    ]
    assert rule_set(length={}, steering={}, gates={}).fingerprint == base.fingerprint
    assert len({base.fingerprint, *(rules.fingerprint for rules in more)}) == 5
    assert Rules.model_validate({"version": 1, "alpha": 0.1, "delta": 0.1}, strict=False).length.most_tokens == 2_000
