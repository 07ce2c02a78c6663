"""Room: whether prompt, ticket and answer fit the model's context, and what takes the room where they do not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from worker.core.categories import CategorySet
from worker.core.prompt import Prompt, prompt_parts
from worker.core.turns import Tokenize
from worker.errors import PromptError


@dataclass(frozen=True, slots=True)
class Room:
    """Tokens. `context` holds the label too, which is never sent."""

    prefix: int
    cue: int
    ticket: int
    context: int

    @property
    def needed(self) -> int:
        return self.prefix + self.ticket + self.cue + 1

    @property
    def longest_ticket(self) -> int:
        """Tickets of more tokens go to people."""
        return self.context - self.prefix - self.cue - 1

    def __str__(self) -> str:
        total = f"{self.needed:,} tokens"
        return f"prefix {self.prefix:,} + ticket {self.ticket:,} + cue {self.cue:,} + label 1 = {total}"


async def check_room(
    categories: CategorySet, prompt: Prompt, words: Sequence[str], longest_prompt: int, tokenize: Tokenize
) -> Room:
    """`longest_prompt` is in tokens, without the label. Raises PromptError with the sum and the largest part."""
    prefix, whole = await tokenize([prompt.prefix, prompt.prefix + prompt.item("x")])
    cue = len(whole) - len(prefix) - 1  # the ticket "x" is one token
    room = Room(len(prefix), cue, categories.prompt.ticket_tokens, longest_prompt + 1)
    if room.needed <= room.context:
        return room
    parts = await _part_tokens(categories, prompt, words, tokenize)
    listed = ", ".join(f"{name} {tokens:,}" for name, tokens in parts)
    raise PromptError(
        f"the prompt does not fit the model: {room}, and its context has {room.context:,}. In the prefix: {listed}. "
        f"Shorten the {parts[0][0]}, use a model with a longer context, or lower prompt.ticket_tokens"
    )


async def _part_tokens(
    categories: CategorySet, prompt: Prompt, words: Sequence[str], tokenize: Tokenize
) -> list[tuple[str, int]]:
    """Parts of the prefix with their tokens, largest first; of the examples, the category with most is named."""
    parts = {name: text for name, text in prompt_parts(categories, words, legend=True).items() if text in prompt.prefix}
    texts = [text for text in parts.values() if text]
    own = [" ".join(category.examples) for category in categories.categories]
    rows = [len(ids) for ids in await tokenize(["x", *(f"x {text}" for text in (*texts, *own))])]
    sizes = dict(zip((name for name, text in parts.items() if text), (n - rows[0] for n in rows[1:]), strict=False))
    of_categories = rows[1 + len(texts) :]
    if "examples" in sizes:
        most = max(range(len(own)), key=of_categories.__getitem__)
        name = f"examples (most of them {categories.categories[most].id}'s, {of_categories[most] - rows[0]:,})"
        sizes = {name if key == "examples" else key: size for key, size in sizes.items()}
    return sorted(sizes.items(), key=lambda part: -part[1])
