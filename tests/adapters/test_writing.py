"""Answers in writing from a real server: llama.cpp's own, on the packaged model."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator

import pytest

from tests.servers.llama_cpp_server import LlamaCppServer
from worker.adapters.writing import WritingClient
from worker.errors import EngineUnavailable, RequestRefused

PROMPT = (
    "Ticket: my invoice is wrong\nTeam: billing\n\nTicket: I forgot my password\nTeam: login\n\n"
    "Ticket: wrong invoice\nTeam:"
)
WORDS = ("billing", "login")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    if importlib.util.find_spec("xllamacpp") is None and not os.environ.get("CI"):
        pytest.skip("the extra `embedded` is not installed")
    with LlamaCppServer(512) as address:
        yield address


async def test_each_way_of_writing_is_asked_for_as_the_server_understands_it(url: str) -> None:
    async with contextlib.aclosing(WritingClient(url, thinking_tokens=40)) as client:
        word = await client.write(PROMPT, WORDS, "word")
        assert word.text.strip() in WORDS and 0 < word.tokens <= 8
        # A schema does not make this small model come to an end: it may fill its tokens with white space.
        assert (await client.write(PROMPT, WORDS, "json")).text.lstrip().startswith("{")
        assert (await client.write(PROMPT, WORDS, "thinking")).tokens == 40


async def test_a_prompt_that_does_not_fit_is_refused(url: str) -> None:
    async with contextlib.aclosing(WritingClient(url)) as client:
        with pytest.raises(RequestRefused):
            await client.write("word " * 2000, WORDS, "word")


async def test_a_server_that_is_not_there_is_unavailable() -> None:
    async with contextlib.aclosing(WritingClient("http://127.0.0.1:1")) as client:
        with pytest.raises(EngineUnavailable):
            await client.write(PROMPT, WORDS, "word")
