"""What is sent to SGLang as token ids, and how a server that cuts long prompts is found out."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest

from tests.servers.stub_engine import VOCABULARY, StubEngine
from worker.adapters.sglang import SGLangEngine
from worker.core.scores import ScoreRequest
from worker.errors import ConfigError, RequestRefused, TooLong

LABELS = (562, 603)


@pytest.fixture
async def stub() -> AsyncIterator[StubEngine]:
    async with StubEngine() as server:
        yield server


@pytest.fixture
async def engine(stub: StubEngine) -> AsyncIterator[SGLangEngine]:
    async with contextlib.aclosing(SGLangEngine(stub.url)) as made:
        yield made


async def test_an_id_outside_the_vocabulary_never_reaches_the_server(stub: StubEngine, engine: SGLangEngine) -> None:
    """SGLang 0.5.23 on the CPU ends at one."""
    await engine.score([ScoreRequest((2, 5), (VOCABULARY - 1,), LABELS)])
    before = stub.counters.requests
    for bad in (VOCABULARY, 2**31, -1, True):
        with pytest.raises(RequestRefused):
            await engine.score([ScoreRequest((2, 5), (bad,), LABELS)])
    assert stub.counters.requests == before


async def test_without_a_known_vocabulary_only_text_is_sent(stub: StubEngine, engine: SGLangEngine) -> None:
    stub.behaviour.states_vocabulary = False
    with pytest.raises(RequestRefused, match="only text"):
        await engine.score([ScoreRequest((2,), (5,), LABELS)])
    assert len(await engine.score([ScoreRequest("Ticket:", " x", LABELS)])) == 1


async def test_ids_that_are_too_long_are_too_long(stub: StubEngine, engine: SGLangEngine) -> None:
    stub.behaviour.context_tokens = 50
    with pytest.raises(TooLong) as caught:
        await engine.score([ScoreRequest((2,) * 30, (5,) * 30, LABELS)])
    assert (caught.value.tokens, caught.value.limit) == (60, 50)


async def test_truncation_that_the_server_does_not_admit_is_found_by_a_long_prompt(
    stub: StubEngine, engine: SGLangEngine
) -> None:
    stub.behaviour.hides_auto_truncate = True
    assert (await engine.identity()).notes == ()
    stub.behaviour.auto_truncate = True
    with pytest.raises(ConfigError, match="allow-auto-truncate"):
        await engine.identity()


async def test_truncation_that_cannot_be_found_out_is_noted(stub: StubEngine, engine: SGLangEngine) -> None:
    stub.behaviour.hides_auto_truncate, stub.behaviour.states_vocabulary = True, False
    assert any("allow-auto-truncate" in note for note in (await engine.identity()).notes)
