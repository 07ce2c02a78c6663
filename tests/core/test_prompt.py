"""Prompt and labels: what is sent, and that every label is one token behind it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.core.sets import category_set
from worker.core.labels import check_labels, choose_labels
from worker.core.prompt import build_prompt
from worker.errors import LabelError


class Words:
    """A tokenizer of whole words; listed ones are split in two."""

    def __init__(self, *split: str, same: Sequence[str] = ()) -> None:
        self.split = split
        self.same = same
        self.ids: dict[str, int] = {}

    async def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def encode(self, text: str) -> list[int]:
        pieces: list[str] = []
        for word in text.replace("\n", " \n ").split(" "):
            pieces += [word[:1], word[1:]] if word in self.split else ["=" if word in self.same else word]
        return [self.ids.setdefault(piece, len(self.ids)) for piece in pieces]


def test_the_base_prompt_is_static_examples_then_the_ticket_then_a_short_cue() -> None:
    prompt = build_prompt(category_set("a", "b", examples=2), ["red", "blue"], legend=False)
    assert prompt.prefix == (
        "Sort the tickets.\n\n"
        "Ticket: a example 0\nCategory: red\n\nTicket: b example 0\nCategory: blue\n\n"
        "Ticket: a example 1\nCategory: red\n\nTicket: b example 1\nCategory: blue\n\n"
        "Ticket:"
    )
    assert prompt.item("hello") == " hello\nCategory:"


def test_the_chat_prompt_opens_and_closes_every_turn_itself() -> None:
    base = category_set("a", "b")
    style = base.prompt.model_copy(update={"style": "chat", "chat_template": "chatml_no_thinking"})
    prompt = build_prompt(base.model_copy(update={"prompt": style}), ["red", "blue"], legend=False)
    whole = prompt.prefix + prompt.item("hello")
    assert whole.startswith("<|im_start|>system\nSort the tickets.\nred: A (about a)\nblue: B (about b)\n")
    assert whole.endswith(
        "<|im_start|>user\nTicket: hello<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nCategory:"
    )
    assert whole.count("<|im_start|>") == whole.count("<|im_end|>") + 1


@pytest.mark.parametrize("field", ["instruction", "ticket_heading", "answer_cue"])
def test_the_fingerprint_follows_every_part_of_the_prompt(field: str) -> None:
    base = category_set("a", "b")
    other = base.model_copy(update={"prompt": base.prompt.model_copy(update={field: "Else:"})})
    words = ["red", "blue"]
    first, second = (build_prompt(s, words, legend=False).fingerprint for s in (base, other))
    assert first != second


async def test_stated_labels_that_are_not_single_tokens_are_refused_by_name() -> None:
    with pytest.raises(LabelError, match=r"login \(2 tokens\)") as caught:
        await choose_labels(category_set(), Words("login"))
    assert caught.value.offenders == ("login (2 tokens)",)


async def test_ids_that_are_not_single_tokens_give_way_to_letters_with_a_legend() -> None:
    prompt, labels = await choose_labels(category_set(label=False), Words("login"))
    assert labels.words == ("A", "B", "C")
    assert "B: Login (about login)" in prompt.prefix
    assert "Category: B\n" in prompt.prefix


async def test_ids_that_are_single_tokens_are_the_labels() -> None:
    prompt, labels = await choose_labels(category_set(label=False), Words())
    assert labels.words == ("billing", "login", "bug")
    assert len(set(labels.token_ids)) == 3
    assert "A: " not in prompt.prefix


async def test_two_labels_of_the_same_token_are_refused() -> None:
    with pytest.raises(LabelError, match="the same token: login, bug"):
        await choose_labels(category_set(), Words(same=("login", "bug")))


async def test_a_label_that_changes_the_tokens_before_it_is_refused() -> None:
    async def merging(texts: Sequence[str]) -> list[list[int]]:
        return [[1, 2] if n == 0 else [1, 9, 10 + n] for n, _ in enumerate(texts)]

    with pytest.raises(LabelError, match="single token"):
        await check_labels(build_prompt(category_set(), ["x", "y", "z"], legend=False), ["x", "y", "z"], merging)


async def test_more_categories_than_letters_need_stated_labels() -> None:
    many = category_set(*(f"c{n}" for n in range(30)), label=False)
    with pytest.raises(LabelError, match="state a label for each"):
        await choose_labels(many, Words("c7"))
