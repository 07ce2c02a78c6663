"""Room: a prompt that leaves none for a ticket is refused with the sum, and with what is largest in it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.core.sets import category_set
from worker.core.categories import CategorySet
from worker.core.prompt import build_prompt
from worker.core.room import Room, check_room
from worker.errors import PromptError

WORDS = ["billing", "login", "bug"]


async def words(texts: Sequence[str]) -> list[list[int]]:
    return [list(range(len(text.split()))) for text in texts]


async def room_of(categories: CategorySet, longest_prompt: int, *, legend: bool = False) -> Room:
    prompt = build_prompt(categories, WORDS, legend=legend)
    return await check_room(categories, prompt, WORDS, longest_prompt, words)


def with_ticket_tokens(categories: CategorySet, tokens: int) -> CategorySet:
    return categories.model_copy(update={"prompt": categories.prompt.model_copy(update={"ticket_tokens": tokens})})


async def test_a_prompt_that_just_fits_is_taken_and_one_token_less_is_refused() -> None:
    wanted = with_ticket_tokens(category_set(), 100)
    room = await room_of(wanted, 10_000)
    assert (room.prefix, room.cue, room.ticket) == (3 + 3 * 6 + 1, 1, 100)
    assert room.needed == room.prefix + 100 + 1 + 1
    exact = await room_of(wanted, room.needed - 1)  # the label is never sent
    assert exact.longest_ticket == 100
    with pytest.raises(PromptError):
        await room_of(wanted, room.needed - 2)


async def test_the_sum_and_the_largest_part_are_said() -> None:
    base = category_set("a", "b", "c")
    long = base.categories[1].model_copy(update={"examples": ("word " * 50,)})
    wanted = base.model_copy(update={"categories": (base.categories[0], long, base.categories[2])})
    with pytest.raises(PromptError) as caught:
        await room_of(wanted, 99)
    said = str(caught.value)
    assert "prefix 69 + ticket 256 + cue 1 + label 1 = 327 tokens, and its context has 100" in said
    assert "In the prefix: examples (most of them b's, 50) 65, instruction 3" in said
    assert "Shorten the examples" in said


async def test_a_legend_can_be_the_largest_part() -> None:
    base = category_set()
    long = base.categories[0].model_copy(update={"description": "word " * 80})
    wanted = base.model_copy(update={"categories": (long, *base.categories[1:])})
    with pytest.raises(PromptError, match="Shorten the legend"):
        await room_of(wanted, 100, legend=True)
