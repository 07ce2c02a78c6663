"""Labels on the tokenizers of real models: up to a thousand, the same ones every time, with few calls."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.core.sets import category_set
from tests.tokenizers.test_control_tokens import chat_set
from tests.tokenizers.zoo import REAL, SAMPLES, Engine, tokenizer_of
from worker.adapters.files import load_artefact, load_rule_set
from worker.core.categories import CategorySet
from worker.core.labels import ALPHABETS, FULL_CHECK_CHARS, allocate_words, choose_labels
from worker.core.normalise import NORMALISER_VERSION
from worker.core.prompt import build_prompt
from worker.runtime.question import choose_primitive

every_real_tokenizer = pytest.mark.parametrize("model", REAL)


def many(model: str, count: int, *, examples: int = 0) -> CategorySet:
    """Categories whose ids are several tokens each."""
    lettered = category_set(*(f"c{n}_zqx" for n in range(count)), label=False, examples=examples)
    return lettered.model_copy(update={"prompt": chat_set(model).prompt})


@every_real_tokenizer
async def test_a_thousand_categories_get_a_thousand_different_tokens(model: str) -> None:
    engine = Engine(model)
    prompt, labels = await choose_labels(many(model, 1000), engine.tokenize)
    assert len(set(labels.token_ids)) == len(set(labels.words)) == 1000
    assert engine.calls <= 5  # turns, ids as words, letters, all alphabets, the labels behind the real prompt
    assert engine.characters < 20_000_000
    assert f"{labels.words[999]}: C999_Zqx (about c999_zqx)\n" in prompt.prefix
    whole = prompt.prefix + prompt.item("help")
    for at in (0, 26, 500, 999):
        ids = tokenizer_of(model).encode(f"{whole} {labels.words[at]}").ids
        assert ids == [*tokenizer_of(model).encode(whole).ids, labels.token_ids[at]]


@every_real_tokenizer
async def test_up_to_26_categories_get_letters(model: str) -> None:
    _, labels = await choose_labels(many(model, 26), Engine(model).tokenize)
    assert "".join(labels.words) == "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@every_real_tokenizer
async def test_a_few_hundred_categories_get_one_alphabet(model: str) -> None:
    _, labels = await choose_labels(many(model, 300), Engine(model).tokenize)
    assert set(labels.words) <= set(ALPHABETS["letter pairs"])


async def test_the_same_categories_get_the_same_labels_again() -> None:
    one, other = [await choose_labels(many("qwen3", 700), Engine("qwen3").tokenize) for _ in range(2)]
    assert one == other


async def test_the_legend_and_all_examples_in_the_prompt_do_not_change_the_tokens() -> None:
    """Beyond FULL_CHECK_CHARS only some labels are checked behind the whole prompt."""
    wanted = many("qwen3", 400, examples=2)
    prompt, labels = await choose_labels(wanted, Engine("qwen3").tokenize)
    assert len(prompt.prefix) * 400 > FULL_CHECK_CHARS
    whole = prompt.prefix + prompt.item("help")
    for word, token in list(zip(labels.words, labels.token_ids, strict=True))[7::40]:
        assert tokenizer_of("qwen3").encode(f"{whole} {word}").ids[-1] == token


async def test_hangul_syllables_are_among_what_a_korean_vocabulary_offers() -> None:
    prompt = build_prompt(category_set(), ["a", "b", "c"], legend=False)
    words = await allocate_words(prompt, 1700, Engine("gemma3").tokenize)
    assert {"가", "나", "다"} <= set(words)


CALIBRATED = sorted(path.parent for path in SAMPLES.glob("*/calibration.json"))


@pytest.mark.parametrize("folder", CALIBRATED, ids=lambda folder: folder.name)
async def test_the_shipped_calibrations_are_of_this_prompt_and_these_labels(folder: Path) -> None:
    """They were fitted on Gemma 3: whatever changes here would send every ticket to people."""
    artefact = load_artefact(folder / "calibration.json")
    assert artefact is not None
    primitive = await choose_primitive(load_rule_set(folder).categories, None, Engine("gemma3").tokenize)
    prints = artefact.fingerprints
    assert (primitive.prompt_fingerprint, primitive.labels_fingerprint) == (prints.prompt, prints.labels)
    assert prints.normaliser == NORMALISER_VERSION
