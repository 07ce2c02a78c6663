"""The messages we own: the decision envelope, the dead-letter headers, and the names of every header."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import field
from typing import Any, Literal

import orjson
from pydantic import TypeAdapter

from worker.core.certificates import ScoreForm
from worker.core.digest import FINGERPRINT_HEX, fingerprint, framed
from worker.core.modes import Mode
from worker.core.per_ticket import per_ticket

ENVELOPE_SCHEMA: Literal["ticket-router/decision/1"] = "ticket-router/decision/1"

RESERVED_PREFIX = "ticket-router-"
"""Headers under this prefix are ours: they are removed from what arrives, so that nobody can forge a decision."""
DECISION_HEADER = "ticket-router-decision"
CARD_HEADER = "ticket-router-card"
"""On people's topics only; see core.cards."""
DEAD_LETTER_REASON = "ticket-router-reason"
DEAD_LETTER_DETAIL = "ticket-router-detail"
ORIGIN_TOPIC = "ticket-router-origin-topic"
ORIGIN_PARTITION = "ticket-router-origin-partition"
ORIGIN_OFFSET = "ticket-router-origin-offset"
ATTEMPT = "ticket-router-attempt"
POINTER = "ticket-router-pointer"
"""Present (value `value`) where the original bytes did not fit and only their origin is given."""

DEAD_LETTER_REASONS: dict[str, str] = {
    "null_value": "The message has no value.",
    "invalid_utf8": "The bytes are not UTF-8.",
    "invalid_json": "The bytes are not JSON.",
    "too_deep": "The JSON is nested too deeply.",
    "duplicate_key": "A JSON object has the same key twice.",
    "not_an_object": "The JSON is not an object.",
    "lone_surrogate": "A string holds half of a surrogate pair.",
    "wrong_type": "A part of the ticket has the wrong type.",
    "no_text": "There is no text to read.",
    "too_large": "The message is larger than the worker accepts.",
    "undeliverable": "No output topic took the ticket.",
}
"""Every code under which a message is dead-lettered, with its sentence."""

Headers = tuple[tuple[str, bytes | None], ...]


@per_ticket
class Origin:
    """Where a ticket came in; its identity."""

    topic: str
    partition: int
    offset: int


@per_ticket
class Ranked:
    """One of the most probable categories."""

    category: str
    probability: float


@per_ticket
class Reason:
    """Why a decision is what it is: a code of `core.policy.REASONS` and a sentence for people."""

    code: str
    sentence: str
    values: dict[str, str] = field(default_factory=dict, compare=False)
    """What the sentence was filled in with, by name, so that it can be said in another language."""


@per_ticket
class Allowance:
    """The certificate that a score was compared with."""

    group: str
    threshold: float | None
    """The score had to be above it; None where any score was enough."""
    alpha: float
    delta: float
    procedure: Literal["rank", "frozen", "misroutes_per_ticket"]


@per_ticket
class Nearest:
    """How near a scored ticket came to being routed to `category`, under a calibration in force."""

    category: str
    gate: Literal["label_mass", "none_of_the_above", "stability", "certificate", "threshold"] | None
    """The first gate that stayed closed; None where all were open, and something else sent it to people."""
    value: float | None
    """What the ticket has at that gate."""
    needed: float | None
    """What it takes there; None where nothing would do."""
    score: float
    """What is compared with the threshold; the least possible one where labels were not returned."""
    form: ScoreForm
    certificate: Allowance | None
    """None: none is in force for the category, so no score would have routed the ticket."""


@per_ticket
class Would:
    """What auto would have done with a ticket that the mode held back: route it."""

    category: str
    topic: str
    probability: float | None
    """Calibrated probability that this is right; None where a rule said so."""
    reasons: tuple[Reason, ...]
    certificate: Allowance | None
    """None where a rule said so."""


@per_ticket
class Answer:
    """What one further question gave. It is recorded whether or not there is a calibration to go by."""

    question: str
    kind: Literal["yes_no", "score", "choose_one"]
    answer: str | None
    """The most probable answer; without a calibration the one with the highest raw score; None without scores."""
    probability: float | None
    """Calibrated probability of `answer`; None without a calibration in force."""
    distribution: dict[str, float] | None
    """Calibrated probability of every answer, in label order; None without a calibration in force."""
    expected: float | None
    """Of a score question: its mean under `distribution`."""
    problem: Reason | None
    """Why there is no answer to go by: rules then take it as unknown. None where `distribution` may be relied on."""
    label_mass: float | None
    labels: tuple[str, ...]
    """Answers in label order: the order of `label_scores`."""
    label_scores: tuple[float | None, ...] | None
    """None in it: the engine did not return that label."""
    calibration: str | None
    """Digest of the calibration in force for this question."""
    cached: bool = False


@per_ticket
class Timings:
    """Milliseconds. `score_ms` includes waiting for the batch; None where nothing was scored."""

    total_ms: float
    score_ms: float | None = None


@per_ticket
class Envelope:
    """One decision, as published. Probabilities are calibrated; label scores are natural log-probabilities."""

    schema: Literal["ticket-router/decision/1"]
    decision_id: str
    """Digest of origin, rule set and calibration: deduplicate by it."""
    ticket_id: str
    tenant: str | None
    origin: Origin
    decided_at: str
    """RFC 3339, UTC."""
    action: Literal["route", "escalate"]
    category: str | None
    """The category routed to, or the best guess where a person decides; None where nothing was scored."""
    topic: str
    probability: float | None
    """Calibrated probability that `category` is right; None without a calibration or scores."""
    top: tuple[Ranked, ...]
    margin: float | None
    """Calibrated probability of the first minus the second."""
    label_mass: float | None
    """Total probability of all labels as the next token, of the returned ones where some were not."""
    reasons: tuple[Reason, ...]
    rule_set: str
    calibration: str | None
    """Digest of the calibration artefact in force; None without one."""
    engine: str | None
    model: str | None
    cached: bool
    timings: Timings
    labels: tuple[str, ...]
    """Category ids in label order: the order of `label_scores`."""
    label_scores: tuple[float | None, ...] | None
    """None in it: the engine did not return that label."""
    label_scores_bound: float | None
    """What a label that was not returned has at most; None where all were returned."""
    answers: tuple[Answer, ...] = ()
    """What the rule set's further questions gave, in their order; empty where none was asked."""
    mode: Mode = "auto"
    """How much of the decision was carried out: that of the category, or of the set where there is none."""
    would: Would | None = None
    """What auto would have done, where the mode held a route back; None where this is what auto does."""
    nearest: Nearest | None = None
    """Of scored tickets that went to people; None without a calibration in force."""

    def to_bytes(self) -> bytes:
        return orjson.dumps(self)


def envelope_json_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of the envelope."""
    schema = TypeAdapter(Envelope).json_schema(mode="serialization")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Decision envelope", **schema}


def decision_id(origin: Origin, rule_set: str, calibration: str | None) -> str:
    """32 hexadecimal digits; equal for a redelivery of the same message under the same rules and calibration."""
    return fingerprint(
        "decision/1", origin.topic, origin.partition, origin.offset, rule_set, calibration or "uncalibrated"
    )


class DecisionIds:
    """`decision_id` for one rule set and calibration; what is the same for all of a partition is hashed once."""

    def __init__(self, rule_set: str, calibration: str | None) -> None:
        self._rest = framed(rule_set, calibration or "uncalibrated")
        self._begun: dict[tuple[str, int], Any] = {}

    def __call__(self, origin: Origin) -> str:
        place = origin.topic, origin.partition
        begun = self._begun.get(place)
        if begun is None:
            begun = self._begun[place] = hashlib.sha256(framed("decision/1", *place))
        digest = begun.copy()
        digest.update(framed(origin.offset) + self._rest)
        return str(digest.hexdigest()[:FINGERPRINT_HEX])


def received_headers(headers: Headers) -> Headers:
    """Headers as received, in order, without the names that are ours."""
    return tuple(pair for pair in headers if not pair[0].startswith(RESERVED_PREFIX))


def stated_origin(headers: Headers) -> Origin | None:
    """The origin that a dead letter, or a ticket that was sent in again, states in its headers."""
    if not headers:
        return None
    found = {name: value for name, value in headers if value is not None}
    topic, numbers = found.get(ORIGIN_TOPIC), (found.get(ORIGIN_PARTITION, b""), found.get(ORIGIN_OFFSET, b""))
    if topic is None or not all(number.isdigit() and len(number) < 20 for number in numbers):
        return None
    return Origin(topic.decode(errors="replace"), int(numbers[0]), int(numbers[1]))


def decided_origin(decision: Mapping[str, Any]) -> Origin | None:
    """The origin that a decision states; None where that is none, as in what others wrote."""
    match decision.get("origin"):
        case {"topic": str(topic), "partition": int(partition), "offset": int(offset)} if (
            0 <= partition < 2**31 and 0 <= offset < 2**63
        ):
            return Origin(topic, partition, offset)
    return None


def origin_headers(origin: Origin) -> Headers:
    return (
        (ORIGIN_TOPIC, origin.topic.encode()),
        (ORIGIN_PARTITION, str(origin.partition).encode()),
        (ORIGIN_OFFSET, str(origin.offset).encode()),
    )


def attempt_of(headers: Headers) -> int:
    """How often this message has been dead-lettered before."""
    for name, value in headers:
        if name == ATTEMPT and value is not None and value.isdigit() and len(value) < 9:
            return int(value)
    return 0


def dead_letter_headers(headers: Headers, origin: Origin, code: str, detail: str) -> Headers:
    """Received headers and ours: reason, origin and attempt. A replay grows none of them: ours are replaced."""
    return (
        *received_headers(headers),
        (DEAD_LETTER_REASON, code.encode()),
        (DEAD_LETTER_DETAIL, detail[:500].encode()),
        *origin_headers(origin),
        (ATTEMPT, str(attempt_of(headers) + 1).encode()),
    )
