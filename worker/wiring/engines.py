"""Which engines the settings name, and how questions reach them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from worker.adapters.llama_cpp import LlamaCppEngine
from worker.adapters.local_tokenizer import TokenizerFile
from worker.adapters.openai_compat import OpenAICompatEngine
from worker.adapters.sglang import SGLangEngine
from worker.adapters.systemone import SystemOneEngine
from worker.adapters.writing import WritingClient
from worker.core.turns import Tokenize
from worker.errors import ConfigError, EngineUnavailable
from worker.ports import ScoringEngine
from worker.runtime.sent import Sent
from worker.settings import Settings

EMBEDDED_IN_FLIGHT = 16
"""The embedded engine scores one ticket after the other: more in flight would only wait towards their deadline."""
Engines = Sequence[tuple[str, ScoringEngine]]
"""Engines with the names under which logs and metrics know them."""


def make_engines(settings: Settings) -> Engines:
    """The engines that the settings name, by name. Raises ConfigError. Nothing is connected to yet."""
    if settings.engine == "llama_cpp":
        return [("embedded", LlamaCppEngine(settings.engine_model_path, threads=settings.engine_threads))]
    urls = [url.strip() for url in (settings.engine_url or "").split(",") if url.strip()]
    if not urls:
        raise ConfigError(
            "no engine: set ROUTER_ENGINE_URL to a server, and ROUTER_ENGINE to what it is (sglang, openai_compat, "
            "systemone), or ROUTER_ENGINE=llama_cpp for the embedded model"
        )
    # Named by number, never by address: names go into logs and metrics.
    return [(f"engine-{number}", _engine_at(url, settings)) for number, url in enumerate(urls, 1)]


def _engine_at(url: str, settings: Settings) -> ScoringEngine:
    key = settings.engine_api_key
    api_key = key.get_secret_value() if key else None
    connections, timeout_s = settings.engine_connections, settings.engine_timeout_s
    model, ca_file = settings.engine_model, settings.engine_ca_file
    match settings.engine:
        case "openai_compat":
            return OpenAICompatEngine(
                url, model=model, api_key=api_key, connections=connections, timeout_s=timeout_s, ca_file=ca_file
            )
        case "systemone":
            return SystemOneEngine(
                url, model=model, api_key=api_key, connections=connections, timeout_s=timeout_s, ca_file=ca_file
            )
        case "sglang" | "llama_cpp":
            return SGLangEngine(url, api_key=api_key, connections=connections, timeout_s=timeout_s, ca_file=ca_file)
        case _:
            assert_never(settings.engine)


async def close_engines(engines: Engines) -> None:
    for _, engine in engines:
        await engine.aclose()


async def make_writer(settings: Settings, engine: ScoringEngine) -> WritingClient:
    """What writes answers with the model behind `engine`, for a benchmark. Raises ConfigError."""
    if isinstance(engine, LlamaCppEngine):
        address, key = await engine.server()
        return WritingClient(address, api_key=key)
    if settings.engine == "systemone":
        raise ConfigError("a decision API writes nothing: set ROUTER_ENGINE to sglang, openai_compat or llama_cpp")
    url = (settings.engine_url or "").split(",")[0]
    secret = settings.engine_api_key
    return WritingClient(
        url,
        model=settings.engine_model,
        api_key=secret.get_secret_value() if secret else None,
        ca_file=settings.engine_ca_file,
    )


def first_step(settings: Settings) -> str:
    """What a process does until its engines can be asked, for its log."""
    if settings.engine == "llama_cpp":
        return "loading the model of the embedded engine, which takes minutes on a busy machine"
    return "asking the engine which model it runs"


def batch_items(settings: Settings) -> int:
    """How many tickets one call of the engine carries: engines that take them one by one gain nothing from more."""
    return 1 if settings.engine in ("llama_cpp", "systemone") else settings.batch_items


def make_sent(settings: Settings) -> Sent:
    """How questions go to the engine. Raises ConfigError on a file that is no tokenizer."""
    if settings.tokenizer_file is None:
        return Sent()
    if settings.engine == "systemone":
        raise ConfigError("a decision API has no tokens: unset ROUTER_TOKENIZER_FILE, or use another engine")
    return Sent(TokenizerFile(settings.tokenizer_file), settings.send_ids)


def tokenizer(engines: Engines) -> Tokenize:
    """The tokenizer of the first engine that answers; all run the same model."""

    async def tokenize(texts: Sequence[str]) -> list[list[int]]:
        for number, (_, engine) in enumerate(engines, 1):
            try:
                return await engine.tokenize(texts)
            except EngineUnavailable:
                if number == len(engines):
                    raise
        raise EngineUnavailable("there is no engine")

    return tokenize
