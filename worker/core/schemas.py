"""Schemas: the JSON Schema of every message that is ours, made from the models that write and read them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from worker.core.answer_events import answer_json_schema
from worker.core.cards import card_json_schema
from worker.core.envelope import (
    ATTEMPT,
    DEAD_LETTER_DETAIL,
    DEAD_LETTER_REASON,
    DEAD_LETTER_REASONS,
    ORIGIN_OFFSET,
    ORIGIN_PARTITION,
    ORIGIN_TOPIC,
    POINTER,
    envelope_json_schema,
)

SchemaName = Literal["decision", "card", "answer", "dead_letter"]
Digits = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,19}$")]


class DeadLetterHeaders(BaseModel):
    """The headers of ours on a dead letter, as text; its key and value are those of the message that came in."""

    model_config = ConfigDict(title="Dead letter headers", extra="allow")

    reason: str = Field(alias=DEAD_LETTER_REASON, json_schema_extra={"enum": list(DEAD_LETTER_REASONS)})
    detail: str = Field(alias=DEAD_LETTER_DETAIL, max_length=500)
    topic: str = Field(alias=ORIGIN_TOPIC)
    partition: Digits = Field(alias=ORIGIN_PARTITION)
    offset: Digits = Field(alias=ORIGIN_OFFSET)
    attempt: Digits = Field(alias=ATTEMPT)
    pointer: Literal["value"] | None = Field(
        None, alias=POINTER, description="the original did not fit, and lies at its origin only"
    )


def dead_letter_json_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of a dead letter's headers, as one object."""
    schema = DeadLetterHeaders.model_json_schema(by_alias=True)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


SCHEMAS: Mapping[SchemaName, Callable[[], dict[str, Any]]] = {
    "decision": envelope_json_schema,
    "card": card_json_schema,
    "answer": answer_json_schema,
    "dead_letter": dead_letter_json_schema,
}
