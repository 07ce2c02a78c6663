"""Chat templates on the tokenizers and templates of real models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tests.core.sets import category_set
from tests.tokenizers.test_control_tokens import chat_set
from tests.tokenizers.zoo import CONFIG, ZOO, Engine, config_of, control_tokens, files_of, tokenizer_of
from worker.adapters.chat_template import load_turns
from worker.core.labels import choose_labels
from worker.core.turns import TEMPLATES, ChatTemplate, fit_turns
from worker.errors import PromptError

FAMILIES: list[tuple[ChatTemplate, str]] = [
    ("chatml", "qwen3"),
    ("chatml_no_thinking", "qwen3"),
    ("gemma", "gemma3"),
    ("llama3", "llama3_1"),
    ("exaone", "exaone4"),
    ("exaone4", "exaone4"),
]
WITH_TEMPLATE = [model for model in ZOO if model not in ("gptoss", "exaone4")]


@pytest.mark.parametrize(("name", "model"), [("gemma", "gemma3"), ("llama3", "llama3_1")])
def test_a_named_template_is_the_models_own(name: ChatTemplate, model: str) -> None:
    assert load_turns(files_of(model) / CONFIG) == TEMPLATES[name]


def test_qwen_is_chatml_with_the_think_block_closed_before_the_answer() -> None:
    qwen = load_turns(files_of("qwen3") / CONFIG)
    same = ("start", "system_user", "user_assistant", "assistant_user")
    assert all(getattr(qwen, field) == getattr(TEMPLATES["chatml"], field) for field in same)
    assert qwen.answer == TEMPLATES["chatml_no_thinking"].answer


@pytest.mark.parametrize("model", WITH_TEMPLATE)
def test_turns_write_what_the_template_itself_writes(model: str) -> None:
    config, turns = config_of(model), load_turns(files_of(model) / CONFIG)
    template = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(
        str(config["chat_template"])
    )
    said = [
        "Sort the tickets.\nA: one",
        "Ticket: 가로등",
        "Category: A",
        "Ticket: <b>two</b>",
        "Category: B",
        "Ticket: three",
    ]
    roles = ["system", "user", "assistant", "user", "assistant", "user"]
    messages = [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)]
    eos = config["eos_token"]
    theirs = template.render(
        messages=messages,
        add_generation_prompt=True,
        enable_thinking=False,
        bos_token="",
        eos_token=eos["content"] if isinstance(eos, dict) else eos,
    )
    joints = (turns.system_user, turns.user_assistant, turns.assistant_user, turns.user_assistant, turns.assistant_user)
    ours = turns.start + "".join(text + joint for text, joint in zip(said, (*joints, turns.answer), strict=True))
    assert ours == theirs


@pytest.mark.parametrize(("name", "model"), FAMILIES)
async def test_labels_are_single_tokens_behind_every_named_template(name: ChatTemplate, model: str) -> None:
    base = category_set(examples=2)
    style = base.prompt.model_copy(update={"style": "chat", "chat_template": name})
    prompt, labels = await choose_labels(base.model_copy(update={"prompt": style}), Engine(model).tokenize)
    whole = prompt.prefix + prompt.item("엘리베이터가 멈췄어요")
    tokenizer = tokenizer_of(model)
    for word, token in zip(labels.words, labels.token_ids, strict=True):
        assert tokenizer.encode(f"{whole} {word}").ids == [*tokenizer.encode(whole).ids, token]


@pytest.mark.parametrize("model", ZOO)
async def test_labels_are_single_tokens_behind_the_models_own_template(model: str) -> None:
    _, labels = await choose_labels(chat_set(model), Engine(model).tokenize)
    assert labels.words == ("billing", "login", "bug")


@pytest.mark.parametrize(("name", "model"), [("gemma", "qwen3"), ("chatml", "gemma3"), ("llama3", "exaone4")])
async def test_a_template_of_another_family_is_refused(name: ChatTemplate, model: str) -> None:
    with pytest.raises(PromptError, match=r"not this model's: .*\(\d+ tokens\) is plain text"):
        await fit_turns(TEMPLATES[name], Engine(model).tokenize)


@pytest.mark.parametrize("model", ["gemma3", "llama3_1", "deepseek_v3"])
async def test_there_is_one_begin_of_sequence_whoever_adds_it(model: str) -> None:
    prompt, _ = await choose_labels(chat_set(model), Engine(model).tokenize)
    bos = load_turns(files_of(model) / CONFIG).bos
    ids = tokenizer_of(model).encode(prompt.prefix).ids
    assert [at for at, token in enumerate(ids) if control_tokens(tokenizer_of(model)).get(token) == bos] == [0]


def test_a_jinja_file_takes_tokens_from_the_configuration_beside_it(tmp_path: Path) -> None:
    config = config_of("qwen3")
    (tmp_path / "chat_template.jinja").write_text(str(config.pop("chat_template")), encoding="utf-8")
    (tmp_path / CONFIG).write_text(json.dumps(config), encoding="utf-8")
    whole = load_turns(files_of("qwen3") / CONFIG)
    assert load_turns(tmp_path / "chat_template.jinja") == whole
    assert load_turns(tmp_path / CONFIG) == whole


def test_without_a_list_in_the_configuration_control_tokens_come_from_the_tokenizer(tmp_path: Path) -> None:
    for name in (CONFIG, "tokenizer.json"):
        shutil.copy(files_of("deepseek_v3") / name, tmp_path)
    assert "<｜User｜>" in load_turns(tmp_path / CONFIG).control
    (tmp_path / "tokenizer.json").unlink()
    assert load_turns(tmp_path / CONFIG).control == ()
