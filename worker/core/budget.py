"""Budget: how much of a ticket is read, and what is kept of a longer one.

Instructions, examples and cue are never cut: what is too much is taken out of the ticket's middle, before anything is
asked, so that a long ticket can neither push the cue out nor cost what a hundred others do.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

from worker.core.normalise import canonical

CHARACTERS_A_TOKEN = 16
"""A budget of n tokens is one of 16 n characters too: no more of a ticket is ever tokenized, whatever its length. Text
averages 2 to 5 characters a token."""
GAP = " … "
HEAD = 2 / 3
"""Of what is kept. People say first what they want; the end is where forwarded mail begins, or what they forgot."""
ROUNDS = 6


@dataclass(frozen=True, slots=True)
class Budget:
    """What of a ticket reaches the model."""

    tokens: int
    """A longer ticket keeps its head and its tail."""
    characters: int
    """Longer still, it is not asked about at all."""

    def at_most(self, tokens: int) -> Budget:
        """The same where the model leaves room for so many tokens only."""
        return Budget(max(1, min(self.tokens, tokens)), self.characters)


@dataclass(frozen=True, slots=True)
class Fitted:
    """Canonical text within the budget."""

    text: str
    cut: bool


Fit = Generator[str, int, Fitted]
"""Texts to be counted out, their numbers of tokens in."""


def fits_surely(text: str, budget: Budget) -> bool:
    """By its length alone. False says nothing."""
    return _bytes(text) <= min(budget.tokens, budget.characters)


def fit_ticket(text: str, budget: Budget) -> Fit:
    """The text, or its head and tail. The same text and tokenizer give the same cut.

    Most tickets are never counted: a byte of UTF-8 becomes one token at most (but for tokenizers that expand
    compatibility characters; those count them as fewer than they are, by no more than 18 to 1).
    """
    if _bytes(text) <= budget.tokens:
        return Fitted(text, cut=False)
    keep = CHARACTERS_A_TOKEN * budget.tokens
    if len(text) <= keep:
        tokens = yield text
        if tokens <= budget.tokens:
            return Fitted(text, cut=False)
        keep = len(text) * budget.tokens // tokens
    for _ in range(ROUNDS):
        ends = _ends(text, keep)
        if _bytes(ends) <= budget.tokens:
            return Fitted(ends, cut=True)
        tokens = yield ends
        if tokens <= budget.tokens:
            return Fitted(ends, cut=True)
        keep = min(keep * budget.tokens // tokens, keep - keep // 50 - 1)
    return Fitted(_ends(text, budget.tokens // 4), cut=True)  # four bytes a character at most: sure to fit


def _ends(text: str, keep: int) -> str:
    """About `keep` characters of both ends. Canonical again: a cut may leave a combining mark without its letter."""
    room = max(2, keep - 2 * len(GAP))  # the second for spaces that a mark at the seam may need
    head = int(room * HEAD)
    return canonical(text[:head] + GAP + text[len(text) - (room - head) :])


def _bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))
