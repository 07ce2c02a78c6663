"""The prompt: a static prefix, a slot for one ticket, and the cue behind which the label is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from worker.core.canonicalisers import scored_text
from worker.core.categories import Category, CategorySet
from worker.core.digest import fingerprint

PROMPT_VERSION = "prompt/1"
"""Part of the prompt's fingerprint; raised when the layout below changes."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """`prefix + item(text)` is the whole prompt; the label is the next token, written `" " + word`.

    The cut lies before a space because moving it changes token ids, and so scores; it must not end in one because a
    trailing space keeps " word" from being a single token.
    """

    prefix: str
    suffix: str

    def item(self, text: str) -> str:
        """The part that differs from ticket to ticket. `text` is canonical: one line, no control tokens."""
        return f" {text}{self.suffix}"

    @property
    def fingerprint(self) -> str:
        return fingerprint(PROMPT_VERSION, self.prefix, self.suffix)


def build_prompt(categories: CategorySet, words: Sequence[str], *, legend: bool) -> Prompt:
    """The prompt that asks for one of `words` (in category order).

    `legend` lists what each word stands for; letters mean nothing without it, and a chat model is told it anyway.
    Chat turns are those of the prompt style; `bos` is left to the engine (core.turns.fit_turns).
    """
    style = categories.prompt
    parts = prompt_parts(categories, words, legend=legend)
    opening = "\n".join(part for name, part in parts.items() if part and name != "examples")
    if style.style == "base":
        prefix = f"{opening}\n\n{parts['examples']}{style.ticket_heading}"
        return Prompt(prefix=prefix, suffix=f"\n{style.answer_cue}")
    turns = style.chat_turns
    prefix = f"{turns.start}{opening}{turns.system_user}{parts['examples']}{style.ticket_heading}"
    return Prompt(prefix=prefix, suffix=f"{turns.answer}{style.answer_cue}")


def prompt_parts(categories: CategorySet, words: Sequence[str], *, legend: bool) -> Mapping[str, str]:
    """What the people who wrote the rule set put into the prefix, by name, in order of its place."""
    style = categories.prompt
    chat = style.style == "chat"
    named = zip(words, categories.categories, strict=True)
    listed = [f"{word}: {_meaning(c)}" for word, c in named] if legend or chat else []
    choice = f"Answer with one of these words only: {', '.join(words)}." if chat else ""
    turns = style.chat_turns
    ask, close = (turns.user_assistant, turns.assistant_user) if chat else ("\n", "\n\n")
    examples = "".join(
        f"{style.ticket_heading} {text}{ask}{style.answer_cue} {word}{close}"
        for text, word in _interleaved(categories, words)
    )
    return {"instruction": style.instruction, "legend": "\n".join(listed), "choice": choice, "examples": examples}


def _meaning(category: Category) -> str:
    """Nothing is said twice: an option without a description is described by its name."""
    return category.name if category.name == category.description else f"{category.name} ({category.description})"


def _interleaved(categories: CategorySet, words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Examples in rounds over the categories, so that none of them owns the end of the prompt.

    They are canonical, as tickets are: one that was copied from a ticket must not write a turn either.
    """
    longest = max(len(c.examples) for c in categories.categories)
    for turn in range(longest):
        for word, category in zip(words, categories.categories, strict=True):
            if turn < len(category.examples):
                yield scored_text(category.examples[turn], categories.prompt.canonicalise), word
