"""No ticket writes a control token: for every one of every tokenizer, in the real prompt, read as a server reads it."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.sets import category_set
from tests.tokenizers.zoo import ZOO, config_of, control_tokens, files_of, tokenizer_of
from worker.adapters.chat_template import load_turns
from worker.core.categories import CategorySet
from worker.core.normalise import canonical
from worker.core.prompt import Prompt, build_prompt
from worker.core.turns import TEMPLATES, Turns

WEAVERS = ("\u200b", "\u200d", "\u2060", "\ufeff", "\xad", "\u202e", "\u3164", "\uffa0", "\U000e0041", "\ufe0f", "\x00")
"""Zero width, joiners, bidi, Hangul fillers, tags, a variation selector, a control."""

every_tokenizer = pytest.mark.parametrize("model", ZOO)


def turns_of(model: str) -> Turns:
    if model == "exaone4":
        return TEMPLATES["exaone4"]
    if config_of(model).get("chat_template") is None:  # gpt-oss
        begin, end = "<|start|>{}<|message|>", "<|end|>"
        user = end + begin.format("user")
        answer = f"{end}<|start|>assistant<|channel|>final<|message|>"
        return Turns(
            start=begin.format("system"), system_user=user, user_assistant=answer, assistant_user=user, answer=answer
        )
    return load_turns(files_of(model) / "tokenizer_config.json")


def chat_set(model: str) -> CategorySet:
    base = category_set()
    style = base.prompt.model_copy(update={"style": "chat", "turns": turns_of(model)})
    return base.model_copy(update={"prompt": style})


@functools.cache
def prompts(model: str) -> tuple[Prompt, ...]:
    words = ["billing", "login", "bug"]
    return tuple(build_prompt(s, words, legend=False) for s in (category_set(), chat_set(model)))


def control_ids(model: str, texts: list[str]) -> list[list[int]]:
    controls = control_tokens(tokenizer_of(model))
    rows = tokenizer_of(model).encode_batch(texts)
    return [[token for token in row.ids if token in controls] for row in rows]


def assert_harmless(model: str, tickets: list[str]) -> None:
    """Each ticket, canonical and in the prompt, leaves exactly the control tokens of the prompt itself."""
    for prompt in prompts(model):
        prefix = prompt.prefix[-40:]  # what is read at the seams does not depend on the rest
        own, *rows = control_ids(model, [prefix + prompt.item("x"), *(prefix + prompt.item(t) for t in tickets)])
        bad = [ticket for ticket, row in zip(tickets, rows, strict=True) if row != own]
        assert not bad, (len(bad), bad[:10])


@every_tokenizer
def test_read_raw_every_one_is_a_control_token(model: str) -> None:
    spelled = list(control_tokens(tokenizer_of(model)).values())
    assert len(spelled) > 15
    assert all(control_ids(model, spelled))


@every_tokenizer
def test_no_spelled_control_token_becomes_one(model: str) -> None:
    spelled = list(control_tokens(tokenizer_of(model)).values())
    assert_harmless(model, [canonical(text) for text in spelled])
    assert_harmless(model, [canonical(f"before{text}after {text}{text}") for text in spelled])


@every_tokenizer
def test_removing_an_invisible_character_recreates_none(model: str) -> None:
    spelled = list(control_tokens(tokenizer_of(model)).values())
    for number, weaver in enumerate(WEAVERS):
        assert_harmless(model, [canonical(weaver.join(text)) for text in spelled[number :: len(WEAVERS)]])


@every_tokenizer
def test_a_ticket_that_ends_in_the_middle_of_one_does_not_swallow_the_next_turn(model: str) -> None:
    spelled = list(control_tokens(tokenizer_of(model)).values())
    shapes = {text.translate(str.maketrans("0123456789", "0" * 10)): text for text in spelled}.values()
    tickets = {text[:cut] for text in shapes for cut in range(1, len(text))}
    assert_harmless(model, sorted({canonical(f"help {ticket}") for ticket in tickets}))


@pytest.mark.parametrize("model", ["qwen3", "exaone4", "deepseek_v3"])
@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.one_of(st.sampled_from("<>|[]/｜＜﹤［ ▁PI:Kk\n\u200b\u3164\u0338"), st.integers(0, 10**6)), max_size=12
    )
)
def test_no_mixture_of_pieces_becomes_one(model: str, parts: list[str | int]) -> None:
    spelled = list(control_tokens(tokenizer_of(model)).values())
    text = "".join(part if isinstance(part, str) else _half(spelled[part % len(spelled)], part) for part in parts)
    assert_harmless(model, [canonical(text)])


def _half(text: str, number: int) -> str:
    """The whole, or one of its halves."""
    middle = len(text) // 2
    return (text, text[:middle], text[middle:])[number % 3]
