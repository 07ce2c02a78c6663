"""Answer files: people's answers and the texts they are about, and which of them cannot be believed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

from worker.adapters.files import refuse, rows
from worker.core.answer_events import AnswerEvent, parse_answer
from worker.core.rules import RuleSet
from worker.errors import ConfigError

SKEW = timedelta(minutes=10)
"""How far the clocks of helpdesk, worker and this machine may differ before a moment counts as impossible."""
Numbered = tuple[int, AnswerEvent]
"""An answer, and the line that it stands in."""


@dataclass(frozen=True, slots=True)
class Texts:
    """The texts of tickets: by the decision about them where the file says it, else by their id."""

    by_decision: Mapping[str, tuple[str, str]]
    by_id: Mapping[str, tuple[str, str]]
    disputed: Mapping[str, str] = field(default_factory=dict)
    """Decisions with different texts, and in words where they stand. One ticket was decided about, and nothing tells
    which text is its own."""

    def of(self, decision_id: str, ticket_id: str) -> tuple[str, str] | None:
        """(text, language)."""
        if decision_id in self.disputed:
            return None
        return self.by_decision.get(decision_id) or self.by_id.get(ticket_id)


@dataclass(frozen=True, slots=True)
class Answers:
    """What a file says of each decision. The order in the file decides nothing."""

    latest: Mapping[str, Numbered]
    """The answer that holds."""
    future: Mapping[str, Sequence[Numbered]]
    """Answers of moments that have not come yet; none of them is among `latest`."""

    @property
    def decisions(self) -> Mapping[str, int]:
        """Every decision that is answered, with a line that says so."""
        return {name: found[0][0] for name, found in self.future.items()} | {
            name: number for name, (number, _) in self.latest.items()
        }

    def open(self, decision_id: str) -> bool:
        """Whether another answer may be the later one of the two: the clock behind it cannot be believed."""
        _, event = self.latest[decision_id]
        return any(finding(other) != finding(event) for _, other in self.future.get(decision_id, ()))


def finding(event: AnswerEvent) -> tuple[object, ...]:
    """What the person found; equal for two answers that say the same."""
    return event.category, event.not_a_ticket, event.duplicate_of


def read_texts(path: Path) -> Texts:
    """A CSV or JSONL file with id and text, and optionally language and decision_id. Raises ConfigError."""
    by_decision: dict[str, tuple[str, str]] = {}
    by_id: dict[str, tuple[str, str]] = {}
    first: dict[str, int] = {}
    disputed: dict[str, str] = {}
    problems = []
    for number, row in rows(path, ("id", "text")):
        found = ((row.get("text") or "").strip(), (row.get("language") or "").strip())
        decision, name = (row.get("decision_id") or "").strip(), (row.get("id") or "").strip()
        if decision:
            first.setdefault(decision, number)
            if by_decision.setdefault(decision, found) != found:
                disputed.setdefault(decision, f"decision {decision} in lines {first[decision]} and {number}")
        elif name and by_id.setdefault(name, found) != found:
            problems.append(f"line {number}: id '{name}' stands twice, with another text: add a column decision_id")
    refuse(path, problems)
    return Texts(by_decision, by_id, disputed)


def read_answers(path: Path, rule_set: RuleSet, now: datetime) -> Answers:
    """Raises ConfigError with the lines of everything that is no answer, and of answers of one moment that contradict
    each other.
    """
    problems: list[str] = []
    contradictions: dict[str, str] = {}
    found: dict[str, Numbered] = {}
    future: defaultdict[str, list[Numbered]] = defaultdict(list)
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            event = parse_answer(line, rule_set)
        except ValueError as error:
            problems.append(f"line {number}: {error}")
            continue
        if event.answered_at - now > SKEW:  # else it would be the latest whatever is answered until then
            future[event.decision_id].append((number, event))
            continue
        before = found.get(event.decision_id)
        if before is None or event.answered_at > before[1].answered_at:
            found[event.decision_id] = (number, event)
            contradictions.pop(event.decision_id, None)  # a later answer settles it
        elif event.answered_at == before[1].answered_at and finding(event) != finding(before[1]):
            said = f"line {number}: contradicts line {before[0]}, which was answered at the same moment"
            contradictions.setdefault(event.decision_id, said)
    refuse(path, [*problems, *contradictions.values()])
    if not found and not future:
        raise ConfigError(f"{path}: no answers in it")
    return Answers(found, dict(future))
