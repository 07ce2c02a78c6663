"""Answer events: how what a person decided about a ticket comes back, and what is refused of it."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from worker.core.categories import NONE_ID, CategoryId
from worker.core.rules import RuleSet
from worker.core.ticket import decode_object
from worker.errors import InvalidTicket

ANSWER_SCHEMA: Literal["ticket-router/answer/1"] = "ticket-router/answer/1"
LARGEST = 100_000
"""Bytes of one event."""
EITHER = ("category", "not_a_ticket", "duplicate_of")
"""One of them says what the person found."""
Opaque = Annotated[str, StringConstraints(min_length=1, max_length=256)]
TicketId = Annotated[str, StringConstraints(min_length=1, max_length=1_000)]


class AnsweredOrigin(BaseModel):
    """Where the ticket came in, as its card says."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    topic: str
    partition: int
    offset: int


class AnswerEvent(BaseModel):
    """One answer of one person. Fields of others are let pass."""

    model_config = ConfigDict(
        extra="ignore",
        frozen=True,
        strict=True,
        title="Answer event",
        json_schema_extra={
            "oneOf": [{"required": [name], "properties": {name: {"not": {"type": "null"}}}} for name in EITHER]
        },
    )

    schema_: Literal["ticket-router/answer/1"] = Field(alias="schema", description="copied from the card")
    decision_id: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")] = Field(
        description="copied from the card: which decision this answers"
    )
    ticket_id: TicketId | None = Field(None, description="copied from the card; compared with the decision's")
    origin: AnsweredOrigin | None = Field(None, description="copied from the card; compared with the decision's")
    answered_at: AwareDatetime = Field(description="RFC 3339 with an offset; of two answers the later one holds")
    by: Opaque | None = Field(None, description="who, as an opaque id: no name is needed")
    category: CategoryId | None = Field(None, description="id of one of the rule set's categories, or `none`")
    not_a_ticket: Literal[True] | None = Field(None, description="spam, a test, an automatic reply")
    duplicate_of: TicketId | None = Field(None, description="id of the ticket that says the same")
    note: Annotated[str, StringConstraints(max_length=10_000)] | None = Field(None, description="read by nobody here")

    @model_validator(mode="after")
    def _one_finding(self) -> Self:
        given = [name for name in EITHER if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"state one of {', '.join(EITHER)}, not {' and '.join(given) or 'none of them'}")
        return self

    @property
    def label(self) -> str | None:
        """What the ticket is labelled by it; None for one that only repeats another. To route what is no ticket would
        be an error, so it counts as one of no category.
        """
        return NONE_ID if self.not_a_ticket else self.category


def parse_answer(value: bytes, rule_set: RuleSet) -> AnswerEvent:
    """The event in these bytes. Raises ValueError, which says what is wrong with them."""
    try:
        decode_object(value, LARGEST)
        event = AnswerEvent.model_validate_json(value)
    except InvalidTicket as error:
        raise ValueError(f"{error.code}: {error.detail}") from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise ValueError(f"{where}: {message}" if where else message) from error
    if event.category is not None and event.category not in {*rule_set.categories.ids, NONE_ID}:
        raise ValueError(f"category: '{event.category}' is no category of '{rule_set.id}'")
    return event


def answer_json_schema(rule_set: RuleSet | None = None) -> dict[str, Any]:
    """JSON Schema (2020-12) of the event; with a rule set, `category` is one of its ids or `none`."""
    schema = AnswerEvent.model_json_schema(by_alias=True)
    if rule_set is not None:
        ids = list(dict.fromkeys((*rule_set.categories.ids, NONE_ID)))
        schema["properties"]["category"] = {
            **schema["properties"]["category"], "anyOf": [{"enum": ids}, {"type": "null"}],
        }  # fmt: skip
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
