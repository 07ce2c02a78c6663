"""Sent: whether a question goes to the engine as text or as token ids, and whose tokenizer says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from worker.core.labels import Tokenize
from worker.core.primitives import Primitive
from worker.core.token_ids import InTokenIds, LocalTokenizer, MadeHarmless
from worker.errors import ConfigError, RequestRefused
from worker.ports import ScoringEngine


@dataclass(frozen=True, slots=True)
class Sent:
    """Without a tokenizer: as text, control tokens broken up by what they look like (core.normalise)."""

    tokenizer: LocalTokenizer | None = None
    as_ids: bool = True

    def wrapped(self, primitive: Primitive) -> Primitive:
        """Raises LabelError where labels are other tokens behind a cue that is tokenized by itself."""
        if self.tokenizer is None:
            return primitive
        return InTokenIds(primitive, self.tokenizer) if self.as_ids else MadeHarmless(primitive, self.tokenizer)

    def counting(self, tokenize: Tokenize) -> Tokenize:
        """The tokenizer of this process where there is one, else the engine's."""
        local = self.tokenizer
        if local is None:
            return tokenize

        async def here(texts: Sequence[str]) -> list[list[int]]:
            return [list(local.marked(local.harmless(text))) for text in texts]

        return here

    async def check(self, primitive: Primitive, engine: ScoringEngine) -> None:
        """Raises ConfigError where the engine reads probe texts, or this prompt, otherwise than the tokenizer."""
        if self.tokenizer is None:
            return
        prompt = primitive.longest_prompt
        texts = [*self.tokenizer.probes, prompt.prefix, prompt.prefix + prompt.item("x")]
        try:
            theirs = await engine.tokenize(texts)
        except RequestRefused as error:
            raise ConfigError(
                f"the engine's tokenizer cannot be compared with ROUTER_TOKENIZER_FILE: {error}"
            ) from error
        for text, ids in zip(texts, theirs, strict=True):
            own = list(self.tokenizer.whole(text))
            if own != ids:
                at = next((n for n, pair in enumerate(zip(own, ids, strict=False)) if pair[0] != pair[1]), len(own))
                raise ConfigError(
                    f"ROUTER_TOKENIZER_FILE is not the tokenizer of the engine's model: they differ from token {at} on "
                    f"of the text that begins with {text[:40]!r}; name the tokenizer.json of that model, or none"
                )
