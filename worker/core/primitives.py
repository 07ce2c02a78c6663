"""Primitives: the shape of a question, from ticket text to a score request."""

from __future__ import annotations

from dataclasses import dataclass

from worker.core.labels import Labels
from worker.core.prompt import Prompt
from worker.core.scores import ScoreRequest


@dataclass(frozen=True, slots=True)
class ChooseOne:
    """Which one of the labels? The only primitive so far."""

    prompt: Prompt
    labels: Labels

    def request(self, text: str) -> ScoreRequest:
        """`text` is canonical (core.normalise)."""
        return ScoreRequest(self.prompt.prefix, self.prompt.item(text), self.labels.token_ids)
