"""Labels: the single tokens that stand for the categories, chosen and checked behind the real prompt ending."""

from __future__ import annotations

import string
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from worker.core.categories import CategorySet
from worker.core.digest import fingerprint
from worker.core.prompt import Prompt, build_prompt
from worker.errors import LabelError

Tokenize = Callable[[Sequence[str]], Awaitable[list[list[int]]]]
"""Token ids of each text as a whole prompt, by the engine's own tokenizer."""


@dataclass(frozen=True, slots=True)
class Labels:
    """Label words and their token ids, in category order."""

    words: tuple[str, ...]
    token_ids: tuple[int, ...]

    @property
    def fingerprint(self) -> str:
        return fingerprint("labels/1", self.words, self.token_ids)


async def choose_labels(categories: CategorySet, tokenize: Tokenize) -> tuple[Prompt, Labels]:
    """The prompt and its labels: words where all are distinct single tokens, letters otherwise.

    Words are the `label` of each category or else its id. Where any category states its label, failing is an error
    (the prompt was written for those words); where none does, letters with a legend take over. Raises LabelError.
    """
    words = [category.label or category.id for category in categories.categories]
    prompt = build_prompt(categories, words, legend=False)
    try:
        return prompt, await check_labels(prompt, words, tokenize)
    except LabelError:
        if any(category.label for category in categories.categories):
            raise
    letters = list(string.ascii_uppercase[: len(words)])
    if len(letters) < len(words):
        raise LabelError(
            "more categories than letters, and these ids are not distinct single tokens; state a label for each", words
        )
    prompt = build_prompt(categories, letters, legend=True)
    return prompt, await check_labels(prompt, letters, tokenize)


async def check_labels(prompt: Prompt, words: Sequence[str], tokenize: Tokenize) -> Labels:
    """Adds each label to a full prompt and demands exactly one more token, all of them different. Raises LabelError."""
    ending = prompt.prefix + prompt.item("x")
    bare, *extended = await tokenize([ending, *(f"{ending} {word}" for word in words)])
    many = [
        f"{word} ({len(ids) - len(bare)} tokens)"
        for word, ids in zip(words, extended, strict=True)
        if ids[: len(bare)] != bare or len(ids) != len(bare) + 1
    ]
    if many:
        raise LabelError("not a single token behind the prompt", many)
    by_id: dict[int, str] = {}
    for word, ids in zip(words, extended, strict=True):
        if ids[-1] in by_id:
            raise LabelError("the same token", [by_id[ids[-1]], word])
        by_id[ids[-1]] = word
    return Labels(tuple(words), tuple(ids[-1] for ids in extended))
