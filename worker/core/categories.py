"""A category set: the destinations that are asked about together, and how the question about them is put."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from worker.core.digest import fingerprint

NONE_ID = "none"
"""Reserved category id: tickets that belong to no category. It has no topic; predicting it escalates."""

Identifier = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]{0,62}$")]
TopicName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,249}$")]
Line = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=2000)]
LabelWord = Annotated[str, StringConstraints(pattern=r"^[^\s<>|\[\]]{1,40}$")]


class Strict(BaseModel):
    """What people write by hand: unknown keys are errors, values are never coerced, nothing changes afterwards."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class PromptStyle(Strict):
    """How the question is put. Everything in it is static, so it costs the engine once."""

    style: Literal["base", "chat"] = Field(
        "base", description="base: examples as plain text, for a base model; chat: the model's chat template"
    )
    chat_template: Literal["chatml", "chatml_no_thinking"] = Field(
        "chatml",
        description="only for chat; chatml_no_thinking closes the think block of a thinking model before the answer",
    )
    instruction: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=8000)]
    ticket_heading: Line = "Ticket:"
    answer_cue: Line = "Category:"


class Category(Strict):
    """One destination meaning."""

    id: Identifier
    name: Line
    description: Line
    label: LabelWord | None = Field(None, description="single-token word; without it one is chosen, see core.labels")
    topic: TopicName | None = Field(None, description="default <set>.<category>")
    parent: Identifier | None = Field(
        None, description="a name that related categories share: those with few labels are certified together under it"
    )
    examples: tuple[Line, ...] = Field((), max_length=64, description="tickets shown in the prompt")


class CategorySet(Strict):
    """Categories asked about together, in label order."""

    id: Identifier
    version: int = Field(ge=1)
    language: Annotated[str, StringConstraints(pattern=r"^[a-z]{2,3}$")]
    prompt: PromptStyle
    categories: tuple[Category, ...] = Field(min_length=2, max_length=1000)

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        for what, values in (
            ("category id", [c.id for c in self.categories]),
            ("label", [c.label for c in self.categories if c.label is not None]),
        ):
            twice = [value for value, times in Counter(values).items() if times > 1]
            if twice:
                raise ValueError(f"{what} used twice: {', '.join(twice)}")
        if len(self.routable) < 1:
            raise ValueError("a category set needs a category that is not 'none'")
        for category in self.categories:
            if category.id == NONE_ID and category.topic is not None:
                raise ValueError("category 'none' has no topic: its tickets go to people")
        return self

    @property
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
        for category in self.routable:
            if category.id == category_id:
                return category.topic or f"{self.id}.{category.id}"
        raise KeyError(category_id)

    @property
    def fingerprint(self) -> str:
        """Digest of what a category *means*: ids, names and descriptions in order. The prompt has its own."""
        return fingerprint("category-set/1", self.id, *((c.id, c.name, c.description) for c in self.categories))
