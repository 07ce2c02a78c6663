"""The prompt: a static prefix, a slot for one ticket, and the cue behind which the label is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from worker.core.categories import CategorySet
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
    """
    style = categories.prompt
    lines = [style.instruction]
    if legend or style.style == "chat":
        lines += [f"{word}: {c.name} ({c.description})" for word, c in zip(words, categories.categories, strict=True)]
    shots = list(_interleaved(categories, words))
    if style.style == "base":
        shown = "".join(f"{style.ticket_heading} {text}\n{style.answer_cue} {word}\n\n" for text, word in shots)
        return Prompt(prefix="\n".join(lines) + f"\n\n{shown}{style.ticket_heading}", suffix=f"\n{style.answer_cue}")
    lines.append(f"Answer with one of these words only: {', '.join(words)}.")
    think = "<think>\n\n</think>\n\n" if style.chat_template == "chatml_no_thinking" else ""
    answer = f"<|im_end|>\n<|im_start|>assistant\n{think}{style.answer_cue}"
    user = f"<|im_start|>user\n{style.ticket_heading}"
    shown = "".join(f"{user} {text}{answer} {word}<|im_end|>\n" for text, word in shots)
    system = "<|im_start|>system\n" + "\n".join(lines) + "<|im_end|>\n"
    return Prompt(prefix=f"{system}{shown}{user}", suffix=answer)


def _interleaved(categories: CategorySet, words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Examples in rounds over the categories, so that none of them owns the end of the prompt."""
    longest = max(len(c.examples) for c in categories.categories)
    for turn in range(longest):
        for word, category in zip(words, categories.categories, strict=True):
            if turn < len(category.examples):
                yield category.examples[turn], word
