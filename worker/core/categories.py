"""A category set: the destinations that are asked about together, and how the question about them is put."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from worker.core.canonicalisers import VERSIONS, Canonicaliser
from worker.core.digest import fingerprint
from worker.core.misplaced import Misplaced, Place, refuse_twice, same_when_read
from worker.core.topics import TopicName
from worker.core.turns import TEMPLATES, ChatTemplate, Turns
from worker.errors import PromptError

NONE_ID = "none"
"""Reserved category id: tickets that belong to no category. It has no topic; predicting it escalates."""

IDENTIFIER, CATEGORY_ID = r"^[a-z][a-z0-9_]{0,62}$", r"^[a-z0-9][a-z0-9_]{0,62}$"
LABEL_WORD, LANGUAGE = r"^[^\s<>|\[\]]{1,40}$", r"^[a-z]{2,3}$"
PATTERNS_IN_WORDS: Mapping[str, str] = {
    IDENTIFIER: "write it with small letters, digits and _, beginning with a letter and at most 63 long, such as "
    "papers_office",
    CATEGORY_ID: "write it with small letters, digits and _, at most 63 long, such as papers_office",
    LABEL_WORD: "write one word without spaces and without < > | [ ], at most 40 characters long, such as papers",
    LANGUAGE: "write the language's code of two or three small letters, such as en or ko",
}
"""What a value has to be that fails such a pattern, for people who write rule sets."""

Identifier = Annotated[str, StringConstraints(pattern=IDENTIFIER)]
CategoryId = Annotated[str, StringConstraints(pattern=CATEGORY_ID)]
"""May begin with a digit: the answers of a score question are `1` to `n`."""
Line = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=2000)]
LabelWord = Annotated[str, StringConstraints(pattern=LABEL_WORD)]


class Strict(BaseModel):
    """What people write by hand: unknown keys are errors, values are never coerced, nothing changes afterwards."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, ignored_types=(cached_property,))

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """What was computed once of the original is computed anew of a copy, whose fields may differ."""
        copied = super().model_copy(update=update, deep=deep)
        for name in copied.__dict__.keys() - type(copied).model_fields.keys():
            del copied.__dict__[name]
        return copied


class PromptStyle(Strict):
    """How the question is put. Everything in it is static, so it costs the engine once."""

    style: Literal["base", "chat"] = Field(
        "base", description="base: examples as plain text, for a base model; chat: the model's chat template"
    )
    chat_template: ChatTemplate = Field(
        "chatml", description="only for chat: the model's family; the think block of a thinking model is closed"
    )
    template_file: Annotated[str, StringConstraints(min_length=1, max_length=1000)] | None = Field(
        None,
        description="only for chat: the model's tokenizer_config.json or Jinja template, beside categories.yaml or "
        "with its whole path; in place of chat_template",
    )
    turns: Turns | None = Field(
        None, description="only for chat: the texts around messages, as `ticket-router prompt turns` prints them"
    )
    instruction: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=8000)]
    ticket_heading: Line = "Ticket:"
    answer_cue: Line = "Category:"
    ticket_tokens: int = Field(
        256, ge=16, le=100_000, description="room that the model's context must leave for a ticket, in tokens"
    )
    orders: int = Field(
        1, ge=1, le=26, description="asked with the categories in so many orders; the scores are their average"
    )
    canonicalise: tuple[Canonicaliser, ...] = Field(
        (), max_length=len(VERSIONS), description="what is left out of a ticket before it is scored and remembered"
    )

    @model_validator(mode="after")
    def _one_template(self) -> Self:
        given = [name for name in ("chat_template", "template_file", "turns") if name in self.model_fields_set]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} say the same thing: keep one")
        if given and self.style != "chat":
            raise ValueError(f"{given[0]} is for style: chat")
        return self

    @property
    def chat_turns(self) -> Turns:
        """What stands around messages in style chat. Raises PromptError until template_file is read into `turns`."""
        if self.template_file is not None and self.turns is None:
            raise PromptError(f"{self.template_file}: this chat template was not read")
        return self.turns or TEMPLATES[self.chat_template]


class Category(Strict):
    """One destination meaning."""

    id: CategoryId
    name: Line
    description: Line
    label: LabelWord | None = Field(None, description="single-token word; without it one is chosen, see core.labels")
    topic: TopicName | None = Field(None, description="default <set>.<category>")
    parent: Identifier | None = Field(
        None, description="a name that related categories share: those with few labels are certified together under it"
    )
    examples: tuple[Line, ...] = Field((), max_length=64, description="tickets shown in the prompt")


class Department(Strict):
    """One answer of the first level: the `parent` of its categories."""

    id: Identifier
    name: Line
    description: Line
    label: LabelWord | None = Field(None, description="single-token word; without it one is chosen, see core.labels")


class TwoLevels(Strict):
    """First the department, then the category among those of the most probable departments."""

    cue: Line = Field("Department:", description="what the department follows; `answer_cue` asks for the category")
    ask_at_most: int = Field(3, ge=1, le=20, description="departments whose categories are asked about, for one ticket")
    departments: tuple[Department, ...] = Field(min_length=1, max_length=200)

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(d.id for d in self.departments)


class CategorySet(Strict):
    """Categories asked about together, in label order."""

    id: Identifier
    version: int = Field(ge=1)
    language: Annotated[str, StringConstraints(pattern=LANGUAGE)]
    prompt: PromptStyle
    categories: tuple[Category, ...] = Field(min_length=2, max_length=1000)
    two_levels: TwoLevels | None = Field(None, description="ask for the category's `parent` first, then for it")

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        rows = self.categories
        refuse_twice("category id", [(c.id, ("categories", n, "id")) for n, c in enumerate(rows)])
        self._check_two_levels()
        for asked in self._asked_together():
            refuse_twice("department id", [(answer.id, (*place, "id")) for answer, place in asked])
            refuse_twice("label", [(a.label, (*place, "label")) for a, place in asked if a.label is not None])
        if self.prompt.orders > 1 and self.two_levels is not None:
            raise Misplaced(
                "prompt.orders is for categories that are asked about together, not for two levels", "prompt", "orders"
            )
        if self.prompt.orders > len(rows):
            raise Misplaced(
                f"prompt.orders is {self.prompt.orders}, and {len(rows)} categories have fewer", "prompt", "orders"
            )
        if len(self.routable) < 1:
            raise ValueError("a category set needs a category that is not 'none'")
        for number, category in enumerate(rows):
            if category.id == NONE_ID and category.topic is not None:
                raise Misplaced("category 'none' has no topic: its tickets go to people", "categories", number, "topic")
        return self

    def _asked_together(self) -> list[list[tuple[Category | Department, Place]]]:
        """The answers of each question with their places in the set: all categories, or in two levels the departments
        (and `none`) and each department's own. Their ids, labels and names must differ.
        """
        placed: list[tuple[Category | Department, Place]] = [
            (c, ("categories", n)) for n, c in enumerate(self.categories)
        ]
        if self.two_levels is None:
            return [placed]
        departments = self.two_levels.departments
        asked: list[list[tuple[Category | Department, Place]]] = [
            [(d, ("two_levels", "departments", n)) for n, d in enumerate(departments)]
        ]
        asked[0] += [each for each in placed if each[0].id == NONE_ID]
        for d in departments:
            asked.append([placed[n] for n, c in enumerate(self.categories) if c.parent == d.id])
        return asked

    def check_names(self) -> None:
        """Raises Misplaced where two answers of one question have names that a reader takes for one.

        For what people write by hand; a typed question brings along the options that its client has.
        """
        for asked in self._asked_together():
            refuse_twice("name", [(answer.name, (*place, "name")) for answer, place in asked], same_when_read)

    def _check_two_levels(self) -> None:
        """Raises ValueError where the parents are not what two levels need."""
        if self.two_levels is None:
            return
        departments = self.two_levels.ids
        for number, category in enumerate(self.categories):
            place = ("categories", number, "parent")
            if category.id == NONE_ID and category.parent is not None:
                raise Misplaced("category 'none' stands beside the departments, so it has no parent", *place)
            if category.id != NONE_ID and category.parent not in departments:
                raise Misplaced(
                    f"category '{category.id}': in two levels its parent must be a department "
                    f"({', '.join(departments)}), not {category.parent}",
                    *place,
                )
        for number, name in enumerate(departments):
            if all(c.parent != name for c in self.categories):
                raise Misplaced(f"departments without categories: {name}", "two_levels", "departments", number)
        if len(departments) + sum(c.id == NONE_ID for c in self.categories) < 2:
            raise Misplaced("two levels need two departments, or one and 'none'", "two_levels", "departments")

    @cached_property
    def ids(self) -> tuple[str, ...]:
        """Category ids in label order."""
        return tuple(c.id for c in self.categories)

    @property
    def parents(self) -> dict[str, str]:
        """Category id to the node of the taxonomy above it, for those that state one."""
        return {c.id: c.parent for c in self.categories if c.parent is not None}

    @property
    def routable(self) -> tuple[Category, ...]:
        """Every category that has a topic, that is all but `none`."""
        return tuple(c for c in self.categories if c.id != NONE_ID)

    def topic(self, category_id: str) -> str:
        """The topic of a routable category. Raises KeyError for `none` and for unknown ids."""
        return self._topics[category_id]

    def title(self, category_id: str) -> str:
        """The category's name. Raises KeyError for unknown ids."""
        return self._titles[category_id]

    @cached_property
    def _titles(self) -> Mapping[str, str]:
        return {c.id: c.name for c in self.categories}

    @cached_property
    def _topics(self) -> Mapping[str, str]:
        return {c.id: c.topic or f"{self.id}.{c.id}" for c in self.routable}

    @property
    def fingerprint(self) -> str:
        """Digest of what a category *means*: ids, names and descriptions in order. The prompt has its own."""
        means = [(c.id, c.name, c.description) for c in self.categories]
        if self.two_levels is None:
            return fingerprint("category-set/1", self.id, *means)
        above = [(d.id, d.name, d.description) for d in self.two_levels.departments]
        return fingerprint("category-set/2", self.id, *means, [c.parent or c.id for c in self.categories], *above)

    @property
    def first_cue(self) -> str:
        """What the first thing that is asked about a ticket follows."""
        return self.prompt.answer_cue if self.two_levels is None else self.two_levels.cue
