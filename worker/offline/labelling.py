"""Labelling: people's answers and the decisions they answer, made into a labelled file that says what it may prove.

Only answers given in shadow certify. In assist people saw the suggestion, and lean towards it; in auto only what was
escalated comes back, the hard part of the traffic. Such rows are left out unless they are asked for, and are marked.
"""

from __future__ import annotations

import csv
import io
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import orjson

from worker.adapters.files import SHOWN, refuse
from worker.core.answer_events import AnswerEvent
from worker.core.envelope import ENVELOPE_SCHEMA
from worker.core.modes import Mode
from worker.core.rules import RuleSet
from worker.errors import ConfigError
from worker.offline.answer_files import SKEW, Answers, Texts, read_answers
from worker.offline.measures import Measured, share
from worker.offline.spreadsheets import formula_note

COLUMNS = ("id", "text", "label", "language", "mode", "blind", "decision_id", "answered_at")
FUTURE = "are dated in the future"
EARLY = "are dated before their decision was made"
OPEN = "are contradicted by one dated in the future, so that nobody knows which is the later"
TWO_TEXTS = "are about a decision under which two different texts stand"
Record = Mapping[str, Any]
Joined = Sequence[tuple[int, AnswerEvent, Record]]
"""Answers, each with its line and the decision it is about."""


@dataclass(frozen=True, slots=True)
class LabelledRow:
    """One row of the file; `blind` where nobody was shown what the model says."""

    id: str
    text: str
    label: str
    language: str
    mode: Mode
    blind: bool
    decision_id: str
    answered_at: str


@dataclass(frozen=True, slots=True)
class Labelling:
    """What became of the answers."""

    rows: tuple[LabelledRow, ...]
    left: Mapping[str, int]
    """Why answers are not among the rows, and how many."""
    in_shadow: int
    """Scored decisions of the log that were in shadow."""
    elsewhere: int
    """Scored ones in assist and auto."""
    answered: Mapping[bool, Measured]
    """Of those in shadow, the share that was answered: of what auto would have routed (True), and of the rest."""
    wrong: Mapping[str, tuple[int, Measured]]
    """By category that auto would have routed to by score, in shadow: how many were answered, and the share of them
    for which people found another. Under `` all of them."""
    warnings: tuple[str, ...]


def label(
    rule_set: RuleSet,
    answers_path: Path,
    log: Iterable[Sequence[bytes]],
    texts: Texts,
    now: datetime,
    include: Collection[str | None] = (),
) -> Labelling:
    """Joins answers, decisions and texts. `include`: modes whose answers are wanted though they certify nothing.

    Raises ConfigError, also where an answer fits no decision of the log or states another ticket than it.
    """
    answers = read_answers(answers_path, rule_set, now)
    seen: set[str] = set()
    shadow: Counter[bool] = Counter()
    elsewhere = 0
    made: dict[str, datetime] = {}
    asked: dict[str, Record] = {}
    known = answers.decisions
    for record in _records(log, rule_set):
        decision_id = record["decision_id"]
        if decision_id in known:  # people may have answered any of its deliveries
            made[decision_id] = min(record["decided_at"], made.get(decision_id, record["decided_at"]))
        if decision_id in seen:
            continue  # delivered twice, or sent in again
        seen.add(decision_id)
        if record["label_scores"] is not None:
            if _mode(record) == "shadow":
                shadow[_would_route(record)] += 1
            else:
                elsewhere += 1
        if decision_id in known:
            asked[decision_id] = record
    joined = [(number, event, asked[name]) for name, (number, event) in answers.latest.items() if name in asked]
    _refuse_misfits(answers_path, known, asked, joined)
    believed, left, doubts = _believed(joined, answers, made)
    doubts += _disputes(texts)
    done = Counter(
        _would_route(row) for _, _, row in believed if row["label_scores"] is not None and _mode(row) == "shadow"
    )
    kept, unlabelled = _kept(believed, texts, {"shadow", *include})
    left += unlabelled
    if not kept:
        why = "; ".join(f"{n} {what}" for what, n in left.most_common())
        raise ConfigError("\n  ".join((f"{answers_path}: no answer is left to label with: {why}", *doubts)))
    answered = {routed: share(done[routed], shadow[routed]) for routed in (True, False)}
    return Labelling(
        rows=tuple(row for row, _ in kept),
        left=dict(left.most_common()),
        in_shadow=shadow.total(),
        elsewhere=elsewhere,
        answered=answered,
        wrong=_wrong(kept),
        warnings=(
            *doubts,
            *_warnings(kept, left, shadow.total() - done.total(), answered, elsewhere if shadow else 0),
        ),
    )


def as_csv(found: Labelling) -> bytes:
    """The file for `calibrate` and `evaluate`."""
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in found.rows:
        values = {name: getattr(row, name) for name in COLUMNS} | {"blind": str(row.blind).lower()}
        writer.writerow([values[name] for name in COLUMNS])
    return out.getvalue().encode()


def _would_route(record: Record) -> bool:
    return record.get("would") is not None


def _mode(record: Record) -> Mode:
    found: Mode = record.get("mode", "auto")
    return found


def _records(log: Iterable[Sequence[bytes]], rule_set: RuleSet) -> Iterable[Record]:
    """Decisions of this rule set. Raises ConfigError at what is no decision."""
    number = 0
    for lines in log:
        for line in lines:
            number += 1
            try:
                record = orjson.loads(line)
                if record["schema"] != ENVELOPE_SCHEMA or not isinstance(record["decision_id"], str):
                    raise ValueError("another schema")
                ours = record["rule_set"].split("/", 1)[0] == rule_set.id
                _check(record)
                needed = {name: record[name] for name in ("label_scores", "reasons", "origin", "ticket_id", "action")}
                needed["decided_at"] = _moment(record["decided_at"])
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise ConfigError(f"the log, decision {number}: no decision of this software ({error})") from error
            if ours:
                kept = ("decision_id", "mode", "would", "category", "topic")
                yield {**needed, **{name: record[name] for name in kept if name in record}}


def _check(record: Record) -> None:
    """Of what is used here as text or by its parts. Raises KeyError, TypeError, ValueError."""
    if not isinstance(record["ticket_id"], str):
        raise TypeError("ticket_id is no text")
    dict(record["origin"])
    would = record.get("would")
    if would is not None and would["certificate"] is not None and not isinstance(would["category"], str):
        raise TypeError("would.category is no text")


def _moment(text: str) -> datetime:
    """Raises TypeError, ValueError."""
    found = datetime.fromisoformat(text)
    if found.tzinfo is None:
        raise ValueError("decided_at has no offset")
    return found


def _refuse_misfits(path: Path, known: Mapping[str, int], asked: Collection[str], joined: Joined) -> None:
    problems = [
        (number, f"line {number}: decision {name} is none of this rule set's in the log")
        for name, number in known.items()
        if name not in asked
    ]
    for number, event, record in joined:
        if event.ticket_id is not None and event.ticket_id != record["ticket_id"]:
            problems.append((number, f"line {number}: its decision is about ticket '{record['ticket_id']}'"))
        if event.origin is not None and event.origin.model_dump() != dict(record["origin"]):
            problems.append((number, f"line {number}: its decision is about a ticket from elsewhere"))
    refuse(path, [text for _, text in sorted(problems)])


def _believed(joined: Joined, answers: Answers, made: Mapping[str, datetime]) -> tuple[Joined, Counter[str], list[str]]:
    """The answers whose moment can be, how many others there are, and where those stand.

    One of the future is not used, and nor is what it contradicts: whose clock is wrong is not known, so that neither
    can be said to hold.
    """
    found: list[tuple[int, AnswerEvent, Record]] = []
    lines = {FUTURE: [number for each in answers.future.values() for number, _ in each], EARLY: [], OPEN: []}
    for number, event, record in joined:
        if made[event.decision_id] - event.answered_at > SKEW:
            lines[EARLY].append(number)
        elif answers.open(event.decision_id):
            lines[OPEN].append(number)
        else:
            found.append((number, event, record))
    doubts = [
        f"answers that {what} were not used: line {_listed([str(n) for n in sorted(numbers)])}. Whose clock is wrong, "
        "or who wrote them?"
        for what, numbers in lines.items()
        if numbers
    ]
    return found, Counter({what: len(numbers) for what, numbers in lines.items() if numbers}), doubts


def _disputes(texts: Texts) -> Iterable[str]:
    if texts.disputed:
        yield (
            "different texts stand under one decision, and none of them was used: "
            f"{_listed(list(texts.disputed.values()))} "
            "of the tickets. Exports of different times or settings in one file, or somebody else writes to your topics"
        )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more}"


def _kept(
    joined: Joined, texts: Texts, wanted: Collection[str | None]
) -> tuple[list[tuple[LabelledRow, Record]], Counter[str]]:
    """Rows by rising line, and why the others are none."""
    left: Counter[str] = Counter()
    found: list[tuple[LabelledRow, Record]] = []
    names = Counter(record["ticket_id"] for _, _, record in joined)
    for _, event, record in sorted(joined, key=lambda each: each[0]):
        mode, text = _mode(record), texts.of(event.decision_id, record["ticket_id"])
        if event.label is None:
            left["repeat another ticket, which counts once"] += 1
        elif record["label_scores"] is None:
            left["were never scored: a rule decided, or the ticket could not be read"] += 1
        elif mode not in wanted:
            left[f"were given in {mode}: {_biased(mode)}"] += 1
        elif event.decision_id in texts.disputed:
            left[TWO_TEXTS] += 1
        elif text is None or not text[0]:
            left["have no text among the tickets"] += 1
        else:
            ticket_id, blind = record["ticket_id"], mode == "shadow"
            name = ticket_id if names[ticket_id] == 1 else f"{ticket_id}#{event.decision_id[:8]}"
            at, (words, language) = event.answered_at.isoformat(), text
            row = LabelledRow(name, words, event.label, language, mode, blind, event.decision_id, at)
            found.append((row, record))
    return found, left


def _biased(mode: Mode) -> str:
    if mode == "assist":
        return "people saw the suggestion, and lean towards it"
    return "only escalated tickets come back, with a suggestion"


def _wrong(kept: Sequence[tuple[LabelledRow, Record]]) -> dict[str, tuple[int, Measured]]:
    counts: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
    for row, record in kept:
        would = record.get("would")
        if row.blind and would is not None and would["certificate"] is not None:
            for name in ("", would["category"]):
                counts[name][0] += 1
                counts[name][1] += row.label != would["category"]
    return {name: (n, share(wrong, n)) for name, (n, wrong) in sorted(counts.items())}


def _warnings(
    kept: Sequence[tuple[LabelledRow, Record]],
    left: Mapping[str, int],
    missing: int,
    answered: Mapping[bool, Measured],
    elsewhere: int,
) -> Iterable[str]:
    seen = Counter(row.mode for row, _ in kept if not row.blind)
    for mode, count in seen.items():
        yield (
            f"{count} rows come from {mode} ({_biased(mode)}): they are marked blind=false, and `calibrate` and "
            "`evaluate` refuse them"
        )
    if elsewhere:
        yield (
            f"{elsewhere} scored tickets of the log were not in shadow: the rows stand for those categories that were, "
            "and not for all tickets"
        )
    routed, rest = answered[True], answered[False]
    if max(routed.lower, rest.lower) > min(routed.upper, rest.upper):
        yield (
            f"answers are no random part: {routed.value:.1%} of what auto would have routed was answered, and "
            f"{rest.value:.1%} of the rest. A certificate needs all, or a part drawn by lot"
        )
    if missing:
        yield f"{missing} tickets in shadow have no answer: if it is the hard ones that wait, the rest looks too good"
    if left.get("repeat another ticket, which counts once"):
        yield "tickets that people found to be duplicates were left out: make sure the first of each was answered"
    if note := formula_note(cell for row, _ in kept for cell in (row.id, row.text, row.label, row.language)):
        yield note
