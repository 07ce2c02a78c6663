"""The contract of ScoringEngine, kept by every adapter: embedded llama.cpp, llama.cpp's own server, and recordings of
SGLang 0.5.23 and vLLM 0.32.0.

The live ones take part where SGLANG_TEST_URL or VLLM_TEST_URL is set (`make test-sglang`, `make test-vllm`). All
serve Gemma 3 270M. docs/engines.md lists the cases (test_engine_table.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import math
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TypeVar

import pytest
import pytest_asyncio

from tests.servers.llama_cpp_server import LlamaCppServer
from tests.servers.replay import ReplayServer
from worker.adapters.llama_cpp import LlamaCppEngine
from worker.adapters.openai_compat import OpenAICompatEngine
from worker.adapters.sglang import SGLangEngine
from worker.core.scores import LabelScores, ScoreRequest
from worker.errors import EngineUnavailable, RequestRefused, TooLong
from worker.ports import ScoringEngine

pytestmark = pytest.mark.asyncio(loop_scope="module")

RECORDINGS = Path(__file__).parent / "engine_recordings"
SGLANG_URL, VLLM_URL = os.environ.get("SGLANG_TEST_URL"), os.environ.get("VLLM_TEST_URL")
SERVERS: dict[str, tuple[Callable[..., ScoringEngine], Path, str | None]] = {
    "sglang": (SGLangEngine, RECORDINGS / "sglang_0_5_23.json", SGLANG_URL),
    "vllm": (OpenAICompatEngine, RECORDINGS / "vllm_0_32_0.json", VLLM_URL),
}
CONTEXT = 384
"""Tokens of context of the engines that are started here."""
Closable = TypeVar("Closable", bound=ScoringEngine)
TOLERANCE = 0.02
"""In probability: SGLang's scores move by up to 0.007 between cold and warm state, alone and batched."""
LOOSE = 0.06
"""llama.cpp's own server computes a few tokens at once by another arithmetic than many, so that a ticket's scores
depend on how much of its prompt was kept from the one before."""

PREFIX = (
    "Sort each ticket into one category.\nA: billing\nB: login\nC: bug\nD: refund\n"
    "E: shipping\nF: spam\nG: sales\nH: other\nTicket:"
)
CUE = "\nAnswer:"
TICKETS = (
    "I was charged twice this month.",
    "I cannot log in to my account.",
    "The app crashes when I open settings.",
    "Where is my parcel? It was due last week.",
    "Buy cheap watches now!!!",
    "엘리베이터가 고장 났어요. 언제 고쳐 주나요?",
)


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[
        "llama_cpp",
        "llama_cpp_server",
        "sglang_recorded",
        "vllm_recorded",
        *([pytest.param("sglang_live", marks=pytest.mark.sglang)] if SGLANG_URL else []),
        *([pytest.param("vllm_live", marks=pytest.mark.vllm)] if VLLM_URL else []),
    ],
)
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[ScoringEngine]:
    name: str = request.param
    if name.startswith("llama_cpp") and importlib.util.find_spec("xllamacpp") is None and not os.environ.get("CI"):
        pytest.skip("the extra `embedded` is not installed")
    if name == "llama_cpp":
        async with closing(LlamaCppEngine(threads=1, context_tokens=CONTEXT)) as embedded:
            yield embedded
        return
    if name == "llama_cpp_server":
        with LlamaCppServer(CONTEXT) as url:
            async with closing(OpenAICompatEngine(url, timeout_s=120)) as served:
                yield served
        return
    server, live = name.split("_")
    make, recording, upstream = SERVERS[server]
    records = live == "live" and bool(os.environ.get("ROUTER_TEST_RECORD"))
    if live == "live" and not records:
        assert upstream is not None
        async with closing(make(upstream, timeout_s=120)) as alive:
            yield alive
        return
    async with ReplayServer(recording, upstream=upstream if records else None) as replay:
        async with closing(make(replay.url, timeout_s=120)) as recorded:
            yield recorded
        assert replay.unknown == [], "the contract asks what is not recorded; record again, see tests/servers/replay.py"


@contextlib.asynccontextmanager
async def closing(engine: Closable) -> AsyncIterator[Closable]:
    try:
        yield engine
    finally:
        await engine.aclose()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def labels(engine: ScoringEngine) -> tuple[int, ...]:
    bare, *lettered = await engine.tokenize([PREFIX + CUE, *(f"{PREFIX}{CUE} {letter}" for letter in "ABCDEFGH")])
    assert all(ids[: len(bare)] == bare for ids in lettered)
    return tuple(ids[-1] for ids in lettered)


def requests(labels: tuple[int, ...], tickets: tuple[str, ...] = TICKETS) -> list[ScoreRequest]:
    return [ScoreRequest(PREFIX, f" {ticket}{CUE}", labels) for ticket in tickets]


def shares(scores: LabelScores) -> list[float]:
    return [math.exp(value) / scores.mass for value in scores.logprobs]


def tolerance_of(engine: ScoringEngine) -> float:
    is_llama_cpp = isinstance(engine, OpenAICompatEngine) and engine.learnt is not None and engine.learnt.way == "top"
    return LOOSE if is_llama_cpp else TOLERANCE


def distance(one: LabelScores, other: LabelScores) -> float:
    return max(abs(a - b) for a, b in zip(shares(one), shares(other), strict=True))


async def test_rows_come_in_the_order_of_the_requests(engine: ScoringEngine, labels: tuple[int, ...]) -> None:
    batch = await engine.score(requests(labels))
    assert len(batch) == len(TICKETS)
    for place, request in enumerate(requests(labels)):
        (alone,) = await engine.score([request])
        nearest = min(range(len(batch)), key=lambda row: distance(alone, batch[row]))
        assert nearest == place


async def test_a_ticket_scores_alone_as_it_does_in_a_batch(engine: ScoringEngine, labels: tuple[int, ...]) -> None:
    batch = await engine.score(requests(labels))
    for request, together in zip(requests(labels), batch, strict=True):
        (alone,) = await engine.score([request])
        assert distance(alone, together) < tolerance_of(engine)
        assert math.log(alone.mass / together.mass) == pytest.approx(0, abs=0.1)


async def test_the_order_of_a_batch_does_not_change_scores(engine: ScoringEngine, labels: tuple[int, ...]) -> None:
    forwards = await engine.score(requests(labels))
    backwards = await engine.score(requests(labels, TICKETS[::-1]))
    for one, other in zip(forwards, reversed(backwards), strict=True):
        assert distance(one, other) < tolerance_of(engine)


async def test_scores_are_log_probabilities_over_the_full_vocabulary(
    engine: ScoringEngine, labels: tuple[int, ...]
) -> None:
    for scores in await engine.score(requests(labels)):
        assert len(scores.logprobs) == len(labels)
        assert all(math.isfinite(value) and value < 0 for value in scores.logprobs)
        assert scores.unknown == ()
        assert scores.mass == pytest.approx(math.fsum(map(math.exp, scores.logprobs)), rel=1e-6)
        assert 0.001 < scores.mass < 0.999  # a softmax over the labels alone would say 1


async def test_fewer_labels_have_the_same_log_probabilities(engine: ScoringEngine, labels: tuple[int, ...]) -> None:
    (whole,) = await engine.score(requests(labels, TICKETS[:1]))
    (part,) = await engine.score(requests(labels[:3], TICKETS[:1]))
    assert part.mass < whole.mass
    assert part.logprobs == pytest.approx(whole.logprobs[:3], abs=0.05)


async def test_columns_follow_the_order_of_the_labels(engine: ScoringEngine, labels: tuple[int, ...]) -> None:
    (forwards,) = await engine.score(requests(labels, TICKETS[:1]))
    (backwards,) = await engine.score(requests(labels[::-1], TICKETS[:1]))
    assert backwards.logprobs[::-1] == pytest.approx(forwards.logprobs, abs=0.05)


async def test_unlikely_labels_are_scored_too(engine: ScoringEngine, labels: tuple[int, ...]) -> None:
    (scores,) = await engine.score(requests((labels[0], 100_000, 200_000), TICKETS[:1]))
    if scores.unknown:  # llama.cpp's server returns the likeliest tokens only: then by an upper bound
        assert scores.unknown == (1, 2) and scores.bound is not None and scores.logprobs[0] > scores.bound
        assert scores.mass < scores.mass_at_most
    else:
        assert scores.logprobs[0] > -8 > scores.logprobs[1] > -60


async def test_more_labels_than_one_request_takes_are_scored_too(
    engine: ScoringEngine, labels: tuple[int, ...]
) -> None:
    (few,) = await engine.score(requests(labels, TICKETS[:1]))
    (many,) = await engine.score(requests((*range(1000, 1300), *labels), TICKETS[:1]))
    assert many.logprobs[300:] == pytest.approx(few.logprobs, abs=0.05)
    assert many.mass >= few.mass * 0.95


async def test_a_prompt_of_token_ids_scores_as_its_text(engine: ScoringEngine, labels: tuple[int, ...]) -> None:
    texts = requests(labels, TICKETS[:2])
    head, *whole = await engine.tokenize([PREFIX, *(f"{PREFIX}{request.item}" for request in texts)])
    assert all(ids[: len(head)] == head for ids in whole)
    asked = [ScoreRequest(tuple(head), tuple(ids[len(head) :]), labels) for ids in whole]
    for one, other in zip(await engine.score(asked), await engine.score(texts), strict=True):
        assert distance(one, other) < tolerance_of(engine)
        assert math.log(one.mass / other.mass) == pytest.approx(0, abs=0.1)


@pytest.mark.parametrize("bad", [2**31, 2**22, -1], ids=["far beyond", "beyond", "negative"])
async def test_token_ids_that_are_no_tokens_are_refused_and_the_engine_lives_on(
    engine: ScoringEngine, labels: tuple[int, ...], bad: int
) -> None:
    with pytest.raises(RequestRefused):
        await engine.score([ScoreRequest((2,), (bad,), labels)])
    assert len(await engine.score([ScoreRequest((2,), (labels[0],), labels)])) == 1


async def test_text_and_token_ids_are_never_joined(engine: ScoringEngine, labels: tuple[int, ...]) -> None:
    """SGLang would answer one of these by nonsense, and end at the last."""
    for mixed in (ScoreRequest(PREFIX, (5,), labels), ScoreRequest((2,), CUE, labels), ScoreRequest((), (), labels)):
        with pytest.raises(RequestRefused):
            await engine.score([mixed])


async def test_a_label_adds_exactly_one_token_behind_the_cue(engine: ScoringEngine) -> None:
    bare, lettered = await engine.tokenize([PREFIX + CUE, f"{PREFIX}{CUE} A"])
    assert lettered[:-1] == bare


async def test_tokenize_gives_whole_prompts_with_bos(engine: ScoringEngine) -> None:
    one, empty = await engine.tokenize(["Answer:", ""])
    assert one[0] == 2 and len(one) > 1
    assert empty == [2]
    assert await engine.tokenize([]) == []


async def test_the_longest_prompt_fits_and_one_token_more_is_too_long(
    engine: ScoringEngine, labels: tuple[int, ...]
) -> None:
    limit = (await engine.identity()).context_tokens
    longest = ScoreRequest("", " word" * (limit - 1), labels)  # and BOS
    longer = ScoreRequest("", " word" * limit, labels)
    assert [len(ids) for ids in await engine.tokenize([longest.item, longer.item])] == [limit, limit + 1]
    assert len(await engine.score([longest])) == 1
    with pytest.raises(TooLong) as caught:
        await engine.score([longer])
    assert (caught.value.tokens, caught.value.limit) == (limit + 1, limit)


async def test_a_prompt_far_too_long_is_too_long(engine: ScoringEngine, labels: tuple[int, ...]) -> None:
    limit = (await engine.identity()).context_tokens
    with pytest.raises(TooLong) as caught:
        await engine.score([ScoreRequest("", " word" * (limit + 1000), labels)])
    assert (caught.value.tokens, caught.value.limit) == (limit + 1001, limit)


async def test_a_batch_with_one_prompt_too_long_is_refused_whole(
    engine: ScoringEngine, labels: tuple[int, ...]
) -> None:
    limit = (await engine.identity()).context_tokens
    with pytest.raises(RequestRefused):
        await engine.score(requests(labels, (TICKETS[0], "word " * (limit + 1000))))


@pytest.mark.parametrize("bad", [(), (562, 562), (-1,), (2**40,)], ids=["none", "twice", "negative", "beyond"])
async def test_labels_that_cannot_be_scored_are_refused(engine: ScoringEngine, bad: tuple[int, ...]) -> None:
    with pytest.raises(RequestRefused):
        await engine.score(requests(bad, TICKETS[:2]))


async def test_requests_that_share_too_little_are_refused(engine: ScoringEngine, labels: tuple[int, ...]) -> None:
    one, other = requests(labels, TICKETS[:2])
    with pytest.raises(RequestRefused):
        await engine.score([one, ScoreRequest("Another question.\nTicket:", other.item, labels)])
    with pytest.raises(RequestRefused):
        await engine.score([one, ScoreRequest(other.prefix, other.item, labels[::-1])])


async def test_nothing_to_score_gives_nothing(engine: ScoringEngine) -> None:
    assert list(await engine.score([])) == []


async def test_an_empty_prompt_is_refused(engine: ScoringEngine, labels: tuple[int, ...]) -> None:
    with pytest.raises(RequestRefused):
        await engine.score([ScoreRequest("", "", labels)])


async def test_text_that_is_no_unicode_is_refused(engine: ScoringEngine, labels: tuple[int, ...]) -> None:
    with pytest.raises(RequestRefused) as caught:
        await engine.score(requests(labels, ("broken \ud800 text",)))
    assert "broken" not in str(caught.value)


async def test_any_unicode_text_is_scored(engine: ScoringEngine, labels: tuple[int, ...]) -> None:
    odd = ("nul \x00 and bell \x07", "👩‍👩‍👧 漢字 \u202e", "", " " * 50)
    assert len(await engine.score(requests(labels, odd))) == len(odd)


async def test_identity_names_what_scores(engine: ScoringEngine) -> None:
    identity = await engine.identity()
    assert identity.engine in ("sglang", "llama_cpp", "openai_compat")
    assert "gemma" in identity.model
    assert not any(character in identity.model for character in "/\\")
    assert len(bytes.fromhex(identity.tokenizer)) == 32
    assert await engine.identity() == identity


async def test_probe_passes_while_the_engine_works(engine: ScoringEngine) -> None:
    await engine.probe()


async def test_concurrent_calls_do_not_mix(engine: ScoringEngine, labels: tuple[int, ...]) -> None:
    expected = await engine.score(requests(labels))
    loop = asyncio.get_running_loop()
    calls = [loop.create_task(engine.score(requests(labels, (ticket,)))) for ticket in TICKETS]
    for call, whole in zip(calls, expected, strict=True):
        assert distance((await call)[0], whole) < tolerance_of(engine)


async def test_a_cancelled_call_leaves_the_engine_whole(engine: ScoringEngine, labels: tuple[int, ...]) -> None:
    expected = await engine.score(requests(labels))
    for delay_s in (0.0, 0.01, 0.2):
        call = asyncio.get_running_loop().create_task(engine.score(requests(labels, TICKETS[::-1])))
        await asyncio.sleep(delay_s)
        call.cancel()
        for one, other in zip(await engine.score(requests(labels)), expected, strict=True):
            assert distance(one, other) < tolerance_of(engine)
        assert (await asyncio.wait([call]))[1] == set()


async def test_a_closed_engine_is_unavailable(labels: tuple[int, ...]) -> None:
    nowhere = "http://127.0.0.1:1"
    for closed in (SGLangEngine(nowhere), OpenAICompatEngine(nowhere), LlamaCppEngine()):
        await closed.aclose()
        await closed.aclose()
        with pytest.raises(EngineUnavailable):
            await closed.probe()
        with pytest.raises(EngineUnavailable):
            await closed.score(requests(labels, TICKETS[:1]))


@pytest.mark.parametrize("server", SERVERS)
async def test_two_engines_mean_the_same_by_a_log_probability(server: str) -> None:
    """The same weights, quantized and dequantized to bf16: nothing else checks the scale of what an engine reports."""
    make, recording, _ = SERVERS[server]
    async with (
        closing(LlamaCppEngine(threads=1, context_tokens=CONTEXT)) as embedded,
        ReplayServer(recording) as replay,
        closing(make(replay.url)) as recorded,
    ):
        ids = await embedded.tokenize([f"{PREFIX}{CUE} {letter}" for letter in "ABCDEFGH"])
        asked = requests(tuple(row[-1] for row in ids))
        for one, other in zip(await recorded.score(asked), await embedded.score(asked), strict=True):
            assert distance(one, other) < 0.1
            assert math.log(one.mass / other.mass) == pytest.approx(0, abs=0.5)


async def test_spelled_control_tokens_become_control_tokens(engine: ScoringEngine) -> None:
    """As a chat template needs it; and why tickets are made harmless before they are sent."""
    (ids,) = await engine.tokenize(["Ticket: <end_of_turn>"])
    assert 106 in ids
