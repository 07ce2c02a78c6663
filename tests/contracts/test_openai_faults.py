"""Every way in which an OpenAI-compatible server can say too little, or something else than what was asked."""

from __future__ import annotations

import contextlib
import math
import time
import traceback
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from tests.servers.openai_stub import KEY, VOCABULARY, OpenAIStub, vocabulary_logprobs
from tests.servers.stub_engine import gzip_bomb
from worker.adapters.openai_compat import OpenAICompatEngine, Reading
from worker.core.scores import ScoreRequest
from worker.errors import ConfigError, EngineUnavailable, InvalidAnswer, RequestRefused, RouterError, TooLong

DEADLINE_S = 0.8
PREFIX = "Sort the ticket.\nTicket:"
SECRET_TEXT = "Kim Min-ji lives at 12 Secret Street"
LABELS = tuple(range(700, 712))


@pytest.fixture
async def stub() -> AsyncIterator[OpenAIStub]:
    async with OpenAIStub() as server:
        yield server


@contextlib.asynccontextmanager
async def engine_on(stub: OpenAIStub, **options: Any) -> AsyncIterator[OpenAICompatEngine]:
    engine = OpenAICompatEngine(stub.url, **{"timeout_s": 20.0, **options})
    try:
        yield engine
    finally:
        await engine.aclose()


def asked(labels: tuple[int, ...] = LABELS, *texts: str) -> list[ScoreRequest]:
    return [ScoreRequest(PREFIX, f" {text}\nAnswer:", labels) for text in texts or ("refund me", "it crashes")]


def truth(request: ScoreRequest) -> list[float]:
    return vocabulary_logprobs(str(request.prompt), {})


async def test_labels_asked_for_by_id_all_come_back_exactly(stub: OpenAIStub) -> None:
    async with engine_on(stub) as engine:
        for request, row in zip(asked(), await engine.score(asked()), strict=True):
            assert row.unknown == ()
            assert row.logprobs == pytest.approx([truth(request)[label] for label in LABELS], abs=1e-9)
        assert engine.learnt is not None and engine.learnt.way == "ids"


async def test_more_labels_than_a_request_takes_are_asked_for_in_several(stub: OpenAIStub) -> None:
    labels = tuple(range(300))
    async with engine_on(stub) as engine:
        (row, _) = await engine.score(asked(labels))
    sizes = [len(request["logprob_token_ids"]) for request in stub.requests[-3:]]
    assert sizes == [128, 128, 44]
    assert row.unknown == () and len(row.logprobs) == 300
    assert row.logprobs[250] == pytest.approx(truth(asked()[0])[250], abs=1e-9)


@pytest.mark.parametrize("chat_shape", [False, True], ids=["completions", "chat"])
async def test_labels_beyond_the_likeliest_tokens_are_unknown_and_truly_bounded(
    stub: OpenAIStub, chat_shape: bool
) -> None:
    stub.takes_ids, stub.chat_shape, stub.cap = False, chat_shape, 20
    labels = tuple(range(0, VOCABULARY, 10))
    async with engine_on(stub) as engine:
        for request, row in zip(asked(labels), await engine.score(asked(labels)), strict=True):
            values = [truth(request)[label] for label in labels]
            assert 0 < len(row.unknown) < len(labels)
            for place, value in enumerate(values):
                if place in row.unknown:
                    assert value <= row.logprobs[place]
                else:
                    assert row.logprobs[place] == pytest.approx(value, abs=1e-9)
            assert row.mass <= math.fsum(map(math.exp, values)) <= row.mass_at_most
        assert engine.learnt == Reading("top", 20)


async def test_a_sampled_token_that_was_added_from_below_bounds_nothing(stub: OpenAIStub) -> None:
    stub.takes_ids = False
    async with engine_on(stub) as engine:
        await engine.identity()
        (request,) = asked(LABELS, "refund me")
        stub.sampled = min(range(VOCABULARY), key=truth(request).__getitem__)
        (row,) = await engine.score([request])
    for place in row.unknown:
        assert truth(request)[LABELS[place]] <= row.logprobs[place]


@pytest.mark.parametrize(("cap", "read"), [(20, 20), (7, 7), (0, 1024), (300, 300)])
async def test_the_cap_of_a_server_is_found_out(stub: OpenAIStub, cap: int, read: int) -> None:
    stub.takes_ids, stub.cap = False, cap
    async with engine_on(stub) as engine:
        identity = await engine.identity()
        assert engine.learnt == Reading("top", read)
        assert any("likeliest tokens" in note for note in identity.notes)


async def test_values_after_the_sampler_are_seen_and_another_model(stub: OpenAIStub) -> None:
    async with engine_on(stub) as engine:
        raw = await engine.identity()
    for takes_ids in (True, False):
        stub.processed, stub.takes_ids = True, takes_ids
        async with engine_on(stub) as engine:
            processed = await engine.identity()
        assert any("processed_logprobs" in note for note in processed.notes)
        assert processed.model != raw.model
    assert not any("processed" in note for note in raw.notes)


async def test_logits_in_place_of_log_probabilities_are_refused(stub: OpenAIStub) -> None:
    stub.offset = 9.0
    async with engine_on(stub) as engine:
        with pytest.raises(ConfigError, match="raw_logits"):
            await engine.identity()
        with pytest.raises(InvalidAnswer):
            await engine.score(asked())


async def test_a_server_that_stops_returning_labels_is_not_believed(stub: OpenAIStub) -> None:
    async with engine_on(stub) as engine:
        await engine.score(asked())
        stub.takes_ids = False
        with pytest.raises(InvalidAnswer, match="did not come back"):
            await engine.score(asked())


async def test_a_label_that_the_sampler_excluded_is_no_score(stub: OpenAIStub) -> None:
    """vLLM writes -9999.0 for it."""
    async with engine_on(stub) as engine:
        await engine.score(asked())
        stub.spoil = lambda answer: first(answer).update({f"token_id:{LABELS[3]}": -9999.0})
        with pytest.raises(InvalidAnswer, match="1 of 12 labels"):
            await engine.score(asked())


def first(answer: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = answer["choices"][0]["logprobs"]["top_logprobs"][0]
    return found


SPOILT: dict[str, Callable[[dict[str, Any]], object]] = {
    "no choices": lambda answer: answer.pop("choices"),
    "one choice too few": lambda answer: answer["choices"].pop(),
    "one choice twice": lambda answer: answer["choices"].__setitem__(1, answer["choices"][0]),
    "no index": lambda answer: answer["choices"][0].pop("index"),
    "index from 1": lambda answer: [choice.update(index=choice["index"] + 1) for choice in answer["choices"]],
    "no logprobs": lambda answer: answer["choices"][0].update(logprobs=None),
    "no position": lambda answer: answer["choices"][0]["logprobs"].update(top_logprobs=[]),
    "empty position": lambda answer: answer["choices"][0]["logprobs"].update(top_logprobs=[{}]),
    "null": lambda answer: first(answer).update({f"token_id:{LABELS[0]}": None}),
    "text": lambda answer: first(answer).update({f"token_id:{LABELS[0]}": "-1.0"}),
    "boolean": lambda answer: first(answer).update({f"token_id:{LABELS[0]}": False}),
    "above 1": lambda answer: first(answer).update({f"token_id:{LABELS[0]}": 0.5}),
    "together above 1": lambda answer: first(answer).update({f"token_id:{label}": -0.1 for label in LABELS}),
    "a name without id": lambda answer: first(answer).update({" A": -3.0}),
    "a negative id": lambda answer: first(answer).update({"token_id:-5": -3.0}),
    "another label": lambda answer: first(answer).pop(f"token_id:{LABELS[5]}"),
}


@pytest.mark.parametrize("name", SPOILT)
async def test_a_bad_answer_is_refused_whole(stub: OpenAIStub, name: str) -> None:
    async with engine_on(stub) as engine:
        await engine.score(asked())
        stub.spoil = SPOILT[name]
        with pytest.raises(InvalidAnswer):
            await engine.score(asked())


async def test_choices_are_matched_by_their_index(stub: OpenAIStub) -> None:
    async with engine_on(stub) as engine:
        right = await engine.score(asked())
        stub.spoil = lambda answer: answer["choices"].reverse()
        assert await engine.score(asked()) == right


async def test_tokens_that_are_named_by_text_only_are_a_config_error(stub: OpenAIStub) -> None:
    stub.named_by = "text"
    async with engine_on(stub) as engine:
        with pytest.raises(ConfigError, match="by their text only"):
            await engine.identity()


async def test_too_long_is_counted_here_whatever_the_server_says(stub: OpenAIStub) -> None:
    async with engine_on(stub) as engine:
        assert (await engine.identity()).context_tokens == 255
        with pytest.raises(TooLong) as caught:
            await engine.score(asked(LABELS, "word " * 400))
        assert caught.value.limit == 255 and caught.value.tokens > 400
        with pytest.raises(RequestRefused):
            await engine.score(asked(LABELS, "short", "word " * 400))


async def test_a_server_that_cuts_long_prompts_is_refused(stub: OpenAIStub) -> None:
    stub.truncates = True
    async with engine_on(stub) as engine:
        with pytest.raises(ConfigError, match="not cut it"):
            await engine.identity()


async def test_one_of_several_models_has_to_be_named(stub: OpenAIStub) -> None:
    stub.models = ["small", "large"]
    async with engine_on(stub) as engine:
        with pytest.raises(ConfigError, match=r"ROUTER_ENGINE_MODEL.*\(small, large\)"):
            await engine.identity()
    async with engine_on(stub, model="large") as engine:
        assert "large" in (await engine.identity()).model
    async with engine_on(stub, model="medium") as engine:
        with pytest.raises(ConfigError, match="medium"):
            await engine.identity()


async def test_a_model_that_went_away_blames_no_ticket(stub: OpenAIStub) -> None:
    async with engine_on(stub) as engine:
        await engine.score(asked())
        stub.models = ["another"]
        with pytest.raises(EngineUnavailable, match="does not serve the model"):
            await engine.score(asked())
        with pytest.raises(ConfigError):
            await OpenAICompatEngine(stub.url, model="stub").identity()


async def test_a_server_without_a_stated_context_length_is_a_config_error(stub: OpenAIStub) -> None:
    stub.context_length = None
    async with engine_on(stub) as engine:
        with pytest.raises(ConfigError, match="context length"):
            await engine.identity()


async def test_a_wrong_key_blames_the_set_up_and_no_ticket(stub: OpenAIStub) -> None:
    stub.api_key = KEY
    async with engine_on(stub, api_key=KEY) as engine:
        assert len(await engine.score(asked())) == 2
    for options in ({}, {"api_key": "another"}):
        async with engine_on(stub, **options) as engine:
            with pytest.raises(EngineUnavailable, match="API key"):
                await engine.score(asked())
            with pytest.raises(ConfigError, match="API key"):
                await engine.identity()


async def test_an_address_as_openai_clients_write_it_is_taken(stub: OpenAIStub) -> None:
    async with contextlib.aclosing(OpenAICompatEngine(f"{stub.url}/v1/")) as engine:
        assert (await engine.identity()).engine == "openai_compat"


FAULTS: dict[str, tuple[type[RouterError], str]] = {
    "hang": (EngineUnavailable, "within"),
    "gzip_bomb": (InvalidAnswer, "compressed"),
    "huge": (InvalidAnswer, "more than"),
    "redirect": (EngineUnavailable, "redirects"),
    "overloaded": (EngineUnavailable, "429"),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_the_exchange_is_as_hardened_as_with_sglang(stub: OpenAIStub, fault: str) -> None:
    gzip_bomb()
    async with engine_on(stub, timeout_s=DEADLINE_S if fault == "hang" else 20.0) as engine:
        await engine.identity()
        stub.fault = fault
        error, words = FAULTS[fault]
        started = time.perf_counter()
        with pytest.raises(error, match=words) as caught:
            await engine.score(asked(LABELS, SECRET_TEXT))
        assert time.perf_counter() - started < 20.0
        if fault == "overloaded":
            assert isinstance(caught.value, EngineUnavailable) and caught.value.retry_after_s == 7.0
        told = "".join(traceback.format_exception(caught.value))
        told = "\n".join(line for line in told.splitlines() if not line.startswith(("  File", "    ")))
        assert "Secret" not in told and "127.0.0.1" not in told
