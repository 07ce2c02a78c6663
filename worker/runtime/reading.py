"""Reader: what of a ticket's text reaches the model, counted in the engine's own tokens."""

from __future__ import annotations

from worker.core.budget import Budget, Fitted, fit_ticket, fits_surely
from worker.core.turns import Tokenize
from worker.errors import TooLong


class Reader:
    """Cuts tickets that are longer than the budget."""

    def __init__(self, budget: Budget, tokenize: Tokenize) -> None:
        self.budget = budget
        self._tokenize = tokenize

    def needs_no_cut(self, text: str) -> bool:
        """Sure, without a call: as nearly all tickets."""
        return fits_surely(text, self.budget)

    async def fit(self, text: str) -> Fitted:
        """Canonical text. Only one of more bytes than the budget has tokens is counted, by up to eight calls.

        Raises TooLong, EngineError.
        """
        if len(text) > self.budget.characters:
            raise TooLong(len(text), self.budget.characters, "characters")
        plan = fit_ticket(text, self.budget)
        try:
            asked = next(plan)
            while True:
                (ids,) = await self._tokenize([f" {asked}"])
                asked = plan.send(len(ids))
        except StopIteration as end:
            fitted: Fitted = end.value
            return fitted
