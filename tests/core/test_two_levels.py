"""Two levels: probabilities multiply, departments are asked about while they can matter, labels fit their prompts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.core.test_prompt import Words
from worker.core.categories import Category, CategorySet, PromptStyle, TwoLevels
from worker.core.labels import Labels
from worker.core.primitives import ChooseOne, TwoLevel
from worker.core.prompt import Prompt
from worker.core.scores import LabelScores, ScoreRequest
from worker.core.two_levels import choose_two_level_labels
from worker.errors import LabelError

SIZES = (3, 2, 1)
MEMBERS = ((0, 3, 4), (1, 5), (2,))
"""Places are mixed on purpose: departments need not stand together in label order."""


def primitive(sizes: Sequence[int] = SIZES, members: Sequence[Sequence[int]] = MEMBERS, most: int = 3) -> TwoLevel:
    above = ChooseOne(Prompt("p", ":"), Labels(tuple(f"d{n}" for n in range(len(sizes))), tuple(range(len(sizes)))))
    inside = tuple(
        ChooseOne(
            Prompt("p", f": d{n} >"), Labels(tuple(f"c{i}" for i in range(size)), tuple(range(100 * n, 100 * n + size)))
        )
        if size > 1
        else None
        for n, size in enumerate(sizes, 1)
    )
    return TwoLevel(above, inside, tuple(tuple(m) for m in members), most)


def row(*probabilities: float, unknown: tuple[int, ...] = ()) -> LabelScores:
    return LabelScores.from_logprobs(tuple(math.log(p) for p in probabilities), unknown)


def run(asked: TwoLevel, above: LabelScores, inside: Mapping[int, LabelScores]) -> tuple[LabelScores, list[int]]:
    """The scores, and which departments were asked about."""
    plan, seen = asked.plan("text"), []
    requests = next(plan)
    assert requests == (ScoreRequest("p", " text:", asked.departments.labels.token_ids),)
    answer = above
    while True:
        try:
            (request,) = plan.send([answer])
        except StopIteration as end:
            return end.value, seen
        department = next(n for n, q in enumerate(asked.inside) if q is not None and q.request("text") == request)
        seen.append(department)
        answer = inside[department]


def test_a_categorys_probability_is_its_departments_times_its_own() -> None:
    inside = {0: row(0.5, 0.3, 0.1), 1: row(0.8, 0.1)}
    found, seen = run(primitive(), row(0.5, 0.4, 0.05), inside)
    assert [math.exp(z) for z in found.logprobs] == pytest.approx([0.25, 0.32, 0.05, 0.15, 0.05, 0.04])
    assert found.mass == pytest.approx(0.25 + 0.32 + 0.05 + 0.15 + 0.05 + 0.04)
    assert seen == [0, 1]


def test_a_department_that_cannot_hold_the_best_category_is_not_asked_about() -> None:
    found, seen = run(primitive(), row(0.8, 0.1, 0.05), {0: row(0.5, 0.2, 0.2)})
    assert seen == [0]
    assert [math.exp(z) for z in found.logprobs] == pytest.approx([0.4, 0.05, 0.05, 0.16, 0.16, 0.05])


def test_the_only_category_of_a_department_is_never_asked_about() -> None:
    found, seen = run(primitive(), row(0.04, 0.05, 0.9), {})
    assert seen == []
    assert found.best_known == 2
    assert math.exp(found.logprobs[2]) == pytest.approx(0.9)


def test_no_more_departments_are_asked_about_than_stated() -> None:
    even = row(0.3, 0.29, 0.01)
    inside = {0: row(0.4, 0.3, 0.3), 1: row(0.5, 0.5)}
    assert run(primitive(most=1), even, inside)[1] == [0]
    assert run(primitive(most=2), even, inside)[1] == [0, 1]


shares = st.lists(st.floats(0.01, 1.0), min_size=2, max_size=5)


def normalised(weights: Sequence[float]) -> LabelScores:
    return row(*(w / sum(weights) for w in weights))


@given(above=shares, data=st.data())
def test_where_the_plan_stops_by_itself_asking_everybody_would_name_the_same_category(
    above: list[float], data: st.DataObject
) -> None:
    sizes = [data.draw(st.integers(1, 4)) for _ in above]
    places = iter(range(sum(sizes)))
    asked = primitive(sizes, [[next(places) for _ in range(size)] for size in sizes], most=20)
    inside = {
        n: normalised(data.draw(st.lists(st.floats(0.01, 1.0), min_size=size, max_size=size)))
        for n, size in enumerate(sizes)
        if size > 1
    }
    departments = normalised(above)
    found, _ = run(asked, departments, inside)
    whole = [
        departments.logprobs[n] + (inside[n].logprobs[i] if size > 1 else 0.0)
        for n, size in enumerate(sizes)
        for i in range(size)
    ]
    assert whole[found.best_known] == pytest.approx(max(whole))
    assert found.mass <= 1.0


def test_what_the_engine_did_not_return_stays_unknown_under_the_product_of_the_bounds() -> None:
    inside = {0: row(0.5, 0.3, 0.1, unknown=(2,)), 1: row(0.8, 0.1)}
    found, seen = run(primitive(), row(0.5, 0.4, 0.02, unknown=(2,)), inside)
    assert seen == [0, 1]
    assert found.unknown == (2, 4)
    assert found.bound == pytest.approx(math.log(0.05))
    assert found.returned[0] == pytest.approx(math.log(0.25))
    assert found.mass == pytest.approx(0.25 + 0.15 + 0.32 + 0.04)


def test_rounding_of_both_levels_gives_no_probability_above_1() -> None:
    above, inside = LabelScores((0.0009, -9.0, -9.0), 1.0), {0: LabelScores((0.0009, -9.0, -9.0), 1.0)}
    found, _ = run(primitive(), above, inside)
    assert found.logprobs[0] == 0.0
    assert found.mass == 1.0


def test_what_puts_the_answers_together_is_part_of_the_prompts_fingerprint() -> None:
    prints = {
        primitive().prompt_fingerprint,
        primitive(most=2).prompt_fingerprint,
        primitive(members=((0, 3, 5), (1, 4), (2,))).prompt_fingerprint,
    }
    assert len(prints) == 3


def test_labels_and_token_ids_cover_every_category_in_its_place() -> None:
    assert primitive().labels == Labels(("c0", "c0", "d2", "c1", "c2", "c1"), (100, 200, 2, 101, 102, 201))
    assert primitive().token_ids == (0, 1, 2, 100, 101, 102, 200, 201)


# -- prompts and labels ------------------------------------------------------------------------------------------------


def city(style: str = "base", label: bool = True, examples: bool = True, **changes: object) -> CategorySet:
    def leaf(name: str, parent: str | None, word: str | None) -> Category:
        shown = (f"about {name}",) if examples else ()
        return Category(
            id=name,
            name=name.title(),
            description=f"all {name}",
            label=word if label else None,
            parent=parent,
            examples=shown,
        )

    levels = {
        "cue": "Office:",
        "departments": [
            {"id": "roads", "name": "Roads", "description": "roads", "label": "road" if label else None},
            {"id": "water", "name": "Water", "description": "pipes"},
        ],
    }
    values: dict[str, object] = {
        "id": "city",
        "version": 1,
        "language": "en",
        "prompt": PromptStyle(instruction="Sort.", style=style, answer_cue="Matter:"),  # type: ignore[arg-type]
        "categories": (
            leaf("holes", "roads", "hole"),
            leaf("signs", "roads", "sign"),
            leaf("leaks", "water", "leak"),
            leaf("bills", "water", "sign"),
            leaf("none", None, "other"),
        ),
        "two_levels": TwoLevels.model_validate(levels, strict=False),
    }
    return CategorySet(**{**values, **changes})  # type: ignore[arg-type]


async def chosen(categories: CategorySet, tokenize: Words | None = None) -> TwoLevel:
    assert categories.two_levels is not None
    return await choose_two_level_labels(categories, categories.two_levels, tokenize or Words())


async def test_a_base_prompt_shows_both_answers_in_rounds_over_the_departments() -> None:
    found = await chosen(city())
    assert found.prompt.prefix == (
        "Sort.\n\n"
        "Ticket: about holes\nOffice: road\nMatter: hole\n\n"
        "Ticket: about leaks\nOffice: water\nMatter: leak\n\n"
        "Ticket: about none\nOffice: other\n\n"
        "Ticket: about signs\nOffice: road\nMatter: sign\n\n"
        "Ticket: about bills\nOffice: water\nMatter: sign\n\n"
        "Ticket:"
    )
    assert found.request("x").item == " x\nOffice:"
    assert [None if q is None else q.request("x").item for q in found.inside] == [
        " x\nOffice: road\nMatter:",
        " x\nOffice: water\nMatter:",
        None,
    ]
    assert {q.prompt.prefix for q in found.inside if q} == {found.prompt.prefix}
    assert found.labels.words == ("hole", "sign", "leak", "sign", "other")


async def test_a_category_without_examples_is_listed_where_its_department_is_asked_about() -> None:
    found = await chosen(city(examples=False))
    assert found.inside[0] is not None
    assert found.inside[0].prompt.suffix == (
        "\nOffice: road\nhole: Holes (all holes)\nsign: Signs (all signs)\nMatter:"
    )


async def test_letters_stand_in_for_one_question_only_and_in_the_examples_too() -> None:
    found = await chosen(city(label=False), Words("leaks"))
    assert found.labels.words == ("holes", "signs", "A", "B", "none")
    assert "Office: water\nMatter: A\n" in found.prompt.prefix
    assert "Office: roads\nMatter: holes\n" in found.prompt.prefix
    assert found.inside[1] is not None
    assert "\nA: Leaks (all leaks)\nB: Bills (all bills)\nMatter:" in found.inside[1].prompt.suffix


async def test_letters_for_departments_come_with_a_legend() -> None:
    found = await chosen(city(label=False), Words("water"))
    assert found.departments.labels.words == ("A", "B", "C")
    assert found.prompt.prefix.startswith("Sort.\nA: Roads (roads)\nB: Water (pipes)\nC: None (all none)\n\n")
    assert "Ticket: about leaks\nOffice: B\nMatter: leaks\n" in found.prompt.prefix


async def test_stated_words_that_are_no_single_tokens_are_refused_by_their_departments_name() -> None:
    with pytest.raises(LabelError, match=r"department 'water': not a single token.*leak \(2 tokens\)"):
        await chosen(city(), Words("leak"))
    with pytest.raises(LabelError, match=r"departments: not a single token.*road \(2 tokens\)"):
        await chosen(city(), Words("road"))


async def test_a_thousand_categories_in_forty_departments_have_labels_of_their_own() -> None:
    departments = [{"id": f"d{n}", "name": f"D{n}", "description": "d"} for n in range(40)]
    leaves = tuple(
        Category(id=f"c{n}", name=f"C{n}", description="c", parent=f"d{n % 40}", examples=("x",)) for n in range(1000)
    )
    levels = TwoLevels.model_validate({"departments": departments}, strict=False)
    found = await chosen(city(categories=leaves, two_levels=levels))
    assert len(found.labels.words) == 1000
    assert {len(q.labels.token_ids) for q in found.inside if q} == {25}


@pytest.mark.parametrize(
    ("update", "message"),
    [
        ({"parent": None}, "its parent must be a department"),
        ({"parent": "parks"}, "its parent must be a department"),
        ({"label": "sign"}, "label used twice: sign"),
        ({"parent": "water"}, "departments without categories: roads"),
    ],
)
def test_categories_that_fit_no_department_are_refused(update: dict[str, object], message: str) -> None:
    rows = city().categories
    first = rows[0].model_copy(update=update)
    second = (
        rows[1]
        if "parent" not in update or update["parent"] != "water"
        else rows[1].model_copy(update={"parent": "water", "label": "third"})
    )
    with pytest.raises(ValidationError, match=message):
        city(categories=(first, second, *rows[2:]))


def test_the_same_label_may_serve_two_departments_but_not_a_department_and_none() -> None:
    rows = city().categories
    with pytest.raises(ValidationError, match="label used twice: road"):
        city(categories=(*rows[:-1], rows[-1].model_copy(update={"label": "road"})))


def test_departments_are_part_of_what_a_set_means() -> None:
    base = city()
    moved = base.categories[1].model_copy(update={"parent": "water", "label": "third"})
    assert city(categories=(base.categories[0], moved, *base.categories[2:])).fingerprint != base.fingerprint
