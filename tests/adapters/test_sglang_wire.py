"""What is read out of SGLang's answers, value by value."""

from __future__ import annotations

import json

import pytest

from worker.adapters import sglang_wire as wire
from worker.adapters.sglang_wire import context_tokens, model_name, read_token_ids, read_vocabulary
from worker.adapters.trial import grid_step
from worker.errors import ConfigError, InvalidAnswer

BF16_HEAD = (-3.29847, -3.04847, -3.67347, -4.29847, -4.17347, -5.29847, -6.17347, -5.17347)
FP32_HEAD = (-3.22992, -2.99397, -3.62976, -4.29269, -4.17737, -5.22998, -6.15806, -5.18175)
"""The same labels behind the same prompt, SGLang 0.5.23 without and with --enable-fp32-lm-head."""


def test_the_grid_of_a_bf16_head_is_seen() -> None:
    assert grid_step(BF16_HEAD) == 1 / 8
    assert grid_step(FP32_HEAD) is None


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"tokens": None},
        {"tokens": [[1]]},
        {"tokens": [[1], [2], [3]]},
        {"tokens": [[1], 2]},
        {"tokens": [[1], [-2]]},
        {"tokens": [[1], [2.0]]},
        {"tokens": [[1], [True]]},
        {"tokens": [[1], ["2"]]},
        [],
    ],
)
def test_token_ids_are_non_negative_integers_for_each_text(answer: object) -> None:
    with pytest.raises(InvalidAnswer):
        read_token_ids(json.dumps(answer).encode(), 2)


def test_what_the_scheduler_accepts_comes_before_the_context_length() -> None:
    models = {"data": [{"id": "m", "max_model_len": 4096}]}
    assert context_tokens({"max_req_input_len": 2000}, models) == 1999
    assert context_tokens({"context_length": 1024}, {}) == 1017
    assert context_tokens({}, models) == context_tokens({"max_req_input_len": None}, models) == 4089


@pytest.mark.parametrize("models", [{}, {"data": []}, {"data": [{}]}, {"data": [{"max_model_len": "4096"}]}])
def test_an_unknown_context_length_is_a_config_error(models: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        context_tokens({}, models)


def test_the_model_name_changes_with_what_changes_scores_and_hides_folders() -> None:
    model = {"model_path": "/srv/secret/gemma3-270m/", "served_model_name": "gemma", "weight_version": "v2"}
    name = model_name(model, {"dtype": "bfloat16", "quantization": None, "enable_fp32_lm_head": True})
    assert name == "gemma (gemma3-270m) weights=v2 dtype=bfloat16 enable_fp32_lm_head=True"
    assert model_name({"model_path": "Qwen/Qwen3-4B"}, {}) == "Qwen/Qwen3-4B (Qwen/Qwen3-4B) weights=?"


def test_the_vocabulary_is_read_from_the_refusal_of_a_label_outside_it() -> None:
    assert read_vocabulary(b'{"message": "Token ID 2147483647 is out of vocabulary (vocab size: 262144)"}') == 262_144
    assert read_vocabulary(b'{"message": "no"}') is read_vocabulary(b"<html>") is None


def test_pieces_are_asked_for_one_token_each_and_believed_only_whole() -> None:
    assert json.loads(wire.detokenize_body([562, 2])) == {"tokens": [[562], [2]], "skip_special_tokens": False}
    assert wire.read_pieces(b'{"text": [" A", "<bos>"]}', 2) == [" A", "<bos>"]
    for body in (b'{"text": " A<bos>"}', b'{"text": [" A"]}', b'{"text": [" A", null]}', b"{}"):
        with pytest.raises(InvalidAnswer, match="a text for each of 2 tokens"):
            wire.read_pieces(body, 2)


def test_turns_are_asked_for_without_thoughts() -> None:
    body = json.loads(wire.turns_body([("user", "hi")]))
    assert body["messages"] == [{"role": "user", "content": "hi"}]
    assert body["chat_template_kwargs"] == {"enable_thinking": False, "thinking": False}
    assert wire.read_turns(b'{"tokens": [2, 105], "count": 2}') == [2, 105]
    with pytest.raises(InvalidAnswer, match="token ids"):
        wire.read_turns(b'{"tokens": ["a"]}')
