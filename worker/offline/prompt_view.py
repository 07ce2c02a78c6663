"""Prompt view: what is sent for one ticket, token by token, and where its parts lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from worker.core.artefact import Fingerprints
from worker.core.canonicalisers import scored_text
from worker.core.normalise import NORMALISER_VERSION
from worker.core.primitives import TwoLevel
from worker.core.prompt import PROMPT_VERSION
from worker.core.room import Room, check_room
from worker.errors import EngineError
from worker.ports import EngineIdentity, ScoringEngine, ShowsPieces
from worker.runtime.question import Question

Part = Literal["prefix", "ticket", "cue"]


@dataclass(frozen=True, slots=True)
class ShownToken:
    id: int
    piece: str | None
    """None where the engine does not say what its tokens are."""
    part: Part


@dataclass(frozen=True, slots=True)
class ShownLabel:
    category: str
    word: str
    id: int
    piece: str | None


@dataclass(frozen=True, slots=True)
class PromptView:
    """The label is read behind the last token: nothing is written."""

    text: str
    """The ticket as it is sent, canonical."""
    tokens: tuple[ShownToken, ...]
    labels: tuple[ShownLabel, ...]
    identity: EngineIdentity
    room: Room
    fingerprints: Fingerprints
    joined: bool
    """Whether a token reaches over the seam of prefix and ticket, so that the prefix is not reused to its end."""
    versions: tuple[str, ...] = (PROMPT_VERSION, f"normaliser/{NORMALISER_VERSION}")

    def count(self, part: Part) -> int:
        return sum(token.part == part for token in self.tokens)


async def view_prompt(question: Question, engine: ScoringEngine, text: str) -> PromptView:
    """What this question sends for a ticket of this text (as the first request, where there are several).

    Raises EngineError, PromptError.
    """
    ticket, primitive = scored_text(text, question.rule_set.categories.prompt.canonicalise), question.primitive
    first = primitive.departments if isinstance(primitive, TwoLevel) else primitive
    prompt, asked, words = first.prompt, first.labels.token_ids, first.labels.words
    ids = question.rule_set.categories.ids if first is primitive else ("",) * len(words)
    rows = await engine.tokenize([prompt.prefix, f"{prompt.prefix} {ticket}", prompt.prefix + prompt.item(ticket)])
    prefix, with_ticket, whole = rows
    prefix_end, ticket_end = _common(prefix, whole), _common(with_ticket, whole)
    pieces = await _pieces(engine, [*whole, *asked])
    return PromptView(
        text=ticket,
        tokens=tuple(
            ShownToken(token, pieces.get(token), _part(at, prefix_end, ticket_end)) for at, token in enumerate(whole)
        ),
        labels=tuple(
            ShownLabel(category, word, token, pieces.get(token))
            for category, word, token in zip(ids, words, asked, strict=True)
        ),
        identity=question.identity,
        room=await _room(question, engine),
        fingerprints=question.fingerprints,
        joined=prefix_end < len(prefix),
    )


async def _room(question: Question, engine: ScoringEngine) -> Room:
    primitive, limit = question.primitive, question.identity.context_tokens
    categories, words = question.rule_set.categories, primitive.labels.words
    return await check_room(categories, primitive.longest_prompt, words, limit, engine.tokenize)


async def _pieces(engine: ScoringEngine, token_ids: Sequence[int]) -> dict[int, str]:
    if not isinstance(engine, ShowsPieces):
        return {}
    distinct = list(dict.fromkeys(token_ids))
    try:
        return dict(zip(distinct, await engine.pieces(distinct), strict=True))
    except EngineError:  # an older server, or one behind a gateway: the ids are shown without
        return {}


def _part(at: int, prefix_end: int, ticket_end: int) -> Part:
    return "prefix" if at < prefix_end else "ticket" if at < ticket_end else "cue"


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many first tokens both share."""
    return next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), len(one))
