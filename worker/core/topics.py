"""Topics: which names Kafka takes, alone and beside each other, and that each has one meaning in a rule set."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator

from worker.core.misplaced import Misplaced, Place

LONGEST_NAME = 249
INTERNAL = frozenset({"__consumer_offsets", "__transaction_state", "__share_group_state", "__cluster_metadata"})
"""The broker's own (Kafka 4.1): who writes to one is refused, or breaks it."""


def topic_name(name: str) -> str:
    """The name, if Kafka takes it for a topic (`Topic.validate`, 4.1). Raises ValueError."""
    if not name or len(name) > LONGEST_NAME:
        raise ValueError(f"no topic's name: {len(name)} characters, and Kafka takes 1 to {LONGEST_NAME}")
    if name in (".", ".."):
        raise ValueError(f"no topic's name: Kafka does not take '{name}'")
    if re.fullmatch(r"[A-Za-z0-9._-]+", name) is None:
        raise ValueError("no topic's name: Kafka takes ASCII letters, digits, '.', '_' and '-'")
    if name in INTERNAL:
        raise ValueError(f"'{name}' is the broker's own topic: name another")
    return name


TopicName = Annotated[str, AfterValidator(topic_name)]


@dataclass(frozen=True, slots=True)
class NamedTopic:
    """A topic and what it is for. Categories may share theirs, and rules over answers one of people's."""

    name: str
    of: str
    """For those who read an error: `the input`, `category 'billing'`, `rule 'gas'`."""
    whose: Literal["input", "people", "rule", "own", "category"]
    place: Place


SHARED = frozenset({("category", "category"), ("people", "rule"), ("rule", "rule")})


def check_topics(topics: Sequence[NamedTopic]) -> None:
    """Raises Misplaced at a topic that has two meanings, or a name that Kafka does not take beside another's.

    Of two, the later one is at fault: what seldom is written comes first, rules over answers come last.
    """
    first: dict[str, NamedTopic] = {}
    spelled: dict[str, str] = {}
    for topic in topics:
        other = first.setdefault(topic.name, topic)
        if other is not topic and (other.whose, topic.whose) not in SHARED:
            raise Misplaced(_clash(topic, other), *topic.place)
        # Kafka 4.1, `Topic.hasCollision`: its metrics write the one character for the other.
        alike = spelled.setdefault(topic.name.replace(".", "_"), topic.name)
        if alike != topic.name:
            raise Misplaced(
                f"topics '{alike}' and '{topic.name}' differ in '.' and '_' only, and Kafka makes but one of the two: "
                "name one otherwise",
                *topic.place,
            )


def _clash(topic: NamedTopic, other: NamedTopic) -> str:
    if topic.whose == "rule":
        return (
            f"{topic.of}: topic '{topic.name}' is not one of people's but that of {other.of}: a ticket's text must not "
            "open a queue"
        )
    if topic.whose == "input":
        return f"topic '{topic.name}' is {topic.of}, and that of {other.of}: every ticket would go round for ever"
    return (
        f"topic '{topic.name}' is that of {other.of} and of {topic.of}: the human, dead-letter, decisions and category "
        "topics must be different topics"
    )
