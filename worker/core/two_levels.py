"""Two levels: the prompts that ask for a department and then for its category, and the labels of both.

In style base the examples show both answers, one under the other, and the second question follows the department's
name in the same text. In style chat the examples show departments, and the second question stands behind the ticket
with the department's categories listed. Prefix and ticket are the same for both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from worker.core.categories import NONE_ID, Category, CategorySet, TwoLevels
from worker.core.labels import Tokenize, allocate_words, check_labels, fit_to_tokenizer
from worker.core.primitives import ChooseOne, TwoLevel
from worker.core.prompt import Prompt, build_prompt
from worker.core.questions import put_behind
from worker.errors import EngineUnavailable, LabelError

T = TypeVar("T")

ABOVE = -1
"""The question for the department, where those inside the departments are numbered from 0."""


@dataclass(frozen=True, slots=True)
class Group:
    """One answer of the first level, as a category, and its categories with their places in the set."""

    department: Category
    categories: tuple[Category, ...]
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Wording:
    """The label words of both levels; `lettered` are the questions whose labels are letters or the like."""

    above: tuple[str, ...]
    inside: tuple[tuple[str, ...], ...]
    lettered: frozenset[int] = frozenset()

    def with_letters(self, question: int, letters: Sequence[str]) -> Wording:
        lettered = self.lettered | {question}
        if question == ABOVE:
            return Wording(tuple(letters), self.inside, lettered)
        inside = (*self.inside[:question], tuple(letters), *self.inside[question + 1 :])
        return Wording(self.above, inside, lettered)


def groups_of(categories: CategorySet, levels: TwoLevels) -> tuple[Group, ...]:
    """Departments in their order, `none` behind them."""
    rows = categories.categories
    found = []
    for d in levels.departments:
        places = tuple(i for i, c in enumerate(rows) if c.parent == d.id)
        examples = tuple(_in_turn([rows[i].examples for i in places]))
        # Constructed, because a department may show more examples than a single category.
        above = Category.model_construct(
            id=d.id, name=d.name, description=d.description, label=d.label, topic=None, parent=None, examples=examples
        )
        found.append(Group(above, tuple(rows[i] for i in places), places))
    return (*found, *(Group(c, (c,), (i,)) for i, c in enumerate(rows) if c.id == NONE_ID))


async def choose_two_level_labels(categories: CategorySet, levels: TwoLevels, tokenize: Tokenize) -> TwoLevel:
    """The question with its labels: words where they are distinct single tokens, letters and the like otherwise.

    Each question, the one for the department and that inside each, decides for itself as `choose_labels` does: letters
    only where none of its labels is stated. Every label is checked behind its own prompt. Raises LabelError,
    PromptError.
    """
    categories = await fit_to_tokenizer(categories, tokenize)
    groups = groups_of(categories, levels)
    wording = Wording(
        tuple(g.department.label or g.department.id for g in groups),
        tuple(tuple(c.label or c.id for c in g.categories) for g in groups),
    )
    primitive, failed = await _checked(categories, levels, groups, wording, tokenize)
    if primitive is not None:
        return primitive
    for question, error in failed.items():
        answers = [g.department for g in groups] if question == ABOVE else groups[question].categories
        if any(category.label for category in answers):
            raise error
        above, inside = two_level_prompts(categories, levels, groups, wording)
        prompt = above if question == ABOVE else inside[question]
        wording = wording.with_letters(question, await allocate_words(prompt, len(answers), tokenize))
    # The letters stand in the examples of the prefix, so every label is checked again.
    primitive, failed = await _checked(categories, levels, groups, wording, tokenize)
    if primitive is None:
        raise next(iter(failed.values()))
    return primitive


async def _checked(
    categories: CategorySet, levels: TwoLevels, groups: Sequence[Group], wording: Wording, tokenize: Tokenize
) -> tuple[TwoLevel | None, dict[int, LabelError]]:
    """The primitive, or what is wrong with which question's labels."""
    above, inside = two_level_prompts(categories, levels, groups, wording)
    asked: dict[int, ChooseOne] = {}
    failed: dict[int, LabelError] = {}
    for question, (prompt, words) in enumerate(
        [(above, wording.above), *zip(inside, wording.inside, strict=True)], ABOVE
    ):
        if len(words) < 2:
            continue
        where = "departments" if question == ABOVE else f"department '{groups[question].department.id}'"
        try:
            asked[question] = ChooseOne(prompt, await check_labels(prompt, words, tokenize))
        except EngineUnavailable as error:
            raise EngineUnavailable(f"{where}, {len(words)} labels: {error}", error.retry_after_s) from error
        except LabelError as error:
            failed[question] = LabelError(f"{where}: {error.problem}", error.offenders)
    if failed:
        return None, failed
    primitive = TwoLevel(
        departments=asked[ABOVE],
        inside=tuple(asked.get(number) for number in range(len(groups))),
        members=tuple(group.places for group in groups),
        ask_at_most=levels.ask_at_most,
    )
    return primitive, failed


def two_level_prompts(
    categories: CategorySet, levels: TwoLevels, groups: Sequence[Group], wording: Wording
) -> tuple[Prompt, tuple[Prompt, ...]]:
    """The prompt that asks for the department, and the one inside each department."""
    style = categories.prompt
    departments = tuple(group.department for group in groups)
    asked = categories.model_copy(
        update={"prompt": style.model_copy(update={"answer_cue": levels.cue}), "categories": departments}
    )
    if style.style == "chat":
        above = build_prompt(asked, wording.above, legend=False)
        return above, tuple(
            put_behind(
                above,
                levels.cue,
                [
                    f"{levels.cue} {group.department.name} ({word})",
                    *_legend(group.categories, words),
                    f"Answer with one of these words only: {', '.join(words)}.",
                ],
                style.answer_cue,
            )
            for group, word, words in zip(groups, wording.above, wording.inside, strict=True)
        )
    if ABOVE in wording.lettered:
        listed = "\n".join([style.instruction, *_legend(departments, wording.above)])
        asked = asked.model_copy(update={"prompt": asked.prompt.model_copy(update={"instruction": listed})})
    # Both answers of an example stand where build_prompt puts one, so its word is both of them.
    both = {
        place: word if len(group.places) == 1 else f"{word}\n{style.answer_cue} {inner}"
        for group, word, words in zip(groups, wording.above, wording.inside, strict=True)
        for place, inner in zip(group.places, words, strict=True)
    }
    # In rounds over the departments, so that none of them owns the end of the prompt.
    order = list(_in_turn([group.places for group in groups]))
    shown = asked.model_copy(update={"categories": tuple(categories.categories[place] for place in order)})
    above = build_prompt(shown, [both[place] for place in order], legend=False)
    inside = []
    for number, (group, word, words) in enumerate(zip(groups, wording.above, wording.inside, strict=True)):
        listed_here = number in wording.lettered or not all(category.examples for category in group.categories)
        legend = _legend(group.categories, words) if listed_here else ()
        lines = "".join(f"\n{line}" for line in (*legend, style.answer_cue))
        inside.append(replace(above, suffix=f"{above.suffix} {word}{lines}"))
    return above, tuple(inside)


def _legend(categories: Sequence[Category], words: Sequence[str]) -> list[str]:
    return [f"{word}: {c.name} ({c.description})" for word, c in zip(words, categories, strict=True)]


def _in_turn(rows: Sequence[Sequence[T]]) -> Iterator[T]:
    """In rounds over the rows."""
    for turn in range(max(map(len, rows), default=0)):
        yield from (row[turn] for row in rows if turn < len(row))
