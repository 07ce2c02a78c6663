"""Backtest: recorded decisions decided again under other rules, and both sides counted; no engine, bounded memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson

from worker.core.envelope import ENVELOPE_SCHEMA
from worker.core.policy import NoCalibration, decide
from worker.core.scores import LabelScores
from worker.errors import ConfigError
from worker.offline.counted import HOURS, Counted, Tally, counted
from worker.offline.fast_decide import FastEvaluator
from worker.offline.redecide import (
    OVERRIDES,
    Fit,
    Record,
    Terms,
    after_answers,
    after_second_look,
    as_auto,
    scores_of,
    second_look,
    was_cut,
)
from worker.offline.rules_diff import Side, version_of

PEOPLE = "people"
"""Where a ticket goes that is not routed, whatever the human topic is called; people's other topics by their name."""
VERSIONS = 20
"""Rule set versions of a log that are told apart."""
MALFORMED = "no decision of this software, or one that is not whole"
MALFORMED_ERRORS = (KeyError, TypeError, ValueError, IndexError, AttributeError)
"""What reading a record may raise that is not one."""


@dataclass(frozen=True, slots=True)
class Backtest:
    """What a log says about new rules. Only what is not in `refused` is on the two sides."""

    new: str
    calibration: str | None
    """Digest of the new calibration; None where there is none in force."""
    not_in_force: str | None
    """Why nothing would be routed by score under the new rules."""
    log: tuple[tuple[str, int], ...]
    """Rule set versions in it."""
    calibrations: tuple[str | None, ...]
    """Recorded ones, of the decisions that were made again."""
    lines: int
    refused: Mapping[str, int]
    """Why decisions could not be made again, and how many."""
    redecided: int
    kept_overrides: int
    """Decided by an override, which reads the text: kept as they were."""
    kept_unscored: Mapping[str, int]
    """Other decisions without scores, by reason, kept as they were."""
    kept_second_look: Mapping[str, int]
    """Would route by score, and stay with people for the reason of a second look that only the text could repeat."""
    asked_again: int
    """Would route, and be asked about in another order first: some of them may yet go to people."""
    questions_left_out: Mapping[str, int]
    """Questions whose rules were left out, because that many decisions hold no scores of theirs that fit."""
    overrides_differ: bool | None
    """Whether the new overrides differ from those of the old rules; None where those are not at hand."""
    first: str
    last: str
    recorded: Counted
    replayed: Counted
    moves: Mapping[tuple[str, str], int]
    """(end as recorded, end under the new rules); those that stay are in it."""

    @property
    def moved(self) -> int:
        return sum(n for (a, b), n in self.moves.items() if a != b)

    @property
    def other_calibration(self) -> bool:
        """Whether the two sides' probabilities come from different calibrations."""
        return set(self.calibrations) != {self.calibration}

    def to_dict(self) -> dict[str, Any]:
        """Strict JSON values."""
        names = (
            "new", "calibration", "not_in_force", "lines", "redecided", "kept_overrides", "asked_again",
            "overrides_differ", "first", "last",
        )  # fmt: skip
        maps = ("refused", "kept_unscored", "kept_second_look", "questions_left_out")
        return {
            **{name: getattr(self, name) for name in names},
            "log": dict(self.log),
            **{name: dict(getattr(self, name)) for name in maps},
            "moves": [{"from": a, "to": b, "tickets": n} for (a, b), n in self.moves.items()],
            "recorded": self.recorded.to_dict(),
            "replayed": self.replayed.to_dict(),
        }


def backtest(lines: Iterable[Sequence[bytes]], new: Side, old: Side | None = None) -> Backtest:
    """Decide every line of a decision log again under `new`. `old` are the rules that made it, as far as at hand.

    Raises ConfigError where not one decision could be made again.
    """
    run = _Run(new, old)
    for piece in lines:
        run.take(piece)
    return run.result()


class _Was(NamedTuple):
    """What a record says of its own decision, and the line that it is: a parsed record in memory costs a million times
    as many objects, through which Python's collector goes again and again.
    """

    line: bytes
    moment: str
    routes: bool
    end: str
    category: str | None
    code: str
    probability: float
    calibration: str | None = None
    in_full: bool = False
    """A second look, or a cut, is to be considered."""
    held: float | None = None
    """Probability of the route that the mode held back, NaN where a rule said so; None where it held none back."""


class _End(NamedTuple):
    """What becomes of a ticket under the new rules."""

    routes: bool
    end: str
    category: str | None
    code: str
    probability: float
    held: float | None = None
    """As of what was."""


class _Run:
    def __init__(self, new: Side, old: Side | None) -> None:
        self._new, self._old = new, old
        self._terms = Terms.of(new, old)
        self._fit = Fit(new, old)
        self._fast = FastEvaluator(self._terms.rule_set, self._terms.calibration)
        rules = self._terms.rule_set
        self._width = len(rules.categories.ids)
        self._by_answers = bool(rules.rules.answers)
        self._gate = rules.rules.gates.other_order_margin
        sides = [side.rule_set for side in (old, new) if side is not None]
        self._human = {f"{rules.id}.human", *(side.human_topic for side in sides)}
        self._recorded, self._replayed = Tally(), Tally()
        self._moves: Counter[tuple[str, str]] = Counter()
        self._refused: Counter[str] = Counter()
        self._versions: Counter[str] = Counter()
        self._calibrations: set[str | None] = set()
        self._kept: Counter[str] = Counter()
        self._second: Counter[str] = Counter()
        self._left_out: Counter[str] = Counter()
        self._overrides = self._lines = self._redecided = self._asked_again = 0
        self._first, self._last = "~", ""

    def take(self, lines: Sequence[bytes]) -> None:
        rows: list[_Was] = []
        values: list[list[float | None]] = []
        masses: list[float] = []
        for line in lines:
            self._lines += 1
            try:
                record = orjson.loads(line)
                was = self._was(line, record)
                if was is not None:
                    scores = [None if each is None else float(each) for each in record["label_scores"]]
                    masses.append(float(record["label_mass"]))
                    rows.append(was)
                    values.append(scores)
            except MALFORMED_ERRORS:
                self._refused[MALFORMED] += 1
        if rows:
            self._decide(rows, values, masses)

    def _was(self, line: bytes, record: Record) -> _Was | None:
        """The decision that is to be made again; None where it is refused or kept, which is counted. Raises one of
        MALFORMED_ERRORS.
        """
        auto = as_auto(record)
        action, moment, version = record["action"], record["decided_at"], record["rule_set"]
        if record["schema"] != ENVELOPE_SCHEMA or action not in ("route", "escalate"):
            raise ValueError("not a decision")
        if not 0 <= int(moment[11:13]) < HOURS:
            raise ValueError("no hour")
        routes, category, code = action == "route", record["category"], record["reasons"][0]["code"]
        end = str(category) if routes else self._place(record["topic"])
        p = math.nan if record["probability"] is None else float(record["probability"])
        held = None if auto is record else math.nan if auto["probability"] is None else float(auto["probability"])
        self._versions[version if version in self._versions or len(self._versions) < VERSIONS else "others"] += 1
        values = record["label_scores"]
        if values is None:
            self._keep(_Was(line, moment, routes, end, category, code, p, held=held), auto)
            return None
        problem = self._fit.problem(record)
        if problem is not None:
            self._refused[problem] += 1
            return None
        if len(values) != self._width:
            raise ValueError("not a score for each label")
        in_full = self._by_answers or second_look(auto) is not None or was_cut(auto)
        return _Was(line, moment, routes, end, category, code, p, record["calibration"], in_full, held)

    def _keep(self, was: _Was, auto: Record) -> None:
        if str(auto["rule_set"]).split("/", 1)[0] != self._terms.rule_set.id:
            self._refused["another rule set's"] += 1
            return
        code = auto["reasons"][0]["code"]
        if code in OVERRIDES:
            self._overrides += 1
        else:
            self._kept[code] += 1
        if auto["action"] == "route":
            self._count(was, self._route(str(auto["category"]), code, math.nan))
        else:
            self._count(was, _End(False, was.end, was.category, code, math.nan))

    def _route(self, category: str, code: str, probability: float) -> _End:
        """What the new mode of the category makes of a route."""
        mode = self._terms.rule_set.mode_of(category)
        if mode == "auto":
            return _End(True, category, category, code, probability)
        return _End(False, PEOPLE, category, f"{mode}_mode", math.nan, held=probability)

    def _decide(self, rows: Sequence[_Was], values: list[list[float | None]], masses: Sequence[float]) -> None:
        verdicts, unsure = self._fast.decide(values, masses)
        for place, (was, verdict) in enumerate(zip(rows, verdicts, strict=True)):
            try:
                if was.in_full or place in unsure:
                    now = self._in_full(orjson.loads(was.line))
                elif verdict.routes:
                    self._ask_again(verdict.margin)
                    now = self._route(verdict.category, verdict.code, verdict.probability)
                else:
                    now = _End(False, PEOPLE, verdict.category, verdict.code, math.nan)
            except MALFORMED_ERRORS:
                self._refused[MALFORMED] += 1
                continue
            self._count(was, now)
            self._redecided += 1
            self._calibrations.add(was.calibration)

    def _in_full(self, done: Record) -> _End:
        record = as_auto(done)
        scores: LabelScores = scores_of(record)
        terms = self._terms
        decided = decide(scores, terms.rule_set, terms.calibration)
        decision = looked = after_second_look(decided, record, terms.rule_set)
        if self._by_answers:
            decision, missing = after_answers(decision, record, terms, self._fit)
            self._left_out.update(missing)
        routes = decision.action == "route"
        if looked is not decided:
            self._second[looked.reasons[0].code] += 1
        if routes:
            self._ask_again(math.nan if decision.margin is None else decision.margin)
        code = decision.reasons[0].code
        if routes and decision.category is not None:
            return self._route(
                decision.category, code, math.nan if decision.probability is None else decision.probability
            )
        return _End(False, self._place(decision.topic), decision.category, code, math.nan)

    def _ask_again(self, margin: float) -> None:
        if self._gate is not None and margin < self._gate:
            self._asked_again += 1

    def _count(self, was: _Was, now: _End) -> None:
        """Both sides of one decision."""
        moment = was.moment
        self._first = min(self._first, moment)
        self._last = max(self._last, moment)
        self._recorded.add(was.routes, was.end, was.category, was.code, was.probability, moment)
        self._replayed.add(now.routes, now.end, now.category, now.code, now.probability, moment)
        if was.held is not None:
            self._recorded.hold(was.category, was.held)
        if now.held is not None:
            self._replayed.hold(now.category, now.held)
        self._moves[was.end, now.end] += 1

    def _place(self, topic: str) -> str:
        return PEOPLE if topic in self._human else topic

    def result(self) -> Backtest:
        done = self._redecided
        if not done and self._lines and self._refused[MALFORMED] == self._lines:
            raise ConfigError(
                f"none of the log's {self._lines} lines is a decision of this software: it is not what `ticket-router "
                "export` writes, a JSON object a line. `ticket-router export --rules FOLDER --to log.jsonl` makes one"
            )
        if not done:
            why = "; ".join(f"{n} {what}" for what, n in self._refused.most_common(5)) or "it holds no scored ticket"
            raise ConfigError(f"none of {self._lines} decisions can be made again: {why}")
        new, state = self._new, self._terms.calibration
        differ = None
        if self._old is not None:
            bare = [
                [rule.model_dump(exclude={"tests"}) for rule in side.rule_set.rules.overrides]
                for side in (self._old, new)
            ]
            differ = bare[0] != bare[1]
        return Backtest(
            new=version_of(new.rule_set),
            calibration=None if isinstance(state, NoCalibration) else state.artefact.digest,
            not_in_force=state.reason.sentence if isinstance(state, NoCalibration) else None,
            log=tuple(self._versions.most_common()),
            calibrations=tuple(sorted(self._calibrations, key=str)),
            lines=self._lines,
            refused=dict(self._refused.most_common()),
            redecided=done,
            kept_overrides=self._overrides,
            kept_unscored=dict(self._kept.most_common()),
            kept_second_look=dict(self._second.most_common()),
            asked_again=self._asked_again,
            questions_left_out=dict(self._left_out.most_common()),
            overrides_differ=differ,
            first=self._first,
            last=self._last,
            recorded=counted(self._recorded),
            replayed=counted(self._replayed),
            moves=dict(self._moves.most_common()),
        )
