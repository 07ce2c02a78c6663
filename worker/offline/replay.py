"""Sending tickets in again: which dead letters or escalated tickets go back to the input topic, and as what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from worker.adapters.topic_log import Record
from worker.core.envelope import (
    ATTEMPT,
    DEAD_LETTER_REASON,
    DEAD_LETTER_REASONS,
    DECISION_HEADER,
    POINTER,
    Headers,
    Origin,
    attempt_of,
    decided_origin,
    origin_headers,
    received_headers,
    stated_origin,
)
from worker.ports import Output

UNREADABLE = DEAD_LETTER_REASONS.keys() - {"undeliverable"}
"""Dead letters' codes that say something of the bytes, and nothing of the topics."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Which of them; times are those of the records, in milliseconds since 1970."""

    reason: str | None = None
    """A dead letter's code, or that of any of an escalated ticket's reasons."""
    until_ms: int | None = None
    max_attempts: int = 5
    """A ticket that was sent in again so often stays where it is."""


@dataclass(frozen=True, slots=True)
class Resend:
    """One ticket on its way back: to the partition where it first came in, behind whatever its key has there."""

    output: Output
    partition: int
    reason: str
    origin: Origin
    attempt: int


@dataclass(frozen=True, slots=True)
class Replay:
    """What is sent in again, in the order of the topic, and why the others are not."""

    resends: tuple[Resend, ...]
    left: Mapping[str, int]
    """Sentence to number of tickets."""

    def without(self, unwritable: Mapping[Resend, str]) -> Replay:
        """What remains where the client takes some of them for no record at all; each with its sentence."""
        left = Counter(self.left)
        left.update(unwritable.values())
        return Replay(tuple(resend for resend in self.resends if resend not in unwritable), dict(left))

    @property
    def unread(self) -> int:
        """How many were dead letters because of their bytes, which are sent as they were."""
        return sum(resend.reason in UNREADABLE for resend in self.resends)

    @property
    def reasons(self) -> Mapping[str, int]:
        return Counter(resend.reason for resend in self.resends)


def plan(
    records: Iterable[Record],
    sent_in: Iterable[Record],
    input_topic: str,
    partitions: int,
    dead_letters: bool,
    selection: Selection,
) -> Replay:
    """`records` are those of the dead-letter topic or of the human topic, `sent_in` those of the input topic, which has
    so many `partitions`: what is among them as a replay already is not sent twice.
    """
    done = {(stated_origin(record.headers), attempt_of(record.headers)) for record in sent_in}
    left: Counter[str] = Counter()
    resends: dict[tuple[Origin, int], Resend] = {}
    for record in records:
        origin, codes = _dead_letter(record.headers) if dead_letters else _escalated(record.headers)
        attempt = attempt_of(record.headers) + (not dead_letters)  # a dead letter has been counted already
        if selection.until_ms is not None and record.timestamp_ms > selection.until_ms:
            continue
        if selection.reason is not None and selection.reason not in codes:
            continue
        if origin is None or origin.topic != input_topic:
            left[f"not from topic {input_topic}"] += 1
        elif origin.partition >= partitions:
            left[f"from a partition that topic {input_topic} does not have"] += 1
        elif any(name == POINTER for name, _ in record.headers):
            left["a pointer only: the bytes are at its origin"] += 1
        elif attempt > selection.max_attempts:
            left[f"sent in {selection.max_attempts} times already"] += 1
        elif (origin, attempt) in done or (origin, attempt) in resends:
            left["sent in again already"] += 1
        else:
            headers = (*received_headers(record.headers), *origin_headers(origin), (ATTEMPT, str(attempt).encode()))
            output = Output(input_topic, record.key, record.value, headers)
            resends[origin, attempt] = Resend(output, origin.partition, codes[0], origin, attempt)
    return Replay(tuple(resends.values()), dict(left))


def _dead_letter(headers: Headers) -> tuple[Origin | None, tuple[str, ...]]:
    reason = dict(headers).get(DEAD_LETTER_REASON) or b"unknown"
    return stated_origin(headers), (reason.decode(errors="replace"),)


def _escalated(headers: Headers) -> tuple[Origin | None, tuple[str, ...]]:
    try:
        decision: dict[str, Any] = orjson.loads(dict(headers).get(DECISION_HEADER) or b"")
        codes = tuple(str(reason["code"]) for reason in decision["reasons"])
        return decided_origin(decision), codes or ("unknown",)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None, ("unknown",)
