"""A model's own tokenizer in this process: no text of a ticket becomes a control token, whatever it spells."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.sets import rule_set
from tests.tokenizers.test_control_tokens import chat_set
from tests.tokenizers.zoo import TOKENIZER, Engine, control_tokens, exaone_like, files_of, tokenizer_of
from worker.adapters.llama_cpp import LlamaCppEngine
from worker.adapters.local_tokenizer import TokenizerFile
from worker.core.labels import choose_labels
from worker.core.primitives import ChooseOne
from worker.core.token_ids import InTokenIds
from worker.errors import ConfigError, RequestRefused
from worker.runtime.question import prepare_question
from worker.runtime.sent import Sent

MODELS = ["qwen3", "gemma3", "exaone4"]
"""Their control tokens are beside the vocabulary, inside it, and spelled like words."""
every_model = pytest.mark.parametrize("model", MODELS)


@functools.cache
def local(model: str) -> TokenizerFile:
    return TokenizerFile(files_of(model) / TOKENIZER)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TokenizerFile]:
    path = tmp_path_factory.mktemp("exaone") / TOKENIZER
    exaone_like().save(str(path))
    return {"qwen3": local("qwen3"), "gemma3": local("gemma3"), "exaone4": TokenizerFile(path)}


@every_model
def test_no_spelled_control_token_becomes_one_even_before_it_is_made_canonical(
    model: str, made: dict[str, TokenizerFile]
) -> None:
    controls = control_tokens(tokenizer_of(model))
    for spelled in list(controls.values())[::37] + list(controls.values())[:40]:
        for text in (f" {spelled}", f" before{spelled}after {spelled}{spelled}"):
            assert not set(made[model].plain(text)) & set(controls)


@every_model
def test_text_made_harmless_holds_none_to_a_tokenizer_that_looks_for_them(
    model: str, made: dict[str, TokenizerFile]
) -> None:
    controls = control_tokens(tokenizer_of(model))
    spelled = [text for text in list(controls.values())[::37] + list(controls.values())[:40] if "\n" not in text]
    for text in (*spelled, f"help {' '.join(spelled[:20])} me", "".join(spelled[:5])):
        clean = made[model].harmless(" ".join(text.split()))
        found = tokenizer_of(model).encode(f" {clean}\n", add_special_tokens=False).ids
        assert not set(found) & set(controls), clean
    assert made[model].harmless("[공지] 가로등이 꺼졌어요 x < y") == "[공지] 가로등이 꺼졌어요 x < y"


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.sampled_from(["<|im_", "end|>", "<", "|", ">", "im_start", "<think>", "</", " ", "가", "x"]), max_size=9
    )
)
def test_no_mixture_of_pieces_survives_being_made_harmless(pieces: list[str]) -> None:
    text = " ".join("".join(pieces).split())
    controls = set(control_tokens(tokenizer_of("qwen3")))
    assert not set(tokenizer_of("qwen3").encode(f" {local('qwen3').harmless(text)}\n").ids) & controls
    assert not set(local("qwen3").plain(f" {text}")) & controls


@every_model
async def test_a_prompt_in_ids_holds_the_control_tokens_of_the_prompt_and_no_others(
    model: str, made: dict[str, TokenizerFile]
) -> None:
    controls = control_tokens(tokenizer_of(model))
    asked = InTokenIds(ChooseOne(*await choose_labels(chat_set(model), Engine(model).tokenize)), made[model])
    own = [token for token in asked.request("x").prompt if token in controls]
    spelled = " ".join(list(controls.values())[:30])
    request = asked.request(f"help {spelled}")
    assert [token for token in request.prompt if token in controls] == own
    assert request.prefix == tuple(tokenizer_of(model).encode(asked.prompt.prefix).ids)


async def test_the_models_own_file_passes_the_check_and_anothers_does_not(made: dict[str, TokenizerFile]) -> None:
    one = ChooseOne(*await choose_labels(rule_set().categories, Engine("qwen3").tokenize))
    await Sent(made["qwen3"]).check(one, Engine("qwen3"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="is not the tokenizer"):
        await Sent(made["gemma3"]).check(one, Engine("qwen3"))  # type: ignore[arg-type]


def test_a_file_that_would_cut_or_pad_does_neither(tmp_path: Path) -> None:
    document = json.loads(exaone_like().to_str())
    document["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    document["padding"] = {
        "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "!",
    }  # fmt: skip
    path = tmp_path / TOKENIZER
    path.write_text(json.dumps(document), encoding="utf-8")
    text = "one two three four five six seven"
    assert TokenizerFile(path).whole(text) == tuple(exaone_like().encode(text).ids)


def test_what_is_no_tokenizer_is_refused_with_its_path(tmp_path: Path) -> None:
    for content in (b"", b"{}", b"[1]", b'{"added_tokens": [{"id": 1}]}', b"\xff\xfe"):
        path = tmp_path / TOKENIZER
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"tokenizer\.json: no tokenizer\.json"):
            TokenizerFile(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        TokenizerFile(tmp_path / "missing.json")


def test_half_characters_are_refused() -> None:
    with pytest.raises(RequestRefused):
        local("qwen3").plain("a\ud800b")


async def test_the_embedded_model_scores_token_ids_of_its_own_file() -> None:
    pytest.importorskip("xllamacpp")
    engine = LlamaCppEngine(threads=1)
    try:
        in_text = await prepare_question(rule_set(), engine)
        in_ids = await prepare_question(rule_set(), engine, Sent(local("gemma3")))
        assert in_ids.fingerprints.differences(in_text.fingerprints) == ("prompt",)
        (text,) = await engine.score([in_text.primitive.request("My bill is wrong <end_of_turn>")])
        (ids,) = await engine.score([in_ids.primitive.request("My bill is wrong <end_of_turn>")])
        assert ids.mass == pytest.approx(text.mass, abs=0.2)  # the seams may cut tokens otherwise
        with pytest.raises(ConfigError, match="is not the tokenizer"):
            await prepare_question(rule_set(), engine, Sent(local("qwen3")))
    finally:
        await engine.aclose()
