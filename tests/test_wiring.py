"""Wiring: the engine that the settings name is the one that is made, and it is asked as it can be asked."""

from __future__ import annotations

import asyncio
from typing import get_args

import pytest

from worker.adapters.llama_cpp import LlamaCppEngine
from worker.adapters.openai_compat import OpenAICompatEngine
from worker.adapters.sglang import SGLangEngine
from worker.adapters.systemone import SystemOneEngine
from worker.errors import ConfigError
from worker.ports import ScoringEngine
from worker.settings import EngineName, Settings
from worker.wiring import batch_items, make_engines

ADAPTERS: dict[EngineName, type[ScoringEngine]] = {
    "sglang": SGLangEngine,
    "llama_cpp": LlamaCppEngine,
    "openai_compat": OpenAICompatEngine,
    "systemone": SystemOneEngine,
}
SERVERS: list[EngineName] = ["sglang", "openai_compat", "systemone"]


def settings(engine: EngineName, url: str | None = "http://127.0.0.1:1") -> Settings:
    return Settings(engine=engine, engine_url=url, engine_model="m")


def test_every_engine_that_can_be_named_has_an_adapter() -> None:
    assert set(ADAPTERS) == set(get_args(EngineName))


@pytest.mark.parametrize("engine", ADAPTERS)
async def test_the_engine_that_is_named_is_made(engine: EngineName) -> None:
    ((_, made),) = make_engines(settings(engine))
    assert type(made) is ADAPTERS[engine]
    await made.aclose()


@pytest.mark.parametrize("engine", SERVERS)
async def test_every_address_gets_an_engine_with_a_name_that_does_not_tell_it(engine: EngineName) -> None:
    made = make_engines(settings(engine, "http://one.test:1, http://two.test:2"))
    assert [name for name, _ in made] == ["engine-1", "engine-2"]
    assert all(type(each) is ADAPTERS[engine] for _, each in made)
    await asyncio.gather(*(each.aclose() for _, each in made))


@pytest.mark.parametrize("engine", SERVERS)
def test_a_server_without_an_address_is_an_error_that_says_what_to_set(engine: EngineName) -> None:
    with pytest.raises(ConfigError, match="ROUTER_ENGINE_URL"):
        make_engines(settings(engine, None))


def test_engines_that_take_tickets_one_by_one_are_sent_one_by_one() -> None:
    sent = {engine: batch_items(settings(engine)) for engine in ADAPTERS}
    assert sent == {"sglang": 32, "llama_cpp": 1, "openai_compat": 32, "systemone": 1}
