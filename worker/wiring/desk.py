"""What a rule set's folder holds: its rules, and the calibrations found beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from worker.adapters.files import calibration_file, load_artefact, load_rule_set
from worker.core.artefact import Artefact
from worker.core.modes import Mode
from worker.core.questions import FurtherQuestion
from worker.core.rules import RuleSet
from worker.errors import ConfigError
from worker.offline.rules_diff import Side


@dataclass(frozen=True, slots=True)
class Desk:
    """A rule set folder as loaded: rules, and the calibrations as they were found."""

    folder: Path
    rule_set: RuleSet
    artefact: Artefact | None
    further: Mapping[str, Artefact | None] = field(default_factory=dict)
    """Of the further questions, by id."""

    @classmethod
    def load(cls, folder: Path) -> Desk:
        """Raises RuleSetError, ArtefactError."""
        rule_set = load_rule_set(folder)
        further = {q.id: load_artefact(folder / calibration_file(q.id)) for q in rule_set.questions.questions}
        return cls(folder, rule_set, load_artefact(folder / calibration_file()), further)

    def at_most(self, mode: Mode) -> Desk:
        """The same with no category in a less strict mode than this."""
        return replace(self, rule_set=self.rule_set.at_most(mode))

    @property
    def side(self) -> Side:
        """One of the two that are compared."""
        return Side(self.rule_set, self.artefact, self.further)

    def question(self, question_id: str) -> FurtherQuestion:
        """One of the further questions. Raises ConfigError."""
        return further_question(self.rule_set, question_id)


def further_question(rule_set: RuleSet, question_id: str) -> FurtherQuestion:
    found = rule_set.questions.by_id(question_id)
    if found is None:
        known = ", ".join(q.id for q in rule_set.questions.questions) or "there is no questions.yaml"
        raise ConfigError(f"rule set '{rule_set.id}' has no question '{question_id}' ({known})")
    return found
